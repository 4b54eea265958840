"""The first things to know of a candidate: does its region pass in the sandbox, and is one call of
it faster? Both without the candidate's code in this process."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from harness.bench import ImpossibleTimeError
from harness.bench_jobs import Job
from harness.burst_audit import call_draws
from harness.cases import storages
from harness.errors import UserError
from harness.judge import judge_region
from harness.observe import CandidateError
from harness.outside import Bursts, memoises
from harness.records import Paired, Record, Verdict
from harness.region_time import region_time
from harness.remote import Candidate
from harness.sandbox import Sandbox
from harness.sandboxed import broken
from harness.workload import Workload

COUNTED = 3  # calls on different values, some repeated, whose operators are counted

Calls = Callable[[str], list[Job]]


@dataclass(frozen=True, kw_only=True)
class Found(Record):
    """What was found out about a candidate; `untimed` says why one that passed has no `time`."""

    region: str | None  # None: it broke before it said so
    backend: str | None
    verdict: Verdict
    time: Paired | None = None  # of one call of the region
    call: str | None = None  # which
    untimed: str | None = None


@dataclass
class RegionBench:
    """Candidates for one model. `calls` are those of a region in the timed steps, or ValueError if
    there are none; without it candidates are neither timed nor asked whether they remember."""

    workload: Workload
    sandbox: Sandbox
    calls: Calls | None = None

    def evaluate(self, change: str, backend: str | None, seed: int) -> Found:
        """The verdict on a change, by name or file, and the time if it passed."""
        found = self.judge(change, backend, seed)
        if not found.verdict.passed or self.calls is None or found.region is None:
            return found
        try:
            job = self.calls(found.region)[0]
        except ValueError as error:
            return replace(found, untimed=str(error))
        return self._timed(found, change, job)

    def judge(self, change: str, backend: str | None, seed: int) -> Found:
        """The verdict with default launch knobs; whatever the candidate does is in it. Without a
        `backend`, the first for this device."""
        try:
            candidate = self.sandbox.open(change, backend)
        except (CandidateError, UserError) as error:
            return Found(region=None, backend=backend, verdict=broken(str(error), seed))
        assert candidate.change is not None and candidate.backend is not None
        reference, about = self.workload.model, candidate.change
        try:
            verdict = judge_region(
                reference, candidate.model, about, candidate.backend, self.workload, seed
            )
            if verdict.passed and (told := self.remembers(candidate)) is not None:
                candidate.findings.setdefault(told)
            verdict = candidate.judged(verdict)
        finally:
            candidate.close()
        if verdict.passed:  # what it left behind shows at the end
            verdict = candidate.judged(verdict)
        return Found(region=about.region, backend=candidate.backend, verdict=verdict)

    def remembers(self, candidate: Candidate) -> str | None:
        """That a call of the timed step does less on values that it has just seen, or None."""
        if self.calls is None or candidate.change is None:
            return None
        try:
            job = self.calls(candidate.change.region)[0]
            draws = call_draws(job.calls[0], storages(self.workload.model), COUNTED)
            return memoises(Bursts(candidate, job.names[0], draws))
        except ValueError:
            return None  # no step calls it
        except CandidateError as error:
            return f"while its operators were counted: {error}"

    def _timed(self, found: Found, change: str, job: Job) -> Found:
        try:
            candidate = self.sandbox.open(change, found.backend)
        except (CandidateError, UserError) as error:
            verdict = broken(f"while timed: {error}", found.verdict.seed)
            return replace(found, verdict=verdict)
        time: Paired | None = None
        fresh: Candidate | None = None
        try:
            fresh = self.sandbox.open(change, found.backend)
            model = self.workload.model
            time, audited = region_time(self.sandbox, candidate, fresh, job, model)
            if audited.reason is not None:
                candidate.findings.setdefault(f"{audited.when}: {audited.reason}")
        except (CandidateError, UserError, ImpossibleTimeError) as error:
            candidate.findings.setdefault(f"while timed: {error}")
        finally:
            candidate.close()
            if fresh is not None:
                fresh.close()
        verdict = candidate.judged(found.verdict)
        if not verdict.passed:
            return replace(found, verdict=verdict)
        call = f"{job.label}, {job.shapes}, one call"
        return replace(found, verdict=verdict, time=time, call=call)
