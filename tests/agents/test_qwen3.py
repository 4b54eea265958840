"""An architecture that the product does not know, from another library, in one file."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from harness.judge import judge_region, self_test
from harness.selftest import regions
from harness.workload import Workload
from optimized.change import Change, Contract, Implementation, apply_change, share
from tests.layout import ROOT

FILE = str(Path(__file__).with_name("qwen3_moe.py"))
NORM = "qwen3_moe_rmsnorm"


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload.load(FILE, "mini", "cpu")


def normed(node: Any, _: Any) -> Callable[[Tensor], Tensor]:
    """As the reference: the normed row is rounded before its weight."""

    def forward(x: Tensor) -> Tensor:
        wide = x.float()
        scale = (wide.square().mean(-1, keepdim=True) + node.variance_epsilon).rsqrt()
        return (wide * scale).to(x.dtype) * node.weight

    return forward


def rounded_once(node: Any, _: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        wide = x.float()
        scale = (wide.square().mean(-1, keepdim=True) + node.variance_epsilon).rsqrt()
        return (wide * scale * node.weight.float()).to(x.dtype)

    return forward


def verdict(workload: Workload, build: Callable[..., Any]):
    change = Change(
        name=build.__name__,
        region=NORM,
        summary="the norm",
        contract=Contract(numerics="reduction"),
        implementations=(Implementation(backend="torch", devices=("cpu",), build=build),),
    )
    model = share(workload.model)
    assert len(apply_change(model, change, "torch")) == 9  # four a layer and the last
    return judge_region(workload.model, model, change, "torch", workload, 0)


def test_its_regions_are_found_and_replayed(workload: Workload) -> None:
    self_test(workload.model, workload, 0)
    assert NORM in regions(workload.model)


def test_a_norm_that_rounds_as_it_does_passes(workload: Workload) -> None:
    found = verdict(workload, normed)
    assert (found.passed, found.reason) == (True, None)


def test_a_norm_that_rounds_once_is_refused_by_the_librarys_own_line(workload: Workload) -> None:
    found = verdict(workload, rounded_once)
    assert not found.passed and found.reason is not None
    assert "`hidden_states.to(input_dtype)`" in found.reason
    assert "modeling_qwen3_moe.py" in found.reason


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_profiles_it_proposes_and_decides(tmp_path: Path) -> None:
    """Whether what Inductor makes is faster is this machine's business."""
    words = ["--target", "decode-bs1", "--model", FILE, "--device", "cpu"]
    limits = ["--max-changes", "1", "--budget-minutes", "4", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "agents.run", *words, *limits, "--json"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    (change,) = summary["changes"]
    assert change["status"] in ("kept", "rejected")
    assert change["verdict"]["passed"] or "region verdict" in change["reason"]
    assert summary["final"]["decode_us"] > 0
