"""Kernels beside each other: what is asked for, what is timed in turns, what is counted."""

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.bench_jobs import Job
from harness.errors import UserError
from harness.workload import Workload
from optimized import triton_support
from traces import side_by_side
from traces.side_by_side import compare_kernels, flops_of, times_in_turns


class Waits(nn.Module):
    def __init__(self, name: str, seconds: float, seen: list[str]) -> None:
        super().__init__()
        self.name, self.seconds, self.seen = name, seconds, seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.name)
        time.sleep(self.seconds)
        return x


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("swiglu", ("swiglu", None)),
        ("swiglu:triton", ("swiglu", "triton")),
        ("inductor:swiglu", ("inductor:swiglu", None)),
        ("my/file.py:torch", ("my/file.py", "torch")),
    ],
)
def test_a_backend_stands_behind_a_colon(text: str, parts: tuple[str, str | None]) -> None:
    assert side_by_side._split(text) == parts


def test_rounds_run_every_side_once_in_changing_order() -> None:
    seen: list[str] = []
    sides: dict[str, nn.Module] = {
        name: Waits(name, seconds, seen) for name, seconds in (("a", 0.001), ("b", 0.003))
    }
    times = times_in_turns(sides, (torch.zeros(1),), seconds=0.0)
    assert [len(us) for us in times.values()] == [side_by_side.FEWEST] * 2
    rounds = np.array(seen[-2 * side_by_side.FEWEST :]).reshape(-1, 2)
    assert {tuple(pair) for pair in rounds} == {("a", "b"), ("b", "a")}
    assert 1000 < np.median(times["a"]) < 2500 < np.median(times["b"]) < 5000


def test_operations_are_those_of_the_reference() -> None:
    node = nn.Linear(6, 10, bias=False)
    job = Job(region="linear", shapes="", rows=3, nbytes=0, calls=[(torch.zeros(3, 6),)])
    assert flops_of(node, job) == 2 * 3 * 6 * 10


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload.load("beam", "mini", "cpu")


def test_kernels_that_would_run_on_a_card_are_not_judged_on_a_cpu(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_support, "INTERPRETED", False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UserError, match="set TRITON_INTERPRET=1 and restart"):
        compare_kernels(workload, ["swiglu:triton"])


def test_what_does_not_exist_is_refused(workload: Workload, monkeypatch: Any) -> None:
    monkeypatch.setattr(side_by_side, "interpret", lambda: None)
    for change, said in (("no_such", "unknown change"), ("swiglu:no_such", "has no backend")):
        with pytest.raises(UserError, match=said):
            compare_kernels(workload, [change])
