"""How a run ends: the closing trace, verdict and times of the model as it stands, and what its
kernels take elsewhere."""

from typing import Any

import torch

from agents import other_targets
from agents.certificates import compile_kept
from agents.session import LAYERS_PER_KIND, Session
from harness import judge, memcheck, seeds
from harness.errors import UserError
from harness.records import Verdict

ALL_LAYERS_S = 150.0  # so much of the budget left, and every layer of the result is judged


def finish(session: Session, others: str = other_targets.AUTO) -> None:
    """The closing trace, verdict and times of the model as it stands, as far as not done; then each
    kept change at the run's other targets, as `others` says."""
    done = session.history.since_last_attempt()
    if "layers" not in done:
        session.profile("after")
    if session.history.kept and "model_verdict" not in done:
        judge_result(session)
    if "final" not in done:
        session.progress.stage("closing measurements")
        timings: dict[str, Any] = session.measure.timings(session.base)
        final: dict[str, Any] = {k: t.to_json() for k, t in timings.items()}
        if session.history.kept:
            reference = session.measure.steps(session.reference)
            pairs = session.measure.latency(reference, session.base, session.history.effect_us())
            audit = session.measure.audit(reference, session.base)
            reference.close()
            final |= {"pairs": pairs.to_json(), "audit": audit.to_json()}
            if audit.reason is not None:
                session.progress.done(f"the result's audit failed: {audit.reason}", "red")
        final["floors_us"] = session.floors_us()
        session.rebase()  # what follows needs the memory
        session.measure.forget()
        final["other_targets"] = time_other_targets(session)
        session.ledger.append("final", final)
    if any(attempt.backend == "triton" for attempt in session.history.kept):
        session.progress.stage("compiling the kept kernels for each target, without a GPU")
        compile_kept(session.ledger)
    other_targets.time_changes(session, others)


def judge_result(session: Session) -> None:
    """Judge the model with everything that was kept against the reference, layer by layer."""
    session.progress.stage("judging the model as it stands, layer by layer")
    plenty = session.workload.toy or session.budget.left_s > ALL_LAYERS_S
    verdict = judge.judge_model(
        session.reference,
        session.current,
        session.workload,
        seeds.draw(),
        per_kind=None if plenty else LAYERS_PER_KIND,
        full=True,
    )
    if verdict.passed:
        verdict = memchecked(session, verdict)
    session.ledger.append("model_verdict", verdict)
    said = "passed" if verdict.passed else f"failed: {verdict.reason}"
    style = "green" if verdict.passed else "red"
    session.progress.done(f"the model as it stands, {verdict.layers}: {said}", style)


def memchecked(session: Session, verdict: Verdict) -> Verdict:
    """The verdict with what compute-sanitizer says of each kept change that the catalogue has;
    refused where it finds an error in one. Foreign ones were checked before they were kept."""
    asked = [
        memcheck.Asked(
            change=attempt.name,
            region=attempt.region,
            backend=attempt.backend,
            seed=verdict.seed,
            knobs=attempt.knobs,
        )
        for attempt in session.history.kept
        if not attempt.name.endswith(".py")
    ]
    if not asked or not memcheck.applies(session.workload.device):
        return verdict
    session.progress.stage("checking the kept kernels for memory errors and races")
    found = memcheck.check_all(session.workload, asked, limit_s=session.checking_s)
    for one, checked in zip(asked, found, strict=True):
        verdict = checked.named(one.change).joined(verdict)
    return verdict


def time_other_targets(session: Session) -> dict[str, Any]:
    """The targets that no change was decided on, for the reference and for the result; a text
    where one cannot be run."""
    found: dict[str, Any] = {}
    for name in session.measure.others:
        for who, model in (("reference", session.reference), ("result", session.current)):
            key = f"{name}, {who}"
            if session.budget.left_s <= 0:
                found[key] = "the budget was used up"
                continue
            try:
                found[key] = session.measure.other_target(name, model).to_json()
            except (UserError, torch.OutOfMemoryError) as error:
                found[key] = next(iter(str(error).splitlines()), type(error).__name__)
    return found
