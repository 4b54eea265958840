"""A run as typed pandas DataFrames: `reports.frames(run).changes`, `.attempts`, ...

Times are microseconds. What was not measured is <NA>: columns are pandas' own nullable types, so
integers stay integers and a missing figure is never a 0.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from harness.records import Attempt, Paired, Status, Timing, Verdict
from reports.run import KINDS, Run

TEXT, REAL, WHOLE, TRUTH = "string", "Float64", "Int64", "boolean"
SIDES = "without", "with", "with", "without"
PAIR = ("base_us", "candidate_us", "gain_us", "gain_low_us", "gain_high_us", "mde_us")

CHANGES = {
    "index": WHOLE, "name": TEXT, "region": TEXT, "backend": TEXT, "status": TEXT, "reason": TEXT,
    "predicted_us": REAL, "bound_us": REAL, "gain_us": REAL, "gain_low_us": REAL,
    "gain_high_us": REAL, "mde_us": REAL, "decode_us": REAL, "prefill_us": REAL, "seconds": REAL,
}  # fmt: skip
ATTEMPTS = {
    "index": WHOLE, "name": TEXT, "control": TEXT, "status": TEXT, "id": TEXT, "parent": TEXT,
    "region_passed": TRUTH, "model_passed": TRUTH, "cases": WHOLE, "differing_share": REAL,
    "allowed_share": REAL, "worst_scaled_ulp": REAL, "golden_error": REAL,
    "reference_golden_error": REAL,
    **{f"{kind}_{name}": REAL for kind in KINDS for name in PAIR},
    "decode_pairs": WHOLE, "prefill_pairs": WHOLE, "generated_source": TEXT,
}  # fmt: skip
KERNELS = {
    "when": TEXT, "position": WHOLE, "name": TEXT, "module": TEXT, "region": TEXT, "source": TEXT,
    "calls": WHOLE, "time_us": REAL, "bytes": WHOLE, "flops": WHOLE, "floor_us": REAL,
    "gap_us": REAL, "exposed_us": REAL, "read_share": REAL, "written": TRUTH, "ambiguous": TRUTH,
}  # fmt: skip
LATENCY = {
    "of": TEXT, "what": TEXT, "kind": TEXT, "median_us": REAL, "low_us": REAL, "high_us": REAL,
    "samples": WHOLE,
}  # fmt: skip
SAMPLES = {
    "index": WHOLE, "name": TEXT, "kind": TEXT, "pair": WHOLE, "side": TEXT, "time_us": REAL,
}  # fmt: skip
OTHERS = {
    "index": WHOLE, "name": TEXT, "target": TEXT, "step": TEXT, **dict.fromkeys(PAIR, REAL),
    "pairs": WHOLE, "calls": WHOLE, "declined": WHOLE, "absent": TEXT,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Frames:
    """The six tables of one run."""

    changes: pd.DataFrame  # one row a change: CHANGES; gains are of the run's target
    attempts: pd.DataFrame  # one row an attempt, controls too: ATTEMPTS; both kinds of step
    kernels: pd.DataFrame  # the target's step in launch order, before and after: KERNELS
    latency: pd.DataFrame  # every timing of a model, in the order taken: LATENCY
    samples: pd.DataFrame  # every single sample of an attempt's pairs: SAMPLES
    others: pd.DataFrame  # each kept change at each other target: OTHERS


def tables(run: Run | Path | str) -> Frames:
    """The tables of a run, or of the run in a directory; UserError if it is none."""
    run = run if isinstance(run, Run) else Run.load(Path(run))
    return Frames(
        changes=_frame(CHANGES, (_change(run, a) for a in run.changes())),
        attempts=_frame(ATTEMPTS, map(_attempt, run.attempts)),
        kernels=_frame(KERNELS, _kernels(run)),
        latency=_frame(LATENCY, _latency(run)),
        samples=_frame(SAMPLES, _samples(run)),
        others=_frame(OTHERS, _others(run)),
    )


def _frame(columns: dict[str, str], rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=list(columns)).astype(columns)


def _change(run: Run, attempt: Attempt) -> dict[str, Any]:
    latency, pair = attempt.latency, run.pair(attempt)
    return {
        **{name: getattr(attempt, name) for name in CHANGES if hasattr(attempt, name)},
        "status": str(attempt.status),
        **{name: value for name, value in _pair(pair).items() if name in CHANGES},
        "decode_us": latency.decode.candidate_us if latency else None,
        "prefill_us": latency.prefill.candidate_us if latency else None,
    }


def _pair(pair: Paired | None) -> dict[str, float | None]:
    if pair is None:
        return dict.fromkeys(PAIR)
    low, high = pair.gain_interval_us
    return {
        "base_us": pair.base_us,
        "candidate_us": pair.candidate_us,
        "gain_us": pair.gain_us,
        "gain_low_us": low,
        "gain_high_us": high,
        "mde_us": pair.mde_us,
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    latency, region, model = attempt.latency, attempt.region_verdict, attempt.model_verdict
    return {
        **{name: getattr(attempt, name) for name in ATTEMPTS if hasattr(attempt, name)},
        "status": str(attempt.status),
        "region_passed": region.passed if region else None,
        "model_passed": model.passed if model else None,
        **_worst(region),
        **{
            f"{kind}_{name}": value
            for kind in KINDS
            for name, value in _pair(getattr(latency, kind) if latency else None).items()
        },
        **{f"{kind}_pairs": getattr(latency, kind).pairs if latency else None for kind in KINDS},
    }


def _worst(verdict: Verdict | None) -> dict[str, Any]:
    """The region verdict's figures of the output that differs in the largest share."""
    if verdict is None:
        return {}
    worst = min(verdict.outputs, key=lambda o: o.bit_equal_share, default=None)
    if worst is None:
        return {"cases": verdict.cases}
    return {
        "cases": verdict.cases,
        "differing_share": 1 - worst.bit_equal_share,
        "allowed_share": worst.allowed_share,
        "worst_scaled_ulp": worst.worst_scaled,
        "golden_error": worst.golden_error,
        "reference_golden_error": worst.reference_golden_error,
    }


