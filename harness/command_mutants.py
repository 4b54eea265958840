"""`python -m harness mutants`: does the judge refuse all that is wrong, and nothing right?"""

import argparse
import itertools
import json
import time
from typing import Any

from harness import cli
from harness.command_bench import progress
from harness.judge import self_test
from harness.mutants import derive_mutants
from harness.region import RegionCases
from harness.survey import (
    EQUIVALENT,
    SURVIVED,
    Counts,
    Honest,
    Outcome,
    chosen,
    contract_of,
    counted,
    exit_code,
    honest_changes,
    judge_honest,
    judge_mutant,
    regions_of,
)
from harness.workload import Workload
from optimized.change import share

COLUMNS = "mutants", "killed", "survived", "equivalent", "not judged"


def mutants(a: argparse.Namespace) -> int:
    started = time.monotonic()
    until = started + 60 * a.budget_minutes if a.budget_minutes else float("inf")
    workload = Workload.load(a.model, a.preset, a.device, a.seed)
    names = regions_of(workload, a.region)
    progress(f"{workload.name} {workload.preset} on {workload.device}: the judge's self-test")
    self_test(workload.model, workload, a.seed)
    outcomes: list[Outcome] = []
    left: dict[str, int] = {}
    for region in names:
        found, left[region] = judge_region_mutants(workload, region, a, until)
        outcomes += found
    honest: list[Honest] = []
    changes = honest_changes(workload, names)
    count = len(changes) if a.honest is None else a.honest
    count = 0 if time.monotonic() > until else count
    for verdict in judge_honest(workload, changes, itertools.count(a.seed + 1), count):
        honest.append(verdict)
        word = "accepted" if verdict.accepted else f"REJECTED: {verdict.reason}"
        progress(
            f"honest {len(honest)} of {count}: {verdict.name} ({verdict.backend}), "
            f"seed {verdict.seed}: {word}"
        )
        if time.monotonic() > until:
            break
    if a.json:
        print(json.dumps(as_json(workload, a.seed, outcomes, left, honest), indent=1))
    else:
        show(outcomes, left, honest, time.monotonic() - started)
    return exit_code(outcomes, honest)


def judge_region_mutants(
    workload: Workload, region: str, a: argparse.Namespace, until: float
) -> tuple[list[Outcome], int]:
    """The outcomes of one region, and how many mutants the budget left out."""
    if time.monotonic() > until:
        progress(f"{region}: the budget is spent")
        return [], 0
    contract = contract_of(region, workload)
    cases = RegionCases.prepare(workload.model, region, contract, workload, a.seed)
    if not cases.names:
        progress(f"{region}: the reference does not call it")
        return [], 0
    every = derive_mutants(cases)
    made = chosen(every, a.limit, a.sample, a.seed)
    candidate = share(workload.model)
    outcomes: list[Outcome] = []
    for mutant in made:
        if time.monotonic() > until:
            break
        outcome = judge_mutant(region, cases, candidate, mutant)
        outcomes.append(outcome)
        if outcome.status == SURVIVED:
            progress(f"{region}: SURVIVED: {mutant}: {outcome.reason}")
    seen = counted(outcomes)
    spent = sum(o.seconds for o in outcomes)
    progress(
        f"{region}: {len(made)} of {len(every)} mutants, {seen.killed} killed, {seen.survived} "
        f"survived, {seen.equivalent} equivalent; {spent:.1f} s"
    )
    return outcomes, len(every) - len(outcomes)


def rows(outcomes: list[Outcome], left: dict[str, int]) -> list[tuple[Any, ...]]:
    """One row for each region, then one for each kind."""
    regions = dict.fromkeys([*left, *(o.region for o in outcomes)])
    kinds = sorted({o.kind for o in outcomes})
    found = []
    for region in regions:
        mine = [o for o in outcomes if o.region == region]
        found.append((region, *_row(counted(mine, left.get(region, 0)))))
    for kind in kinds:
        found.append((kind, *_row(counted(o for o in outcomes if o.kind == kind))))
    found.append(("all", *_row(counted(outcomes, sum(left.values())))))
    return found


def _row(c: Counts) -> tuple[int, ...]:
    return c.made, c.killed, c.survived, c.equivalent, c.left


def show(
    outcomes: list[Outcome], left: dict[str, int], honest: list[Honest], seconds: float
) -> None:
    cli.print_table(
        "mutants by region, by kind", ("region or kind", *COLUMNS), rows(outcomes, left)
    )
    for status in (EQUIVALENT, SURVIVED):
        for o in outcomes:
            if o.status == status:
                print(f"{status}: {o.region}: {o}")
    groups: dict[tuple[str, str, str], list[Honest]] = {}
    for verdict in honest:
        groups.setdefault((verdict.region, verdict.name, verdict.backend), []).append(verdict)
    cli.print_table(
        "honest changes",
        ("region", "change", "backend", "seeds", "accepted", "wrongly rejected"),
        (
            (
                *key,
                _seeds(group),
                sum(h.accepted for h in group),
                sum(not h.accepted for h in group),
            )
            for key, group in groups.items()
        ),
        left=4,
    )
    for h in honest:
        if not h.accepted:
            print(f"wrongly rejected: {h.name} ({h.backend}), seed {h.seed}: {h.reason}")
    refused = sum(not h.accepted for h in honest)
    c = counted(outcomes, sum(left.values()))
    print(
        f"{c.killed} of {c.made - c.left - c.equivalent} mutants killed, {c.survived} survived, "
        f"{c.equivalent} equivalent, {c.left} not judged; {len(honest) - refused} of {len(honest)} "
        f"honest verdicts accepted; {seconds:.0f} s"
    )


def _seeds(group: list[Honest]) -> str:
    seeds = [h.seed for h in group]
    return str(seeds[0]) if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)}"


def as_json(
    workload: Workload,
    seed: int,
    outcomes: list[Outcome],
    left: dict[str, int],
    honest: list[Honest],
) -> dict[str, Any]:
    return {
        "model": workload.name,
        "preset": workload.preset,
        "device": str(workload.device),
        "seed": seed,
        "counts": dict(zip(("mutants", *COLUMNS[1:]), rows(outcomes, left)[-1][1:], strict=True)),
        "not_judged": left,
        "mutants": [o.to_json() for o in outcomes],
        "honest": [h.to_json() for h in honest],
    }


COMMANDS = {"mutants": mutants}
