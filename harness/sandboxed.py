"""One change judged, and timed on request, in the sandbox from beginning to end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import memcheck
from harness.bench import ImpossibleTimeError
from harness.confine import ROOT, Limits
from harness.domains import judge_with_domain
from harness.judge import judge_model, self_test
from harness.observe import CandidateError
from harness.outside import latency
from harness.protections import Protection
from harness.records import Audit, Latency, Verdict
from harness.remote import Candidate
from harness.sandbox import Sandbox
from harness.spent import spent
from harness.workload import Workload

STARTS = "the candidate's process"
OUTSIDE = f"{memcheck.PROGRAM}: not run, it would take the change's code out of the sandbox"

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What came of one change; `protections` are those it ran under."""

    name: str
    backend: str | None
    verdicts: tuple[Verdict, ...]
    latency: Latency | None
    audit: Audit | None  # of what was timed
    protections: tuple[Protection, ...]

    @property
    def passed(self) -> bool:
        return all(verdict.passed for verdict in self.verdicts)


def outside_tree(change: str) -> bool:
    """Whether a change is a file that does not belong to this project."""
    return change.endswith(".py") and not Path(change).resolve().is_relative_to(ROOT)


def judge_sandboxed(
    workload: Workload,
    change: str,
    backend: str | None,
    seed: int,
    *,
    required: bool = False,
    targets: Sequence[str] = (),
    full: bool = False,
    limits: Limits | None = None,
    say: Say = lambda text: None,
) -> Judged:
    """Judge a change, by name or file, in a worker; with `targets` (one decode, one prefill) time
    it if it passed. `full` is `harness.layers.judge_model`'s. UserError for what the user got
    wrong; what a candidate does is in the verdict."""
    model = workload.name
    with Sandbox(
        workload.model, workload.device, model=model, limits=limits, required=required
    ) as sandbox:
        if required:
            with spent(STARTS):
                sandbox.open(None).close()  # before anything that takes long
        try:
            with spent(STARTS):  # before the self-test, which takes long: it may be no change file
                candidate = sandbox.open(change, backend)
        except CandidateError as error:
            return Judged(
                name=change,
                backend=backend,
                verdicts=(broken(str(error), seed),),
                latency=None,
                audit=None,
                protections=sandbox.protections,
            )
        assert candidate.change is not None
        found, times, audited = [], None, None
        try:
            say(f"{workload.name} {workload.preset}: the judge's self-test")
            self_test(workload.model, workload, seed)
            count = len(candidate.replaced)
            named = f"{candidate.change.name} ({candidate.backend})"
            say(f"{named} replaces {count} nodes in the sandbox; judging the region")
            found = _verdicts(workload, candidate, seed, targets, full, say)
            if targets and found[-1].passed:
                say("timing from outside")
                domain = found[0].domain
                try:
                    times, audited = latency(
                        sandbox, candidate, change, backend, workload, targets, domain
                    )
                except (CandidateError, ImpossibleTimeError) as error:
                    candidate.findings.setdefault(f"while timed: {error}")
                found[-1] = candidate.judged(found[-1])
        finally:
            candidate.close()
        if found[-1].passed:  # what it left behind shows at the end
            found[-1] = candidate.judged(found[-1])
        return Judged(
            name=candidate.change.name,
            backend=candidate.backend,
            verdicts=tuple(found),
            latency=times if found[-1].passed else None,
            audit=audited,
            protections=sandbox.protections,
        )


def _verdicts(
    workload: Workload,
    candidate: Candidate,
    seed: int,
    targets: Sequence[str],
    full: bool,
    say: Say,
) -> list[Verdict]:
    """On the region, with the domain that it holds for, and on the model, limited to that."""
    change, backend, model = candidate.change, candidate.backend, workload.model
    assert change is not None and backend is not None
    region = judge_with_domain(
        model, candidate.model, change, backend, workload, seed, targets=targets
    )
    found = [candidate.judged(region)]
    if found[0].passed and found[0].domain is not None:
        say("judging the model, layer by layer")
        try:
            candidate.limit(found[0].domain)
        except CandidateError as error:
            candidate.findings.setdefault(f"while limited to its domain: {error}")
            return [candidate.judged(found[0])]
        whole = judge_model(model, candidate.model, workload, seed, full=full)
        if memcheck.applies(workload.device):
            whole = memcheck.Checked(notes=(OUTSIDE,)).joined(whole)
        found.append(candidate.judged(whole))
    return found


def broken(reason: str, seed: int) -> Verdict:
    """The verdict on a candidate that broke before it could be called."""
    return Verdict(
        scope="region", passed=False, reason=reason, cases=0, seed=seed, outputs=(), points=()
    )
