"""torch's ptxas for as long as torch.compile works, and Triton's version of it asked for anew."""

import functools
import os
from pathlib import Path

import pytest
import torch
from triton.backends.nvidia import compiler

from harness.assembler import VARIABLE, torchs_assembler


@pytest.fixture
def asked(monkeypatch) -> list[str | None]:
    """Which assembler Triton has asked for its version, in order."""
    found: list[str | None] = []

    @functools.lru_cache
    def version(arch: int = 80) -> str:
        found.append(os.environ.get(VARIABLE))
        return "Triton's" if found[-1] is None else "torch's"

    monkeypatch.setattr(compiler, "get_ptxas_version", version)
    monkeypatch.delenv(VARIABLE, raising=False)
    return found


@pytest.fixture
def own(monkeypatch, tmp_path: Path) -> str:
    """The place of torch's assembler, of a torch that has one."""
    path = tmp_path / "bin" / "ptxas"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    return str(path)


def versions() -> list[str]:
    return [compiler.get_ptxas_version(90) for _ in range(2)]


def test_torchs_is_taken_and_given_back(asked, own):
    assert versions() == ["Triton's"] * 2
    with torchs_assembler():
        assert versions() == ["torch's"] * 2
    assert versions() == ["Triton's"] * 2
    assert asked == [None, own, None]


def test_it_is_given_back_when_compiling_fails(asked, own):
    with pytest.raises(RuntimeError, match="no kernel"), torchs_assembler():
        raise RuntimeError("no kernel")
    assert VARIABLE not in os.environ and versions() == ["Triton's"] * 2


def test_the_users_stays(asked, own, monkeypatch):
    monkeypatch.setenv(VARIABLE, "/usr/bin/ptxas")
    with torchs_assembler():
        versions()
    assert asked == ["/usr/bin/ptxas"] and os.environ[VARIABLE] == "/usr/bin/ptxas"


def test_a_torch_without_one_changes_nothing(asked, own):
    Path(own).chmod(0o644)
    with torchs_assembler():
        assert versions() == ["Triton's"] * 2
    assert asked == [None]
