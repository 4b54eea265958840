"""The examples in the pages do what the pages say."""

import re
from pathlib import Path

import pytest
import torch

from harness.workload import Workload
from optimized.catalog import load_change
from optimized.change import apply_change, share
from tests.layout import ROOT

README = (ROOT / "README.md").read_text()
PAGES = "".join((ROOT / p / "README.md").read_text() for p in ("reference", "optimized"))


@pytest.fixture
def example(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The path of a file that holds the pages' example of this name."""
    pattern = rf"<!-- example: {request.param} -->\n```python\n(.*?)```"
    (code,) = re.findall(pattern, PAGES, flags=re.DOTALL)
    path = tmp_path / f"my_{request.param}.py"
    path.write_text(code)
    return str(path)


@pytest.mark.parametrize("example", ["model"], indirect=True)
def test_the_model_example_prefills_and_decodes(example: str) -> None:
    """Feeding a prompt at once or token by token gives the same last logits."""
    workload = Workload.load(example, "auto", "cpu")
    model, config = workload.model, workload.config
    ids = torch.randint(workload.vocabulary, (2, 5))
    positions = torch.arange(5).expand(2, 5)
    at_once = model(ids, positions, workload.file.cache(config, 2, 8, "cpu"))
    cache = workload.file.cache(config, 2, 8, "cpu")
    for i in range(5):
        stepwise = model(ids[:, i : i + 1], positions[:, i : i + 1], cache)
    assert at_once.shape == (2, 1, config.vocabulary)
    assert at_once.std() > 0
    # The two orders of summation may round each block's output, a BF16, to a neighbour.
    ulp = torch.finfo(torch.bfloat16).eps * at_once.abs().max()
    assert (at_once - stepwise).abs().max() <= config.layers * ulp


@pytest.mark.parametrize("example", ["model"], indirect=True)
def test_the_model_example_runs_every_kind_of_target(example: str) -> None:
    workload = Workload.load(example, "auto", "cpu")
    for name in ("decode-bs1", "prefill-8x2048"):
        target = workload.target(name)
        logits = workload.model(*workload.inputs(target).args)
        assert logits.shape == (target.batch, 1, workload.vocabulary)
        assert logits.isfinite().all()


@pytest.mark.parametrize("example", ["change"], indirect=True)
def test_the_change_example_replaces_every_node_and_keeps_the_bits(example: str) -> None:
    workload = Workload.load("beam", "mini", "cpu")
    change = load_change(example)
    candidate = share(workload.model)
    names = apply_change(candidate, change, change.implementations[0].backend)
    target = workload.target("decode-bs8")
    expected = workload.model(*workload.inputs(target).args)
    actual = candidate(*workload.inputs(target).args)
    assert len(names) == workload.config.layers
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("example", ["change"], indirect=True)
def test_the_change_example_leaves_other_dtypes_to_the_reference(example: str) -> None:
    change = load_change(example)
    guard = change.implementations[0].guard
    assert guard is not None
    half = torch.ones(2, dtype=torch.float16)
    assert guard(None, half.bfloat16(), half.bfloat16()) is None
    assert "float16" in (guard(None, half, half) or "")


def test_every_command_in_the_readme_exists() -> None:
    commands = set(re.findall(r"python -m ([a-z.]+)", README))
    missing = [
        name
        for name in commands
        if not (ROOT / f"{name.replace('.', '/')}.py").is_file()
        and not (ROOT / name.replace(".", "/") / "__main__.py").is_file()
    ]
    assert missing == []


def test_every_make_target_in_the_readme_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"`make ([a-z]+)", README)) <= targets
    assert {"run", "test", "lint", "bench"} <= targets
