"""Kept changes at the run's other targets: the model before each and with it, in interleaved pairs.

This comes last and takes what is left of the budget. It goes target by target, since each needs a
KV cache filled and its own smallest effect, and within one through the changes in the order in
which they were kept: the model with one is the base of the next, and is made ready once. Whatever
comes of a change at a target is an event, so a continued run measures none again. Torch-free;
`agents.other_pairs` does the timing.
"""

import argparse
from typing import TYPE_CHECKING

from agents.budget import BudgetSpent
from harness.errors import UserError
from reports.other_targets import LEFT, PAIRS, STEPS, OtherPairs

if TYPE_CHECKING:
    from agents.session import Session

AUTO, NONE, ONLY = "auto", "none", "only"
MODES = AUTO, NONE, ONLY


def add(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--other-targets",
        choices=MODES,
        default=AUTO,
        help="time each kept change at the targets that it was not decided on: auto, after "
        "everything else and within the budget; none; only, with --resume: try no further change",
    )


def check(a: argparse.Namespace) -> None:
    """UserError for what cannot work."""
    if a.other_targets != ONLY:
        return
    if a.resume is None:
        raise UserError("--other-targets only is of a run that kept something; name it by --resume")
    if a.change:
        raise UserError("--other-targets only tries no change; leave --change out")


def time_changes(session: "Session", mode: str = AUTO) -> None:
    """Measure what the ledger lacks, and say in it why something is left, if something is."""
    ledger, kept = session.ledger, session.history.kept
    steps = {name: target.describe() for name, target in session.measure.others.items()}
    if not kept or not steps:
        return
    if (ledger.last(STEPS) or {}).get("steps") != steps:
        ledger.append(STEPS, {"steps": steps})
    due = waiting(session)
    if not due:
        return
    why = "left out by --other-targets none"
    if mode != NONE:
        from agents.other_pairs import Timer

        try:
            Timer(session, due).run()
            return
        except BudgetSpent as spent:
            why = str(spent)
    ledger.append(LEFT, {"why": why})
    left, total = sum(map(len, waiting(session).values())), len(steps) * len(kept)
    session.progress.done(
        f"kept changes at other targets: {total - left} of {total} timed; {why}; "
        f"--resume {session.directory} --other-targets only times the rest",
        "yellow",
    )


def waiting(session: "Session") -> dict[str, list[int]]:
    """By target, the kept changes of which the ledger has nothing there, as their places among
    those that were kept."""
    known = {(p.index, p.target) for p in session.ledger.all(PAIRS, OtherPairs)}
    kept = session.history.kept
    found = {
        name: [place for place, a in enumerate(kept) if (a.index, name) not in known]
        for name in session.measure.others
    }
    return {name: places for name, places in found.items() if places}
