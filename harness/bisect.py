"""Which of a run's stacked changes breaks the model, and at which of its rounding points.

The kept changes are applied in order. If the whole stack fails the layer-by-layer gate, halving
finds the shortest stack that fails; its last change is judged on its own region, where the
reference is replayed with each interior rounding elided, and with sets of them. A region's verdict
looks at some of its nodes; where it passes, all of them are looked at.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from harness import seeds, verdicts
from harness.cases import record, storages
from harness.certificate import STANDS_ON, Applied
from harness.certify import enabled_of
from harness.errors import UserError
from harness.examine import Examination
from harness.explain import Sample
from harness.judge import judge_model, judge_region
from harness.ledger import Ledger
from harness.operators import is_real
from harness.records import Attempt, PointReport, Record, Status, Verdict
from harness.routes import Deviations
from harness.steps import steps
from harness.workload import Workload, free_bytes
from optimized.change import Change, nodes, reached, share
from optimized.plan import Enabled, apply_enabled

Judge = Callable[[int], Verdict]  # of the first so many changes
SAMPLES = 3  # calls that differ, kept to explain the difference
CASE_SHARE = 64  # one call's arguments may take 1/64 of the free memory


@dataclass(frozen=True, kw_only=True)
class Stacked:
    """What a run stands on: its model, and what it kept, in order."""

    model: str
    preset: str
    device: str
    seed: int  # of the weights
    verdict_seed: int  # of the whole model's verdict, if the run came to it
    changes: tuple[Enabled, ...]


@dataclass(frozen=True, kw_only=True)
class Bisection(Record):
    """The first change with which the stack fails, and what it does at its rounding points."""

    index: int  # counted from 1
    change: str
    backend: str
    model_verdict: Verdict  # of the stack up to it
    region_verdict: Verdict  # of the change alone, on every node if not on those drawn
    points: tuple[PointReport, ...]  # that it does not treat as its contract says
    judged: tuple[int, ...]  # the lengths of the stacks that were judged, in that order


def read_run(ledger: Ledger) -> Stacked:
    """The run in `ledger`; UserError if it kept nothing."""
    header = ledger.header()
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
    judged = ledger.all("model_verdict", Verdict)
    return Stacked(
        model=header["model"],
        preset=header["preset"],
        device=header["device"],
        seed=header["seed"],
        verdict_seed=judged[-1].seed if judged else seeds.draw(),
        changes=(
            *(enabled_of(Applied.from_json(line)) for line in header.get(STANDS_ON, [])),
            *changes,
        ),
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
    if region.passed:
        say("it passes on the nodes that were drawn; now every node")
        region = judge_every_node(alone, change, workload, seed)
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


def judge_every_node(
    candidate: nn.Module, change: Change, workload: Workload, seed: int
) -> Verdict:
    """Judge all nodes of the change's region as the reference calls them in small steps, one step
    at a time, without derived cases."""
    reference = workload.model
    exam = Examination(change.contract, storages(reference, candidate), seed)
    exam.golden = False
    names = reached(candidate, nodes(reference, change.region))
    deviations = {name: Deviations() for name in names}
    samples: list[Sample] = []
    limit = free_bytes(workload.device) // CASE_SHARE
    for step in steps(workload, seed, sizes=False):
        cases, notes = record(reference, names, [step], limit)
        exam.notes += notes
        for case in cases:
            ours, mine = (m.get_submodule(case.node) for m in (reference, candidate))
            prepared = exam.prepare(ours, case)
            exam.measure_noise(ours, prepared, 1, deviations[case.node])
            seen = exam.judge(ours, mine, prepared, deviations[case.node])
            if seen is None:
                return verdicts.verdict(exam, "region", samples)
            exam.weigh_points(ours, prepared, seen)
            differs = any(
                is_real(t.dtype) and bool((seen.results[name] != t).any())
                for name, t in prepared.contract.outputs.items()
            )
            if differs and len(samples) < SAMPLES:
                samples.append(Sample(ours, prepared, seen))
    return verdicts.verdict(exam, "region", samples)


def _departs(point: PointReport) -> bool:
    return point.observed in ("kept", "elided", "added") and point.observed != point.declared
