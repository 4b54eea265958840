"""The search in rounds of several candidates: which of them goes on to the whole model, what their
author is told, and when the search has come to its end. Torch-free.

A round is over when each of its candidates is decided. What is known of it stands in the ledger.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.claude import options, words
from agents.history import History
from agents.mcp_link import MCP
from harness.arguments import count, share
from harness.errors import UserError
from harness.ledger import Ledger
from harness.records import Attempt, Paired, Record, Status, Verdict

ROUND, EVALUATED = "round", "evaluated"  # the ledger's events
PLATEAU, FLOOR = "plateau", "floor"  # why a run stopped


@dataclass(frozen=True, kw_only=True)
class Limits(Record):
    """When a search ends by itself."""

    plateau: int | None = 3  # rounds in a row that kept nothing; None: however many
    floor_share: float = 0.9  # of a step's time that its bytes need at the least


@dataclass(frozen=True, kw_only=True)
class Stop:
    reason: str  # PLATEAU or FLOOR
    why: str


@dataclass(frozen=True, kw_only=True)
class Evaluated(Record):
    """A candidate at region level: its verdict and, if it passed, the `time` of one call of its
    region without it and with it; None where no timed step calls the region. `worker` did it,
    after others were lost at it."""

    file: str
    region: str
    verdict: Verdict
    time: Paired | None
    call: str | None = None  # which was timed
    seconds: float
    worker: str | None = None
    losses: tuple[str, ...] = ()

    @property
    def slower(self) -> bool:
        """Surely, alone."""
        return self.time is not None and self.time.gain_interval_us[1] < 0


def add(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("when the search ends by itself")
    group.add_argument(
        "--plateau",
        type=count,
        metavar="N",
        help="after so many rounds of a model's candidates in a row that kept nothing; default "
        f"{Limits.plateau}",
    )
    group.add_argument(
        "--floor-share",
        type=share,
        metavar="S",
        help="once the bytes that a step must move take so large a share of its time; default "
        f"{Limits.floor_share}",
    )


def check(a: argparse.Namespace) -> None:
    """UserError for what cannot work."""
    if a.plateau is not None and a.resume is None and not options.writes_code(a):
        raise UserError(f"--plateau counts a model's rounds; {options.TO_ASK}, or leave it out")


def limits(a: argparse.Namespace) -> Limits:
    """Of the run; a coding agent that is connected over MCP gives up by itself."""
    own: dict[str, Any] = {"plateau": None} if a.proposer == MCP else {}
    return Limits(**(own | recorded(a)))


def recorded(a: argparse.Namespace) -> dict[str, Any]:
    """For the ledger: what was asked for."""
    given = {name: getattr(a, name) for name in ("plateau", "floor_share")}
    return {name: value for name, value in given.items() if value is not None}


def recall(a: argparse.Namespace, known: dict[str, Any]) -> None:
    """A continued run goes on with its limits, or with those that are given now."""
    for name in ("plateau", "floor_share"):
        if getattr(a, name) is None:
            setattr(a, name, known.get(name))


def ending(
    history: History, limits: Limits, floor_us: float | None, step_us: float | None
) -> Stop | None:
    """Why nothing more is to be tried: of the target's step, the floor and the time as it is now,
    where they are known."""
    if floor_us and step_us and floor_us / step_us >= limits.floor_share:
        return Stop(
            reason=FLOOR,
            why=f"the bytes of a step take at least {floor_us:.1f} of its {step_us:.1f} us, "
            f"{floor_us / step_us:.0%}; --floor-share is {limits.floor_share:.0%}",
        )
    if limits.plateau is not None and (count := fruitless(history)) >= limits.plateau:
        rounds = "round" if count == 1 else "rounds"
        return Stop(
            reason=PLATEAU,
            why=f"{count} {rounds} in a row kept nothing; --plateau is {limits.plateau}",
        )
    return None


def rounds(ledger: Ledger) -> list[list[str]]:
    """The files of each round that was begun."""
    return [event.data["files"] for event in ledger.events() if event.kind == ROUND]


def begin(ledger: Ledger, files: Sequence[str]) -> int:
    """Record that a round of these files begins, once; its number."""
    known = rounds(ledger)
    if list(files) not in known:
        known.append(list(files))
        ledger.append(ROUND, {"number": len(known), "files": list(files)})
    return known.index(list(files)) + 1


def fruitless(history: History) -> int:
    """How many rounds in a row, up to the last that is over, kept nothing."""
    count, decided = 0, {a.name: a for a in history.attempts}
    for files in rounds(history.ledger):
        found = [decided[file] for file in files if file in decided]
        if len(found) == len(files):
            count = 0 if any(a.status is Status.KEPT for a in found) else count + 1
    return count


def evaluated(ledger: Ledger) -> dict[str, Evaluated]:
    """All that was judged at region level, by file."""
    return {e.file: e for e in ledger.all(EVALUATED, Evaluated)}


def in_order(found: Sequence[Evaluated], calls: Mapping[str, int]) -> list[Evaluated]:
    """Those that go no further first, then by what they gain in a step, the most first; `calls` is
    how often a step calls each region."""

    def gain(e: Evaluated) -> float:
        return e.time.gain_us * calls.get(e.region, 1) if e.time is not None else -math.inf

    return sorted(found, key=lambda e: (e.verdict.passed and not e.slower, -gain(e)))


def beaten(e: Evaluated, kept: Evaluated) -> str:
    """Why a candidate goes no further than its region."""
    return (
        f"{name(kept.file)} of the same round was kept in its place: one call of {e.region} gains "
        f"{_gain(kept.time)} with that, {_gain(e.time)} with this one"
    )


def no_faster(e: Evaluated) -> str:
    assert e.time is not None
    return f"its region gets slower with it: {words.pair(f'one call of {e.region}', e.time)}"


def _gain(time: Paired | None) -> str:
    return "an unknown time" if time is None else f"{time.gain_us:.1f} us"


def name(file: str) -> str:
    return Path(file).name


def outcome_of(history: History, files: Sequence[str]) -> str | None:
    """What came of a round, in words; None while one of its candidates is undecided."""
    decided = {a.name: a for a in history.attempts}
    attempts = [decided[file] for file in files if file in decided]
    if len(attempts) < len(files):
        return None
    return outcome(begin(history.ledger, files), attempts, evaluated(history.ledger))


def outcome(number: int, attempts: Sequence[Attempt], found: Mapping[str, Evaluated]) -> str:
    """What came of a round, for whoever wrote its candidates: a line for each, then all about the
    best one and about the failure that teaches most. Of a round of one, all about it."""
    if len(attempts) == 1:
        return words.attempt(attempts[0])
    counts = [f"{sum(a.status is s for a in attempts)} {s}" for s in Status]
    lines = [f"round {number}, {len(attempts)} candidates: {', '.join(counts)}"]
    lines += [f"{name(a.name)}: {a.status}: {a.reason}" for a in attempts]
    lead, failure = best(attempts, found), instructive(attempts)
    for what, one in (("the best", lead), ("the most instructive failure", failure)):
        if one is None or (what != "the best" and one is lead):
            continue
        lines += ["", f"{what}: {name(one.name)}", words.attempt(one)]
        known = found.get(one.name)
        if known is not None and known.time is not None:
            lines.append(words.pair(known.call or f"one call of {known.region}", known.time))
    return "\n".join(lines)


def best(attempts: Sequence[Attempt], found: Mapping[str, Evaluated]) -> Attempt | None:
    """A kept one, or else, of those that are right, the one whose region gained most."""

    def key(a: Attempt) -> tuple[bool, float]:
        known = found.get(a.name)
        time = None if known is None else known.time
        return a.status is Status.KEPT, -math.inf if time is None else time.gain_us

    right = [a for a in attempts if not _broken(a) and a.status is not Status.FAILED]
    return max(right, key=key, default=None)


def instructive(attempts: Sequence[Attempt]) -> Attempt | None:
    """The refused one that came nearest to passing: most cases judged, fewest rounding points
    wrong, then closest to its bound; if all are right, the one that lost least time."""
    wrong = [(a, v) for a in attempts for v in _broken(a)]
    if wrong:
        return min(wrong, key=lambda one: distance(one[1]))[0]
    failed = [a for a in attempts if a.status is not Status.KEPT]
    return failed[0] if failed else None


def distance(v: Verdict) -> tuple[float, ...]:
    """How far a verdict is from passing; less is nearer."""
    points = sum(p.observed not in (p.declared, "not visible") for p in v.points)
    excess = max((_excess(1 - o.bit_equal_share, o.allowed_share) for o in v.outputs), default=0.0)
    worst = max((o.worst_scaled for o in v.outputs), default=math.inf)
    return -v.cases, points, excess, worst


def _excess(share: float, allowed: float) -> float:
    if not share:
        return 0.0
    return share / allowed if allowed else math.inf


def _broken(a: Attempt) -> list[Verdict]:
    """Its verdicts that did not pass."""
    return [v for v in (a.region_verdict, a.model_verdict) if v is not None and not v.passed]
