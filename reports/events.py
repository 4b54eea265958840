"""What each kind of a ledger's events tells of a run; torch-free."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.protections import Protection
from harness.records import (
    Attempt,
    Audit,
    Baseline,
    Ceilings,
    Environment,
    KernelRow,
    Latency,
    LayerMap,
    Proposal,
    Status,
    StepBudget,
    Timing,
    Verdict,
)
from reports.other_targets import LEFT, PAIRS, STEPS
from reports.parts import KINDS, Kernels, Measured
from reports.rounds import Evaluated
from reports.spending import Spending

if TYPE_CHECKING:
    from reports.run import Run


def _environment(run: "Run", data: dict[str, Any]) -> None:
    run.environments.append(Environment.from_json(data))


def _ceilings(run: "Run", data: dict[str, Any]) -> None:
    run.ceilings = Ceilings.from_json(data)


def _baseline(run: "Run", data: dict[str, Any]) -> None:
    run.baseline_history.append(Baseline.from_json(data))


def _effect(run: "Run", data: dict[str, Any]) -> None:
    run.effect = {name: float(value) for name, value in data.items()}


def _kernels(run: "Run", data: dict[str, Any]) -> None:
    run.kernels[data["when"]] = Kernels(
        rows=tuple(KernelRow.from_json(row) for row in data["rows"]),
        step_us=data.get("step_us"),
        profiled_step_us=data.get("profiled_step_us"),
        attributed_share=data.get("attributed_share"),
        budget=StepBudget.from_json(data["budget"]) if data.get("budget") else None,
        compulsory_bytes=data.get("compulsory_bytes"),
    )


def _layers(run: "Run", data: dict[str, Any]) -> None:
    run.layers[data["when"]] = tuple(LayerMap.from_json(m) for m in data["maps"])


def _sandbox(run: "Run", data: dict[str, Any]) -> None:
    run.protections = tuple(Protection.from_json(row) for row in data["protections"])


def _own_process(run: "Run", data: dict[str, Any]) -> None:
    run.own_process = tuple(Protection.from_json(row) for row in data["protections"])


def _workers(run: "Run", data: dict[str, Any]) -> None:
    run.workers = [str(name) for name in data["workers"]]


def _worker_lost(run: "Run", data: dict[str, Any]) -> None:
    run.lost += [f"{Path(data['change']).name}: {how}" for how in data["losses"]]


def _proposals(run: "Run", data: dict[str, Any]) -> None:
    run.rankings.append(tuple(Proposal.from_json(p) for p in data["proposals"]))


def _started(run: "Run", data: dict[str, Any]) -> None:
    run.in_progress = data["name"]


def _attempt(run: "Run", data: dict[str, Any]) -> None:
    run.attempts.append(Attempt.from_json(data))
    run.in_progress = run.final = run.closing_verdict = None
    run.points, run.unstable = {}, ()


def _measured(run: "Run", data: dict[str, Any]) -> None:
    kept = run.changes(Status.KEPT)
    run.measured.append(_timed(data, kept[-1].name if kept else ""))


def _anchor(run: "Run", data: dict[str, Any]) -> None:
    run.anchors.append(_timed(data))


def _model_verdict(run: "Run", data: dict[str, Any]) -> None:
    run.closing_verdict = Verdict.from_json(data)


def _final(run: "Run", data: dict[str, Any]) -> None:
    run.final = _timed(data)
    run.floors = data.get("floors_us") or {}


def _timed(data: dict[str, Any], name: str = "") -> Measured:
    others = (data.get("other_targets") or {}).items()
    return Measured(
        name=name,
        decode=Timing.from_json(data["decode"]),
        prefill=Timing.from_json(data["prefill"]),
        other_targets={n: v if isinstance(v, str) else Timing.from_json(v) for n, v in others},
        pairs=Latency.from_json(data["pairs"]) if data.get("pairs") else None,
        audit=Audit.from_json(data["audit"]) if data.get("audit") else None,
    )


def _samples(run: "Run", data: dict[str, Any]) -> None:
    run.samples[data["index"]] = {kind: data["us"][kind] for kind in KINDS}


def _fingerprint(run: "Run", data: dict[str, Any]) -> None:
    run.points, run.unstable = dict(data["points"]), tuple(data["unstable"])


def _spent(run: "Run", data: dict[str, Any]) -> None:
    run.spending.append(Spending.of(data))


def _round(run: "Run", data: dict[str, Any]) -> None:
    run.rounds.append(list(data["files"]))


def _workspace(run: "Run", data: dict[str, Any]) -> None:
    run.workspace = data


def _evaluated(run: "Run", data: dict[str, Any]) -> None:
    run.evaluated.append(Evaluated.of(data))


def _stopped(run: "Run", data: dict[str, Any]) -> None:
    run.stopped, run.stopped_why = data["reason"], data.get("why")


def _resumed(run: "Run", data: dict[str, Any]) -> None:
    """What ended the earlier session is no longer how the run stands."""
    _environment(run, data)
    run.sessions += 1
    run.stopped = run.stopped_why = run.in_progress = None


def _others(kind: str) -> Callable[["Run", dict[str, Any]], None]:
    return lambda run, data: run.others.add(kind, data)


READERS: dict[str, Callable[["Run", dict[str, Any]], None]] = {
    "environment": _environment,
    "ceilings": _ceilings,
    "baseline": _baseline,
    "anchor": _anchor,
    "effect": _effect,
    "kernels": _kernels,
    "layers": _layers,
    "proposals": _proposals,
    "sandbox": _sandbox,
    "own_process": _own_process,
    "workers": _workers,
    "worker_lost": _worker_lost,
    "started": _started,
    "attempt": _attempt,
    "measured": _measured,
    "model_verdict": _model_verdict,
    "final": _final,
    **{kind: _others(kind) for kind in (STEPS, PAIRS, LEFT)},
    "samples": _samples,
    "fingerprint": _fingerprint,
    "agent_spent": _spent,
    "round": _round,
    "evaluated": _evaluated,
    "workspace": _workspace,
    "stopped": _stopped,
    "resumed": _resumed,
}
