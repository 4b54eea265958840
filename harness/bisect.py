"""Which of a run's stacked changes breaks the model, and at which of its rounding points.

The kept changes are applied in order. If the whole stack fails the layer-by-layer gate, halving
finds the shortest stack that fails; its last change is judged on its own region, where the
reference is replayed with each interior rounding elided, and with sets of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from harness.errors import UserError
from harness.judge import judge_model, judge_region
from harness.ledger import Ledger
from harness.records import Attempt, PointReport, Record, Status, Verdict
from harness.workload import Workload
from optimized.change import share
from optimized.plan import Enabled, apply_enabled

Judge = Callable[[int], Verdict]  # of the first so many changes


@dataclass(frozen=True, kw_only=True)
class Stacked:
    """What a run stands on: its model, and what it kept, in order."""

    model: str
    preset: str
    device: str
    seed: int
    changes: tuple[Enabled, ...]


@dataclass(frozen=True, kw_only=True)
class Bisection(Record):
    """The first change with which the stack fails, and what it does at its rounding points."""

    index: int  # counted from 1
    change: str
    backend: str
    model_verdict: Verdict  # of the stack up to it
    region_verdict: Verdict  # of the change alone
    points: tuple[PointReport, ...]  # that it does not treat as its contract says
    judged: tuple[int, ...]  # the lengths of the stacks that were judged, in that order


def read_run(ledger: Ledger) -> Stacked:
    """The run in `ledger`; UserError if it kept nothing."""
    header = ledger.last("run")
    assert header is not None  # Ledger.open has seen it
    kept = [a for a in ledger.all("attempt", Attempt) if a.status is Status.KEPT]
    if not kept:
        raise UserError(f"{ledger.directory} kept no change, so there is nothing to bisect")
    changes = tuple(
        Enabled(
            name=a.name,
            backend=a.backend,
            knobs=a.knobs,
            domain=a.region_verdict.domain if a.region_verdict else None,
        )
        for a in kept
    )
    return Stacked(
        model=header["model"],
        preset=header["preset"],
        device=header["device"],
        seed=header["seed"],
        changes=changes,
    )


def bisect(
    workload: Workload, changes: tuple[Enabled, ...], seed: int, say: Callable[[str], None]
) -> Bisection | None:
    """The first change that makes the stack fail; None if the whole stack passes."""
    judged: list[int] = []

    def judge(count: int) -> Verdict:
        judged.append(count)
        say(f"judging the model with the first {count} of {len(changes)} change(s)")
        model = stacked(workload, changes[:count])
        verdict = judge_model(workload.model, model, workload, seed, full=True, drifts=False)
        say("passed" if verdict.passed else f"failed: {verdict.reason}")
        return verdict

    found = first_failing(len(changes), judge)
    if found is None:
        return None
    count, verdict = found
    enabled = changes[count - 1]
    say(f"judging {enabled.name} ({enabled.backend}) on its region, point by point")
    alone = stacked(workload, (enabled,))
    change = enabled.change()
    region = judge_region(workload.model, alone, change, enabled.backend, workload, seed)
    return Bisection(
        index=count,
        change=change.name,
        backend=enabled.backend,
        model_verdict=verdict,
        region_verdict=region,
        points=tuple(p for p in region.points if _departs(p)),
        judged=tuple(judged),
    )


def first_failing(count: int, judge: Judge) -> tuple[int, Verdict] | None:
    """The length of the shortest failing stack found by halving, and its verdict.

    None of the changes passes; None if all `count` pass too. The stack one shorter passes.
    """
    worst = judge(count)
    if worst.passed:
        return None
    passing, failing = 0, count
    while failing - passing > 1:
        middle = (passing + failing) // 2
        verdict = judge(middle)
        if verdict.passed:
            passing = middle
        else:
            failing, worst = middle, verdict
    return failing, worst


def stacked(workload: Workload, changes: tuple[Enabled, ...]) -> nn.Module:
    """The model with these changes, sharing the reference's parameters; UserError if one cannot be
    applied."""
    model = share(workload.model)
    for enabled in changes:
        try:
            apply_enabled(model, enabled)
        except ValueError as error:
            raise UserError(str(error)) from error
    return model


def _departs(point: PointReport) -> bool:
    return point.observed in ("kept", "elided", "added") and point.observed != point.declared
