"""A survey of the judge as tasks, for any number of processes: same results, in the same order.

Mutants are judged in parts of a region, right changes one after the other; each worker keeps what
it has prepared for a region until its next one.
"""

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from harness import verdicts
from harness.jobs import Pool, Task
from harness.judge import self_test
from harness.misuse import Mutant
from harness.mutants import derive_mutants
from harness.region import RegionCases
from harness.survey import (
    SURVIVED,
    Honest,
    Outcome,
    chosen,
    contract_of,
    counted,
    honest_changes,
    judge_honest,
    judge_mutant,
    regions_of,
)
from harness.workload import Workload
from optimized.change import share

PART = 24  # mutants of one task
SPENT, UNCALLED = "the budget is spent", "the reference does not call it"

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What is surveyed: the options of `python -m harness mutants`."""

    model: str
    preset: str
    device: str
    seed: int
    regions: list[str] | None = None
    limit: int | None = None  # mutants of each region
    sample: int | None = None
    honest: int | None = None  # verdicts on right changes; None: one for each
    until: float = float("inf")  # of time.monotonic(), which all processes share

    @property
    def spent(self) -> bool:
        return time.monotonic() > self.until


@dataclass(kw_only=True)
class Findings:
    """All outcomes in the order of the regions and of the changes. `left` are mutants of a region
    that were not judged, `uncounted` regions that the budget left out before any was derived."""

    model: str
    preset: str
    device: str
    outcomes: list[Outcome]
    left: dict[str, int]
    honest: list[Honest]
    uncounted: list[str]


class Surveyor:
    """One worker: the model, and what is prepared for the region that it surveyed last."""

    def __init__(self, survey: Survey, workload: Workload) -> None:
        self.survey, self.workload = survey, workload
        self.region = ""
        self.cases: RegionCases | None = None
        self.mutants: list[Mutant] = []

    def prepare(self, region: str) -> RegionCases | None:
        """The region's cases; None if the reference does not call it."""
        if self.region != region:
            model, seed = self.workload.model, self.survey.seed
            contract = contract_of(region, self.workload)
            self.cases, self.mutants = None, []  # before others take memory
            cases = RegionCases.prepare(model, region, contract, self.workload, seed)
            self.region, self.cases = region, cases if cases.names else None
            self.mutants = derive_mutants(cases) if cases.names else []
        return self.cases


@contextlib.contextmanager
def surveyor(survey: Survey) -> Iterator[Surveyor]:
    """A worker in a process of its own."""
    workload = load(survey)
    if workload.device.type == "cuda":
        torch.set_num_threads(1)  # the work is on the card
    yield Surveyor(survey, workload)


def load(survey: Survey) -> Workload:
    return Workload.load(survey.model, survey.preset, survey.device, survey.seed)


def run_self_test(worker: Surveyor) -> None:
    self_test(worker.workload.model, worker.workload, worker.survey.seed)


def count_mutants(region: str, worker: Surveyor) -> int | str:
    """How many mutants the region has, or why none is judged."""
    if worker.survey.spent:
        return SPENT
    return len(worker.mutants) if worker.prepare(region) else UNCALLED


def judge_part(region: str, places: list[int], worker: Surveyor) -> list[Outcome]:
    """The outcomes of those mutants, as many as the budget allows."""
    if worker.survey.spent:
        return []
    cases = worker.prepare(region)
    assert cases is not None
    cases.kills.clear()  # the order of the cases must not depend on other parts
    candidate = share(worker.workload.model)
    found = []
    for place in places:
        if worker.survey.spent:
            break
        found.append(judge_mutant(region, cases, candidate, worker.mutants[place]))
    return found


def judge_right(regions: list[str], place: int, seeds: range, worker: Surveyor) -> list[Honest]:
    """Verdicts on one right change, as many as the budget allows; none on a region that the
    reference does not call, of which nothing can be said."""
    change = honest_changes(worker.workload, regions)[place]
    found: list[Honest] = []
    if not worker.survey.spent:
        for verdict in judge_honest(worker.workload, [change], iter(seeds), len(seeds)):
            if verdict.reason == verdicts.UNCALLED:
                break
            found.append(verdict)
            if worker.survey.spent:
                break
    return found


