"""The ledger: append-only JSONL, one fsynced line an event, so that killing a run loses nothing."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from harness.errors import UserError
from harness.records import SCHEMA, Record

R = TypeVar("R", bound=Record)

# What the first event says, besides its schema.
HEADER = {"target": str, "model": str, "preset": str, "device": str, "proposer": str, "seed": int}
DAMAGED = ValueError, TypeError, KeyError, AttributeError, RecursionError  # what bad data raises


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line: what happened (`kind`), when (Unix seconds), and its data."""

    kind: str
    time_s: float
    data: dict[str, Any]


class Ledger:
    """The ledger in `directory`; `create` starts one, `open` continues or reads one."""

    NAME = "ledger.jsonl"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / self.NAME

    @classmethod
    def create(cls, directory: Path) -> "Ledger":
        ledger = cls(directory)
        ledger.require_new()
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot make the run directory {directory}: {error.strerror}; "
                "name another --run-dir"
            ) from error
        return ledger

    @classmethod
    def open(cls, directory: Path) -> "Ledger":
        ledger = cls(directory)
        if not ledger.path.is_file():
            raise UserError(
                f"{directory} is not a run: it has no {cls.NAME}; "
                "a run directory is what agents.run printed as 'run directory'"
            )
        for event in ledger.events():
            schema = event.data.get("schema") if event.kind == "run" else None
            if schema != SCHEMA:
                raise UserError(
                    f"{ledger.path} has schema {schema}, this version reads schema {SCHEMA}; "
                    "read it with the version that wrote it, or start a new run"
                )
            break
        else:
            raise UserError(f"{ledger.path} is empty; start a new run")
        return ledger

    def require_new(self) -> None:
        """UserError if there is a run already; an empty file is what a kill left of none."""
        if self.path.exists() and (not self.path.is_file() or self.path.stat().st_size):
            raise UserError(
                f"{self.directory} already holds a run; continue it with --resume "
                f"{self.directory}, or name another --run-dir"
            )

    def header(self) -> dict[str, Any]:
        """What the run was begun with; UserError where its first event does not say all of it."""
        data = next(self.events()).data
        for name, kind in HEADER.items():
            if not isinstance(data.get(name), kind):
                raise self.damaged(1, "run", f"its {name} is {data.get(name)!r}")
        for name in ("options", "workload"):
            if not isinstance(data.get(name) or {}, dict):
                raise self.damaged(1, "run", f"its {name} are {data[name]!r}")
        return data

    def damaged(self, number: int, kind: str, error: Exception | str) -> UserError:
        """That line `number` is no event of its kind."""
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        return UserError(
            f"{self.path}:{number} is not a valid {kind!r} event ({what}); "
            "restore the file, or start a new run"
        )

    def append(self, kind: str, record: Record | dict[str, Any]) -> None:
        """Write one event and wait until it is on the disk."""
        data = record.to_json() if isinstance(record, Record) else record
        line = json.dumps({"kind": kind, "time_s": round(time.time(), 3), "data": data})
        try:
            self._mend()
            with self.path.open("a") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror}; "
                f"free space, then continue with --resume {self.directory}"
            ) from error

    def _mend(self) -> None:
        """Cut off a last line that a kill or a full disk left unfinished."""
        if not self.path.exists():
            return
        with self.path.open("rb+") as file:
            end = file.seek(0, os.SEEK_END)
            if end == 0 or self._ends_line(file, end):
                return
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)

    @staticmethod
    def _ends_line(file: IO[bytes], end: int) -> bool:
        file.seek(end - 1)
        return file.read(1) == b"\n"

    def events(self) -> Iterator[Event]:
        """All whole lines in order; a last line without its end is not an event."""
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                try:
                    event = Event(**json.loads(line.decode()))
                    if not isinstance(event.data, dict):
                        raise ValueError(f"its data is {event.data!r:.80}")
                except DAMAGED as error:
                    raise UserError(
                        f"{self.path}:{number} is not a ledger line ({error!s:.200}); "
                        "restore the file, or start a new run"
                    ) from error
                yield event

    def all(self, kind: str, record: type[R]) -> list[R]:
        """Every event of this kind as a record, in order; UserError for one that is none."""
        found = []
        for number, event in enumerate(self.events(), start=1):
            if event.kind == kind:
                try:
                    found.append(record.from_json(event.data))
                except DAMAGED as error:
                    raise self.damaged(number, kind, error) from error
        return found

    def last(self, kind: str) -> dict[str, Any] | None:
        found = None
        for event in self.events():
            if event.kind == kind:
                found = event.data
        return found