def _kernels(run: Run) -> Iterable[dict[str, Any]]:
    for when, kernels in run.kernels.items():
        for position, row in enumerate(kernels.rows, start=1):
            fields = {name: getattr(row, name) for name in KERNELS if hasattr(row, name)}
            share = row.read_share(run.ceilings) if run.ceilings else None
            yield {**fields, "when": when, "position": position, "read_share": share}


def _latency(run: Run) -> Iterable[dict[str, Any]]:
    """Baselines, anchors, the model after each kept change, and the result."""
    timed = [("baseline", b.name, b) for b in run.baseline_history]
    timed += [("anchor", "reference", m) for m in run.anchors]
    timed += [("kept", m.name, m) for m in run.measured]
    timed += [("final", "result", run.final)] if run.final else []
    for of, what, measured in timed:
        for kind in KINDS:
            if (timing := getattr(measured, kind)) is not None:
                yield {"of": of, "what": what, "kind": kind, **_timing(timing)}
    for name, timing in run.final.other_targets.items() if run.final else ():
        if isinstance(timing, Timing):
            yield {"of": "other target", "what": name, "kind": name.partition("-")[0],
                   **_timing(timing)}  # fmt: skip


def _samples(run: Run) -> Iterable[dict[str, Any]]:
    """Four rows a pair: what ran without the change and with it."""
    for attempt in run.attempts:
        for kind, pairs in run.samples.get(attempt.index, {}).items():
            for pair, times in enumerate(pairs, start=1):
                for side, us in zip(SIDES, times, strict=True):
                    yield {"index": attempt.index, "name": attempt.name, "kind": kind,
                           "pair": pair, "side": side, "time_us": us}  # fmt: skip


def _others(run: Run) -> Iterable[dict[str, Any]]:
    for attempt in run.changes(Status.KEPT):
        for row in run.others.rows(attempt.index):
            fields = {name: getattr(row, name) for name in OTHERS if hasattr(row, name)}
            counts = {"calls": row.calls or None, "declined": row.declined if row.calls else None}
            pairs = row.pairs.pairs if row.pairs else None
            yield {"index": attempt.index, "name": attempt.name, **fields, **counts,
                   **_pair(row.pairs), "pairs": pairs}  # fmt: skip


def _timing(timing: Timing) -> dict[str, Any]:
    low, high = timing.interval_us
    within = {"low_us": low, "high_us": high}
    return {"median_us": timing.median_us, **within, "samples": timing.samples}
