"""`python -m harness mutants`: does the judge refuse all that is wrong, and nothing right?"""

import argparse
import time
from typing import Any

from harness import cli, evidence
from harness.arguments import require_folder
from harness.command_bench import progress
from harness.survey import EQUIVALENT, SURVIVED, Counts, Honest, Outcome, counted, exit_code
from harness.surveyor import Findings, Survey, run

COLUMNS = "mutants", "killed", "survived", "equivalent", "not judged"


def mutants(a: argparse.Namespace) -> int:
    started = time.monotonic()
    survey = Survey(
        model=a.model,
        preset=a.preset,
        device=a.device,
        seed=a.seed,
        regions=a.region,
        limit=a.limit,
        sample=a.sample,
        honest=a.honest,
        until=started + 60 * a.budget_minutes if a.budget_minutes else float("inf"),
    )
    require_folder(a.out)
    found = run(survey, a.jobs, progress)
    seconds = time.monotonic() - started
    evidence.give(a, as_json(found, a.seed), lambda: show(found, seconds), seconds)
    return exit_code(found.outcomes, found.honest)


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


def show(found: Findings, seconds: float) -> None:
    outcomes, left, honest = found.outcomes, found.left, found.honest
    print(f"{found.model} {found.preset} on {found.device}")
    cli.print_table(
        "mutants by region, by kind", ("region or kind", *COLUMNS), rows(outcomes, left)
    )
    for status in (EQUIVALENT, SURVIVED):
        for o in outcomes:
            if o.status == status:
                print(f"{status}: {o.region}: {o}")
    for region in found.uncounted:
        print(f"not begun, since the budget was spent: {region}")
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


def as_json(found: Findings, seed: int) -> dict[str, Any]:
    every = rows(found.outcomes, found.left)[-1][1:]
    return {
        "model": found.model,
        "preset": found.preset,
        "device": found.device,
        "seed": seed,
        "counts": dict(zip(COLUMNS, every, strict=True)),
        "not_judged": found.left,
        "not_begun": found.uncounted,
        "mutants": [o.to_json() for o in found.outcomes],
        "honest": [h.to_json() for h in found.honest],
    }


COMMANDS = {"mutants": mutants}
