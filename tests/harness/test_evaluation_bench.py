"""`bench --evaluations`: which candidates, on how many workers, and what is said of the ratio."""

import contextlib
import os
from dataclasses import replace
from typing import Any

import pytest

from harness import __main__, command_evaluations
from harness.command_bench import require_meaning
from harness.command_evaluations import Throughput, candidates, possible, sentences, summed, timed
from harness.errors import UserError
from harness.evaluation import Evaluated
from harness.executors.local import CPU, Local
from harness.workload import Workload
from optimized.catalog import for_model
from tests.harness.evaluated import START, asked


def throughput(workers: int, seconds: float) -> Throughput:
    return Throughput(workers=workers, candidates=6, passed=5, seconds=seconds, lost=0)


def test_candidates_are_the_catalogued_changes_that_run_here() -> None:
    workload = Workload.load("beam", "mini", "cpu", seed=5)
    found = candidates(workload, None)
    pairs = for_model(workload.model, "cpu")
    assert [(e.change, e.backend) for e in found] == [(c.name, i.backend) for c, i in pairs]
    assert len(found) > 5 and {e.seed for e in found} == {5}
    assert candidates(workload, 2) == found[:2]
    assert next(workload.model.parameters()).is_meta  # the weights are the workers'


def test_the_command_takes_numbers_of_workers() -> None:
    a = __main__.parser().parse_args(["bench", "--evaluations"])
    require_meaning(a, "evaluations")
    assert (a.workers, a.candidates) == ([1, 2], None)
    a = __main__.parser().parse_args(["bench", "--evaluations", "--workers", "1", "4"])
    assert a.workers == [1, 4]
    with pytest.raises(UserError, match="not allowed with argument --evaluations"):
        __main__.parser().parse_args(["bench", "--evaluations", "--peers"])


def test_only_workers_with_cards_of_their_own_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert possible("cpu", [1, 2]) == [1, 2]
    assert possible("cuda", [1, 2]) == [1]
    with pytest.raises(UserError, match="--workers 2 needs as many cards, 1 are visible here"):
        possible("cuda", [2, 3])
    (said,) = sentences("cuda", [throughput(1, 60)], [1, 2], True, 0.0)
    assert said == (
        "not run with 2 workers: each needs a card of its own, and this machine shows 1"
    )


def test_the_ratio_and_what_keeps_it_down_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [throughput(1, 60), throughput(2, 40)]
    assert both[0].per_minute == 6 and both[1].per_minute == 9
    ratio = "2 workers judge 1.50 times as many candidates a minute as 1"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert sentences("cpu", both, [1, 2], True, 0.4) == [ratio]
    busy, last = sentences("cpu", both, [1, 2], True, 2.5)
    assert busy.startswith("too few free cores: 2 workers shared 4 with other work (load 2.5 ")
    assert last == ratio
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert sentences("cpu", both, [1, 2], True, 0.4) == [ratio]
    busy, _ = sentences("cpu", both, [1, 2], True, 0.6)
    assert busy.startswith("too few free cores: 2 workers shared 2 with other work (load 0.6 ")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    few, last = sentences("cpu", both, [1, 2], True, 0.0)
    assert few == "too few cores: 2 workers shared 1" and last == ratio
    wrong, *_ = sentences("cpu", both, [1, 2], False, 0.0)
    assert wrong == "verdicts differ between the runs: one of them is wrong"


@pytest.mark.long
def test_workers_are_timed_once_they_have_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    original = command_evaluations.many

    def noted(executor: Local, *given: Any) -> list[Evaluated]:
        seen.extend(worker.key for worker in executor.team)
        return original(executor, *given)

    monkeypatch.setattr(command_evaluations, "many", noted)
    wanted = [asked("exits"), replace(asked("honest_in_place"), timed=False)]
    with contextlib.closing(Local(START, [CPU] * 2)) as executor:
        found, seconds = timed(executor, wanted)
    assert seen == [wanted[0].key] * 2
    row = summed(2, found, seconds)
    assert (row.workers, row.candidates, row.passed, row.lost) == (2, 2, 1, 0)
    assert 0 < row.seconds < 60 and row.per_minute == 120 / row.seconds
