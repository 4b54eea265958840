"""On which calls a change was tested, and the calls of the steps that are timed among them.

What a verdict's cases look like is collected while they are judged. The steps that a run times are
larger than those cases, so one of them is run with the reference, and at the first call of each
kind of node the candidate gets the same arguments. Its results are compared with the reference's,
or with the contract's replay where that departs from the reference's roundings, within the noise of
replays of that very call: how often a result changes depends on how many terms it sums, so smaller
calls do not tell. Only one call's copies exist at a time.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from harness import bounds, verdicts
from harness.cases import Case, storages
from harness.compare import SelfNoise
from harness.examine import Examination, Prepared
from harness.nodes import pick_nodes
from harness.noise import kinds
from harness.observe import Observed
from harness.policy import Policy
from harness.records import Verdict
from harness.region import RegionCases
from harness.routes import Deviations, routing
from harness.spent import spent
from harness.thresholds import Thresholds
from harness.workload import Target, Workload, free_bytes, give_back
from optimized.change import Change
from optimized.domain import Domain, Facts, domain_of
from optimized.guards import argument_names, facts_of

STEP_RUNS = 2  # noise replays of each kind of a timed step's call
UNJUDGED = ": not judged, "  # of a step, in a verdict's notes
CACHE_SHARE = 2  # a step's caches may take half of the free memory


@dataclass
class Tested:
    """The calls on which the nodes of `candidate` were judged; pass it to `RegionCases.judge` as
    `watch`. Calls that the kernel's own guard declines ran the reference and do not count."""

    candidate: nn.Module
    calls: list[tuple[str, Facts]] = field(default_factory=list)

    def __call__(self, prepared: Prepared, seen: Observed) -> None:
        self.add(prepared.case, seen)

    def add(self, case: Case, seen: Observed) -> None:
        if seen.declined is None and self.declined(case) is None:
            names = argument_names(self.candidate.get_submodule(case.node))
            self.calls.append((case.node, facts_of(names, case.args)))

    def declined(self, case: Case) -> str | None:
        """Why the kernel's own guard leaves the call to the reference, or None. One in another
        process says so once it is called (`Observed.declined`)."""
        declines = getattr(self.candidate.get_submodule(case.node), "declines", None)
        return None if declines is None else declines(*case.args)

    @property
    def domain(self) -> Domain:
        return domain_of(self.calls)


@spent("region")
def judge_with_domain(
    reference: nn.Module,
    candidate: nn.Module,
    change: Change,
    backend: str,
    workload: Workload,
    seed: int,
    *,
    targets: Sequence[str] = (),
    policy: Policy | None = None,
) -> Verdict:
    """The verdict on a region, as `harness.judge.judge_region` says, with the domain it holds for:
    its cases and, beside them, the calls of the steps called `targets`."""
    cases = RegionCases.prepare(
        reference, change.region, change.contract, workload, seed, policy, keep=False
    )
    tested = Tested(candidate)
    sizes = thresholds(change, backend, workload, cases)
    cases.more = None if sizes is None else sizes.cases
    verdict = cases.judge(candidate, backend, watch=tested)
    if sizes is not None:
        verdict = replace(verdict, notes=verdict.notes + tuple(sizes.notes))
    return with_domain(verdict, cases, tested, workload, [workload.target(t) for t in targets])


def thresholds(
    change: Change, backend: str, workload: Workload, cases: RegionCases
) -> Thresholds | None:
    """What finds the sizes at which the change decides otherwise; None where its code is in another
    process."""
    if not change.implementations:
        return None
    return Thresholds.of(change.implementation(backend), workload, cases.limit_bytes)


@spent("region: timed steps")
def with_domain(
    verdict: Verdict,
    cases: RegionCases,
    tested: Tested,
    workload: Workload,
    targets: Sequence[Target],
) -> Verdict:
    """A region's passed verdict with the steps of `targets` judged, too, and the domain of it all.

    One that did not pass is returned as it is. Notes say which steps could not be judged.
    """
    if not verdict.passed:
        return verdict
    exams: list[Examination] = []
    routes: list[Deviations] = []
    notes: list[str] = []
    for target in targets:
        give_back(workload.device)
        if workload.cache_bytes(target) > free_bytes(workload.device) // CACHE_SHARE:
            notes.append(_unjudged(target, "its caches do not fit beside the weights"))
            continue
        step = _TimedStep(cases, tested, target)
        try:
            step.run(workload)
        except torch.OutOfMemoryError:
            notes.append(_unjudged(target, "too large for the memory that is free"))
        notes += step.notes
        exams.append(step.exam)
        routes += step.routes
    outputs = tuple(
        verdicts.output_report(exam, tally) for exam in exams for tally in exam.tallies.values()
    )
    reason = next((e.faults.reason for e in exams if e.faults.reason is not None), None)
    return replace(
        verdict,
        passed=reason is None,
        reason=reason,
        cases=verdict.cases + sum(exam.cases for exam in exams),
        outputs=verdict.outputs + outputs,
        routing=routing(routes, verdict.routing),
        notes=verdict.notes + tuple(notes),
        targets=tuple(target.name for target in targets),
        domain=tested.domain if reason is None else None,
    )


