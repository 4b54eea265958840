"""summary.json: the run's outcome in one document, for programs."""

import json
import math
from pathlib import Path
from typing import Any

from harness.records import SCHEMA, Attempt, Status, Timing
from reports import spending
from reports.figures import baseline_rows, launches, median_error_us
from reports.files import write_text
from reports.run import KINDS, Run

NAME = "summary.json"


def summary(run: Run) -> dict[str, Any]:
    """The summary as JSON data; what was not measured is None, an absent baseline says why.

    `final` is None and `speedup` empty while the run has not come to its end.
    """
    rows = baseline_rows(run) if run.finished else []
    timed = {n: b for n, b in run.baselines.items() if b.decode is not None}
    speedup: dict[str, dict[str, float]] = {}
    intervals: dict[str, dict[str, tuple[float, float]]] = {}
    for kind in KINDS:
        ratios = {f"vs_{r.baseline.name}": getattr(r, kind) for r in rows}
        speedup[kind] = {n: r.value for n, r in ratios.items() if r is not None}
        intervals[kind] = {n: r.interval for n, r in ratios.items() if r is not None}
    header = run.header
    document = {
        "schema": SCHEMA,
        "target": header.target,
        "model": header.model,
        "preset": header.preset,
        "device": header.device,
        "seed": header.seed,
        "proposer": header.proposer,
        "kind": header.kind,
        "workload": header.workload,
        "environment": run.environment.to_json() if run.environment else None,
        "baselines": {
            n: {"decode_us": _median(b.decode), "prefill_us": _median(b.prefill)}
            for n, b in timed.items()
        },
        "absent": {n: b.absent for n, b in run.baselines.items() if n not in timed},
        "mde_us": run.effect,
        "changes": [_change(run, a) for a in run.changes()],
        "controls": [_control(run, a) for a in run.controls],
        "median_prediction_error_us": median_error_us(run),
        "final": _final(run),
        "speedup": speedup,
        "speedup_interval": intervals,
        "stopped": run.stopped,
        "stopped_why": run.stopped_why,
    }
    if (spent := spending.document(spending.total(run.spending))) is not None:
        document["spent"] = spent
    return _plain(document)


def write_summary(run_dir: Path) -> Path:
    """Write summary.json next to the ledger; a reader sees the old file or the new, never half."""
    run = Run.load(run_dir)
    text = json.dumps(summary(run), indent=2, allow_nan=False) + "\n"
    return write_text(Path(run_dir) / NAME, text)


def _change(run: Run, attempt: Attempt) -> dict[str, Any]:
    latency, pair = attempt.latency, run.pair(attempt)
    spent = spending.of_attempt(run, attempt)
    decode = latency.decode if latency else None
    prefill = latency.prefill if latency else None
    return {
        "id": attempt.id,
        "name": attempt.name,
        "region": attempt.region,
        "backend": attempt.backend,
        "status": str(attempt.status),
        "reason": attempt.reason,
        "predicted_us": attempt.predicted_us,
        "bound_us": attempt.bound_us,
        "gain_us": pair.gain_us if pair else None,
        "gain_interval_us": pair.gain_interval_us if pair else None,
        "decode_us": decode.candidate_us if decode else None,
        "prefill_us": prefill.candidate_us if prefill else None,
        "decode_interval_us": decode.candidate_interval_us if decode else None,
        "prefill_interval_us": prefill.candidate_interval_us if prefill else None,
        "mde_us": pair.mde_us if pair else None,
        "knobs": attempt.knobs,
        "verdict": {
            "region": attempt.region_verdict.to_json() if attempt.region_verdict else None,
            "model": attempt.model_verdict.to_json() if attempt.model_verdict else None,
        },
        "audit": attempt.audit.to_json() if attempt.audit else None,
        "other_targets": _others(run, attempt),
        **({"spent": spending.document(spent)} if spent else {}),
    }


def _others(run: Run, attempt: Attempt) -> dict[str, Any]:
    """Of a kept change, by target; {} for others, and where the ledger does not say."""
    if attempt.status is not Status.KEPT:
        return {}
    return {
        row.target: {
            "step": row.step,
            **({"absent": row.absent} if row.pairs is None else row.pairs.to_json()),
        }
        for row in run.others.rows(attempt.index)
    }


def _control(run: Run, attempt: Attempt) -> dict[str, Any]:
    pair = run.pair(attempt)
    return {
        "control": attempt.control,
        "refused": attempt.status is Status.REJECTED,
        "status": str(attempt.status),
        "reason": attempt.reason,
        "gain_us": pair.gain_us if pair else None,
    }


def _final(run: Run) -> dict[str, Any] | None:
    if run.final is None:
        return None
    changed = bool(run.changes(Status.KEPT))
    maps = run.layers.get("after") or (() if changed else run.layers.get("before", ()))
    return {
        "decode_us": run.final.decode.median_us,
        "prefill_us": run.final.prefill.median_us,
        "decode_interval_us": run.final.decode.interval_us,
        "prefill_interval_us": run.final.prefill.interval_us,
        "kernels_per_layer": {m.kind: launches(m.kernels) for m in maps},
        "verdict": run.closing_verdict.to_json() if run.closing_verdict else None,
        "other_targets": {
            n: {"median_us": t.median_us} if isinstance(t, Timing) else {"absent": t}
            for n, t in run.final.other_targets.items()
        },
    }


def _median(timing: Timing | None) -> float | None:
    return timing.median_us if timing else None


def _plain(value: Any) -> Any:
    """JSON has no infinities: they become None, tuples become lists."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
