"""What the reports compute from a run: speed-ups, predictions against results, layers compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from harness.records import (
    Attempt,
    Audit,
    Baseline,
    KernelRow,
    LayerMap,
    Paired,
    PointReport,
    Status,
    Timing,
    Verdict,
)
from reports.run import Run

NOT_VISIBLE = "not visible"
BASELINE_TITLES = {
    "eager": "plain PyTorch, eager",
    "graph": "plain PyTorch, one CUDA graph",
    "compile": "torch.compile",
}


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times faster, with its 95% interval; `sure` if that is beyond noise."""

    value: float
    interval: tuple[float, float]
    sure: bool


def ratio(base: Timing, after: Timing) -> Ratio:
    """From two medians of other minutes: the interval combines the far ends of both."""
    low, high = after.interval_us
    within = base.interval_us[0] / high, base.interval_us[1] / low
    sure = not within[0] <= 1 <= within[1]
    return Ratio(value=base.median_us / after.median_us, interval=within, sure=sure)


def paired_ratio(pair: Paired) -> Ratio:
    """From interleaved pairs, in which the machine's drift cancels."""
    ends = [1 + g / c for g in pair.gain_interval_us for c in pair.candidate_interval_us]
    value = 1 + pair.gain_us / pair.candidate_us
    sure = pair.is_faster or pair.is_slower
    return Ratio(value=value, interval=(min(ends), max(ends)), sure=sure)


@dataclass(frozen=True, kw_only=True)
class BaselineRow:
    """One baseline beside the result; without figures `baseline.absent` says why."""

    title: str
    baseline: Baseline
    decode: Ratio | None
    prefill: Ratio | None


def baseline_rows(run: Run) -> list[BaselineRow]:
    return [
        BaselineRow(
            title=BASELINE_TITLES.get(name, name),
            baseline=baseline,
            decode=_against(run, baseline, "decode"),
            prefill=_against(run, baseline, "prefill"),
        )
        for name, baseline in run.baselines.items()
    ]


def _against(run: Run, baseline: Baseline, kind: str) -> Ratio | None:
    """The result over one baseline: from the closing pairs where they ran that very baseline. A
    result that is the model as it was stands as it was timed beside the baselines: what changed
    until the end is the machine's drift."""
    timing, after = getattr(baseline, kind), run.after
    if timing is None or after is None:
        return None
    if run.unchanged and (before := run.before(kind)) is not None:
        return ratio(timing, getattr(before, kind))
    if (result := alone(run, baseline, kind)) is not None:
        return ratio(timing, result)
    return paired_ratio(getattr(after.pairs, kind))


def alone(run: Run, baseline: Baseline, kind: str) -> Timing | None:
    """The result as it was timed by itself, as the baselines were, where its factor over this one
    is of that; None where it is of the closing pairs, or there is no result."""
    after = run.after
    if after is None or run.unchanged:
        return None
    paired = after.pairs is not None and baseline is run.before(kind)
    return None if paired else getattr(after, kind)


def ends(run: Run, kind: str) -> tuple[Timing | None, Timing | None]:
    """The unchanged model and the result: of the closing pairs, in which the machine's drift
    cancels, or, until there are any, as each was timed."""
    before, after = run.before(kind), run.after
    if before and after and after.pairs and not run.unchanged:
        p: Paired = getattr(after.pairs, kind)
        if p.base_interval_us is not None:
            start = Timing(median_us=p.base_us, interval_us=p.base_interval_us, samples=p.pairs)
            low_high = p.candidate_interval_us
            return start, Timing(median_us=p.candidate_us, interval_us=low_high, samples=p.pairs)
    return getattr(before, kind, None), getattr(after, kind, None)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Gain per step of the target, as predicted from the trace and as measured."""

    attempt: Attempt
    predicted_us: float
    realised_us: float

    @property
    def error_us(self) -> float:
        return abs(self.predicted_us - self.realised_us)


def predictions(run: Run) -> list[Prediction]:
    """Every change with both figures, in the order tried."""
    return [
        Prediction(attempt=a, predicted_us=a.predicted_us, realised_us=pair.gain_us)
        for a in run.changes()
        if a.predicted_us is not None and (pair := run.pair(a)) is not None
    ]


def median_error_us(run: Run) -> float | None:
    """The median of |predicted - realised|, or None where nothing was measured."""
    errors = [p.error_us for p in predictions(run)]
    return median(errors) if errors else None


@dataclass(frozen=True, kw_only=True)
class Step:
    """Where the model stands once one change was tried; `tried_us` is the candidate's own time."""

    label: str
    name: str  # of the change
    status: Status | None  # None: the model before any change
    level: Timing | None  # None: as before
    tried_us: float | None


