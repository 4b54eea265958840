"""A kernel that leaves out several roundings is rejected with all of them named."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.explain import listed
from harness.records import Verdict
from harness.replay import Point
from harness.workload import Workload
from optimized.change import Contract
from tests.harness.judged import change, judged

FILE = str(Path(__file__).with_name("toy_sets.py"))
NAMES = {
    "norm": "norm: (wide * scale).to(x.dtype)",
    "halve": "halve: x * 0.5",
    "add": "add: x + residual",
    "weigh": "weigh: x * weight",
}


@functools.cache
def sets() -> Workload:
    return Workload.load(FILE, "sets", "cpu")


def without(dropped: set[str]) -> Callable[[nn.Module], Callable[..., Any]]:
    """The region in FP32, rounded at its points save the dropped ones."""

    def build(_: nn.Module) -> Callable[..., Any]:
        def rounded(x: Tensor, name: str) -> Tensor:
            return x if name in dropped else x.bfloat16().float()

        def forward(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
            wide = x.float()
            y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
            y = rounded(rounded(y, "norm") * 0.5, "halve")
            y = rounded(rounded(y + residual.float(), "add") * weight.float(), "weigh")
            return torch.tanh(y).to(x.dtype)

        return forward

    return build


def verdict_without(*dropped: str) -> Verdict:
    made = change("tail", without(set(dropped)), Contract(numerics="reduction"))
    return judged(sets(), made)


@pytest.mark.parametrize(
    "dropped",
    [
        pytest.param(("add", "weigh"), id="two"),
        pytest.param(("norm", "halve"), id="two-that-are-invisible-alone"),
        pytest.param(("norm", "halve", "weigh"), id="three"),
        pytest.param(("norm", "halve", "add", "weigh"), id="all"),
    ],
)
def test_every_rounding_that_is_left_out_is_named(dropped: tuple[str, ...]) -> None:
    verdict = verdict_without(*dropped)
    assert verdict.reason is not None
    assert verdict.reason.startswith("rounds once where the reference rounds at ")
    named = re.findall(r"`([^`]+)` \((\S*toy_sets\.py):(\d+)\)", verdict.reason)
    assert [name for name, _, _ in named] == [NAMES[name] for name in dropped]
    lines = Path(FILE).read_text().splitlines()
    for name, _, line in named:
        assert name.partition(": ")[2] in lines[int(line) - 1]
    share = re.search(r"; ([\d.]+)% of the elements show it$", verdict.reason)
    assert share is not None and 1 < float(share[1]) < 100
    observed = {p.point for p in verdict.points if p.observed == "elided"}
    assert observed == {NAMES[name] for name in dropped}


@pytest.mark.parametrize("dropped", ["norm", "halve"])
def test_a_rounding_that_shows_in_no_result_may_be_left_out(dropped: str) -> None:
    verdict = verdict_without(dropped)
    assert verdict.passed, verdict.reason
    observed = {p.point: p.observed for p in verdict.points}
    assert observed[NAMES[dropped]] == "not visible"


def test_points_are_listed_as_a_sentence() -> None:
    made = [
        Point(name=n, operator="", module="", source=f"f.py:{i}", shape=(), dtype="", index=i)
        for i, n in enumerate("abc")
    ]
    assert listed(tuple(made[:1])) == "`a` (f.py:0)"
    assert listed(tuple(made[:2])) == "`a` (f.py:0) and at `b` (f.py:1)"
    assert listed(tuple(made)) == "`a` (f.py:0), `b` (f.py:1) and at `c` (f.py:2)"


def test_a_verdict_whose_explanation_does_not_fit_into_memory_stands(monkeypatch) -> None:
    def too_large(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("harness.verdicts.explain", too_large)
    verdict = verdict_without("add", "weigh")
    assert not verdict.passed
    assert "does not round as its contract says at `add: x + residual`" in str(verdict.reason)
    assert any(note.startswith("what explains it was not looked for") for note in verdict.notes)