def run(survey: Survey, jobs: int, say: Say) -> Findings:
    """The whole survey in `jobs` processes. SelfTestError if no verdict can be trusted; UserError
    for a region that there is not, or a worker that ended."""
    if jobs == 1:
        workload = load(survey)
        start = functools.partial(contextlib.nullcontext, Surveyor(survey, workload))
    else:
        start = functools.partial(surveyor, survey)
    with Pool(start, jobs) as pool:  # whose processes start at once
        if jobs > 1:
            workload = load(survey)
            # Only names are needed here: the weights are the workers'.
            workload.model = workload.file.build(workload.config, "meta", survey.seed)
        schedule = _Schedule(survey, workload, pool, say)
        say(f"{workload.name} {workload.preset} on {workload.device}: the judge's self-test")
        schedule.add()
        pool.run()
    return schedule.findings()


class _Schedule:
    """Makes the tasks, and puts their results in order."""

    def __init__(self, survey: Survey, workload: Workload, pool: Pool, say: Say) -> None:
        self.survey, self.workload, self.pool, self.say = survey, workload, pool, say
        self.regions = regions_of(workload, survey.regions)
        self.changes = honest_changes(workload, self.regions)
        self.right = len(self.changes) if survey.honest is None else survey.honest
        self.counts: dict[str, int | str] = {}
        self.parts: dict[str, dict[int, list[Outcome]]] = {}  # by the first mutant's place
        self.missing: Counter[str] = Counter()  # parts that are not there yet
        self.honest: dict[int, list[Honest]] = {}

    def add(self) -> None:
        self.pool.add(Task("tests itself", "", run_self_test, lambda _: None))
        for region in self.regions:
            run = functools.partial(count_mutants, region)
            then = functools.partial(self.counted, region)
            self.pool.add(Task(f"prepares {region}", region, run, then))
        each, more = divmod(self.right, max(1, len(self.changes)))
        first = self.survey.seed + 1
        for place, (change, backend) in enumerate(self.changes):
            seeds = range(first, first := first + each + (place < more))
            if seeds:
                doing = f"judges {change.name} ({backend}) in {change.region}"
                run = functools.partial(judge_right, self.regions, place, seeds)
                then = functools.partial(self.judged_right, place)
                self.pool.add(Task(doing, f"change {place}", run, then))

    def counted(self, region: str, count: int | str) -> None:
        """Each part of a region's mutants becomes a task."""
        self.counts[region] = count
        if isinstance(count, str):
            self.say(f"{region}: {count}")
            return
        survey = self.survey
        places = chosen(count, survey.limit, survey.sample, survey.seed)
        self.parts[region] = {}
        for at in range(0, len(places), PART):
            part = places[at : at + PART]
            self.missing[region] += 1
            doing = f"judges mutants {at + 1} to {at + len(part)} of {region}"
            run = functools.partial(judge_part, region, part)
            then = functools.partial(self.judged, region, at, len(places))
            self.pool.add(Task(doing, region, run, then))

    def judged(self, region: str, at: int, made: int, outcomes: list[Outcome]) -> None:
        self.parts[region][at] = outcomes
        self.missing[region] -= 1
        for outcome in outcomes:
            if outcome.status == SURVIVED:
                self.say(f"{region}: SURVIVED: {outcome}")
        if not self.missing[region]:
            found = self.outcomes(region)
            seen, spent = counted(found), sum(o.seconds for o in found)
            self.say(
                f"{region}: {made} of {self.counts[region]} mutants, {seen.killed} killed, "
                f"{seen.survived} survived, {seen.equivalent} equivalent; {spent:.1f} s"
            )

    def judged_right(self, place: int, found: list[Honest]) -> None:
        for verdict in found:
            self.honest.setdefault(place, []).append(verdict)
            done = sum(map(len, self.honest.values()))
            word = "accepted" if verdict.accepted else f"REJECTED: {verdict.reason}"
            self.say(
                f"honest {done} of {self.right}: {verdict.name} ({verdict.backend}), "
                f"seed {verdict.seed}: {word}"
            )

    def outcomes(self, region: str) -> list[Outcome]:
        parts = self.parts.get(region, {})
        return [outcome for at in sorted(parts) for outcome in parts[at]]

    def findings(self) -> Findings:
        by_region = {region: self.outcomes(region) for region in self.regions}
        counts = {region: n for region, n in self.counts.items() if isinstance(n, int)}
        return Findings(
            model=self.workload.name,
            preset=self.workload.preset,
            device=str(self.workload.device),
            outcomes=[outcome for found in by_region.values() for outcome in found],
            left={r: counts.get(r, 0) - len(by_region[r]) for r in self.regions},
            honest=[verdict for place in sorted(self.honest) for verdict in self.honest[place]],
            uncounted=[region for region in self.regions if self.counts[region] == SPENT],
        )