def steps(run: Run, kind: str) -> list[Step]:
    """The path of `kind` ("decode" or "prefill") over all changes, from the unchanged model on."""
    before = run.before(kind)
    if before is None:
        return []
    path = [
        Step(label="start", name="start", status=None, level=getattr(before, kind), tried_us=None)
    ]
    measured = {m.name: m for m in run.measured}
    for attempt in run.changes():
        paired: Paired | None = getattr(attempt.latency, kind) if attempt.latency else None
        level = None
        if attempt.status is Status.KEPT and attempt.name in measured:
            level = getattr(measured[attempt.name], kind)
        elif attempt.status is Status.KEPT and paired is not None:
            # Killed after the decision and before the model was timed again.
            level = Timing(
                median_us=paired.candidate_us,
                interval_us=paired.candidate_interval_us,
                samples=paired.pairs,
            )
        tried = paired.candidate_us if paired else None
        path.append(
            Step(
                label=str(attempt.index),
                name=attempt.name,
                status=attempt.status,
                level=level,
                tried_us=tried,
            )
        )
    return path


@dataclass(frozen=True, kw_only=True)
class LayerPair:
    """One layer of a kind before and after; a side that was not captured is empty."""

    kind: str
    module: str
    before: tuple[KernelRow, ...]
    after: tuple[KernelRow, ...]


def layer_pairs(run: Run) -> list[LayerPair]:
    sides: dict[str, dict[str, LayerMap]] = {}
    for when, maps in run.layers.items():
        for layer in maps:
            sides.setdefault(layer.kind, {})[when] = layer
    empty: tuple[KernelRow, ...] = ()
    return [
        LayerPair(
            kind=kind,
            module=next(iter(side.values())).module,
            before=side["before"].kernels if "before" in side else empty,
            after=side["after"].kernels if "after" in side else empty,
        )
        for kind, side in sides.items()
    ]


def launches(rows: Sequence[KernelRow]) -> int:
    return sum(row.calls for row in rows)


def time_us(rows: Sequence[KernelRow]) -> float:
    return sum(row.time_us for row in rows)


def verdicts(attempt: Attempt) -> list[Verdict]:
    return [v for v in (attempt.region_verdict, attempt.model_verdict) if v is not None]


def broken_points(verdict: Verdict) -> list[PointReport]:
    """The rounding points where a refused candidate does something else than its contract declares.

    Of an accepted one there are none: elements that fit neither replay are no evidence of a broken
    promise, and their number is within what the verdict allows.
    """
    if verdict.passed:
        return []
    return [p for p in verdict.points if p.observed not in (p.declared, NOT_VISIBLE)]


def reason(run: Run, attempt: Attempt) -> str:
    """Why it was kept; an older ledger's "nothing" was the one step that is not the target's."""
    other = run.kinds[1]
    return attempt.reason.replace("; nothing got slower", f"; {other} got no slower")


def describe_point(point: PointReport) -> str:
    return (
        f"rounding point {point.point} ({point.operator}, {point.source}): declared "
        f"{point.declared}, observed {point.observed}"
    )


def describe_verdict(verdict: Verdict) -> str:
    outcome = "passed" if verdict.passed else f"failed: {verdict.reason}"
    cases = "1 case" if verdict.cases == 1 else f"{verdict.cases} cases"
    return f"{verdict.scope} verdict on {cases} (seed {verdict.seed}) {outcome}"


def describe_audit(audit: Audit) -> str:
    """What was run again, on what inputs, and whether the two clocks agree."""
    runs = ", ".join(f"{c.step} {c.when} (seed {c.seed})" for c in audit.calls)
    outcome = f"failed: {audit.reason}" if audit.reason else "passed"
    parts = [f"audit {outcome}", f"run on inputs drawn later: {runs}"]
    parts += sorted({f"compared with {call.compared_with}" for call in audit.calls})
    if (clocks := audit.clocks) is not None:
        parts.append(
            f"decode {clocks.inside_us:.1f} us from inside, {clocks.outside_us:.1f} us from "
            f"outside ({clocks.difference_us:+.1f} us, of which "
            f"{clocks.spread_us + clocks.gap_us:.1f} us can be explained)"
        )
    return "; ".join(parts)
