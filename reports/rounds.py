"""The rounds of candidates that a model submitted: what each came to at region level and after."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.records import Attempt, Paired, Record, Verdict

if TYPE_CHECKING:
    from reports.run import Run


@dataclass(frozen=True, kw_only=True)
class Evaluated(Record):
    """One candidate's region: its verdict, and one call without it and with it."""

    file: str
    verdict: Verdict
    time: Paired | None
    call: str | None  # which was timed
    worker: str | None  # None: the run's own process
    losses: tuple[str, ...]  # how workers ended at it before

    @classmethod
    def of(cls, event: dict[str, Any]) -> "Evaluated":
        """From the ledger's event."""
        return cls(
            file=event["file"],
            verdict=Verdict.from_json(event["verdict"]),
            time=Paired.from_json(event["time"]) if event["time"] else None,
            call=event.get("call"),
            worker=event.get("worker"),
            losses=tuple(event.get("losses") or ()),
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """A candidate of round `number`; without an attempt it is not decided yet."""

    number: int
    name: str
    evaluated: Evaluated | None
    attempt: Attempt | None

    @property
    def region(self) -> str:
        """Its region's verdict in a word or two."""
        if self.evaluated is None:
            return "not judged"
        return "passed" if self.evaluated.verdict.passed else "failed"


def rows(run: "Run") -> list[Row]:
    """Every candidate of rounds of more than one; of others the table of changes tells it all."""
    found = {e.file: e for e in run.evaluated}
    tried = {a.name: a for a in run.changes()}
    return [
        Row(number=number, name=Path(file).name, evaluated=found.get(file), attempt=tried.get(file))
        for number, files in enumerate(run.rounds, start=1)
        for file in _several(files)
    ]


def _several(files: Sequence[str]) -> Sequence[str]:
    return files if len(files) > 1 else ()


def workers(run: "Run") -> list[str]:
    """Who judged candidates apart from the run's own process, each once."""
    return list(dict.fromkeys(e.worker for e in run.evaluated if e.worker is not None))


def losses(run: "Run") -> list[str]:
    """Workers that ended at a candidate, which another then judged."""
    return [f"{Path(e.file).name}: {how}" for e in run.evaluated for how in e.losses]


def judged_by(workspace: dict[str, Any]) -> str:
    """Whose oracle and judge a model's candidates met, from the ledger's event."""
    if workspace["absent"] is not None:
        return f"the files as they were: {workspace['absent']}"
    if workspace["judging"]:
        names = ", ".join(workspace["judging"])
        return f"the files as they were; not as in commit {workspace['commit']}: {names}"
    return f"a checkout of commit {workspace['commit']}, each in a worktree of its own"
