"""What a language model used up in a run: tokens and dollars, for each attempt and in all."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from harness.records import Attempt, Record
from reports import text

if TYPE_CHECKING:
    from reports.run import Run

AFTERWARDS = "after the last submission"
UNTRIED = "submitted, not tried"


@dataclass(frozen=True, kw_only=True)
class Tokens(Record):
    """By how they are billed."""

    input: int = 0  # of prompts, new
    cache_write: int = 0
    cache_read: int = 0
    output: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))

    def __add__(self, other: "Tokens") -> "Tokens":
        names = [f.name for f in fields(self)]
        return Tokens(**{n: getattr(self, n) + getattr(other, n) for n in names})


@dataclass(frozen=True, kw_only=True)
class Spending(Record):
    """From the submission before until `file` was submitted, or to the end where that is None.
    `usd` is None for a model without a known price."""

    file: str | None
    tokens: Tokens
    usd: float | None

    @classmethod
    def of(cls, event: dict[str, Any]) -> "Spending":
        """From the ledger's event."""
        return cls(file=event["file"], tokens=Tokens(**event["spent"]), usd=event["usd"])

    @property
    def words(self) -> str:
        """12,345 tokens, $0.1234"""
        cost = "" if self.usd is None else f", {dollars(self.usd)}"
        return f"{text.count(self.tokens.total, 'token')}{cost}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: an attempt, or what belongs to none."""

    what: str
    attempt: Attempt | None
    spending: Spending


def rows(run: "Run") -> list[Row]:
    """What each submission cost, in order; empty where no model took part."""
    tried = {a.name: a for a in run.changes()}
    found = []
    for one in run.spending:
        attempt = tried.get(one.file or "")
        what = attempt.name if attempt else UNTRIED if one.file else AFTERWARDS
        found.append(Row(what=what, attempt=attempt, spending=one))
    return found


def total(found: Sequence[Spending]) -> Spending | None:
    """All together; None where no model took part."""
    if not found:
        return None
    prices = [one.usd for one in found]
    known = None if None in prices else sum(p for p in prices if p is not None)
    return Spending(file=None, tokens=sum((o.tokens for o in found), Tokens()), usd=known)


def of_attempt(run: "Run", attempt: Attempt) -> Spending | None:
    return next((one for one in run.spending if one.file == attempt.name), None)


def document(one: Spending | None) -> dict[str, Any] | None:
    """For summary.json."""
    if one is None:
        return None
    return {"tokens": one.tokens.total, **one.tokens.to_json(), "usd": one.usd}


def dollars(usd: float | None) -> str:
    """$12.34, small ones with four places; a dash where no price is known."""
    if usd is None:
        return text.NONE
    return f"${usd:,.4f}" if usd < 1 else f"${usd:,.2f}"