def _unjudged(target: Target, why: str) -> str:
    return f"{target.name}{UNJUDGED}{why}; the reference runs there"


class _TimedStep:
    """Judges one call of each kind of node while the reference runs one step of `target`."""

    def __init__(self, cases: RegionCases, tested: Tested, target: Target) -> None:
        self.cases, self.tested, self.target = cases, tested, target
        self.prefix = f"{target.name}: "
        self.exam = Examination(
            cases.measured.contract,
            storages(cases.reference, tested.candidate),
            cases.seed,
            noise={self.prefix + n: _known(s) for n, s in cases.measured.noise.items()},
            golden=False,
            prefix=self.prefix,
        )
        self.routes: list[Deviations] = []
        self.notes: list[str] = []
        self.waiting = set(pick_nodes(cases.reference, cases.names, cases.seed, drawn=0))
        self.busy = False

    def run(self, workload: Workload) -> None:
        reference = self.cases.reference
        inputs = workload.inputs(self.target, seed=self.cases.seed)
        with contextlib.ExitStack() as stack, torch.no_grad():
            for name in self.waiting:
                node = reference.get_submodule(name)
                hook = node.register_forward_pre_hook(self._before(name), with_kwargs=True)
                stack.callback(hook.remove)
            reference(*inputs.args)

    def _before(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self.busy or name not in self.waiting or self.exam.faults.reason is not None:
                return
            self.waiting.discard(name)
            self.busy = True  # the judge calls the node again
            case = Case(name=self.target.name, node=name, args=args, kwargs=kwargs, typical=False)
            try:
                self._judge(case)
            except torch.OutOfMemoryError:
                self._too_large(case)
            finally:
                self.busy = False

        return hook

    def _judge(self, case: Case) -> None:
        exam, declined = self.exam, self.tested.declined(case)
        if declined is not None:
            self._declines(declined)
            return
        ours = self.cases.reference.get_submodule(case.node)
        mine = self.tested.candidate.get_submodule(case.node)
        plain = not (exam.contract.elides or exam.contract.adds)
        prepared = exam.prepare(ours, case, as_is=plain)
        known = self.cases.deviations.get(case.node, Deviations())
        routes = Deviations(dict(known.relative), where=prepared.where)
        self._measure_noise(ours, prepared, routes)
        self.routes.append(routes)
        seen = exam.judge(ours, mine, prepared, routes)
        if seen is not None:
            self.tested.add(case, seen)
            if seen.declined is not None:
                self._declines(seen.declined)
        elif torch.OutOfMemoryError.__name__ in exam.faults.found.get("call", ""):
            del exam.faults.found["call"]
            self._too_large(case)

    def _measure_noise(self, ours: nn.Module, prepared: Prepared, routes: Deviations) -> None:
        """That of the call; of the region's typical cases where its replays do not fit."""
        exam = self.exam
        try:
            exam.measure_noise(ours, prepared, STEP_RUNS * kinds(prepared.device), routes)
        except torch.OutOfMemoryError:
            for name, noise in self.cases.measured.noise.items():
                cases = exam.tally(name).noise
                cases.pop(prepared.where, None)
                cases.update((n, case) for n, case in noise.cases.items() if case.typical)
            large = f"a call of {prepared.case.node} is too large to replay"
            self._note(f"{self.target.name}: within the noise of smaller calls, {large}")

    def _declines(self, why: str) -> None:
        self._note(f"{self.target.name}: the reference runs, its kernel declines: {why}")

    def _too_large(self, case: Case) -> None:
        self._note(_unjudged(self.target, f"a call of {case.node} is too large"))

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _known(noise: SelfNoise) -> SelfNoise:
    """What the region's cases say about a larger call's noise: how far a flipped rounding moves
    what follows, and that elements change together, which few replays hardly show."""
    typical = [case for case in noise.cases.values() if case.typical]
    return SelfNoise(elided=noise.elided, spread=bounds.spread(typical))
