"""An executor in a process of its own. Torch-free.

For a Ray cluster: Ray ends the process that has lost its cluster, prints on stdout, takes signals,
and needs the network for as long as it works. None of that should be a run's.
"""

import contextlib
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from harness.errors import UserError
from harness.executors import portable
from harness.executors.base import Done, Executor, Job, Place
from harness.executors.crew import Lost
from harness.executors.local import CPU, JOIN_S, Process


class Apart:
    """An executor (`harness.executors.base.Executor`) around the one that `make` makes elsewhere;
    its workers are ready when this is made. `what` is lost if that process ends, says its
    UserError."""

    def __init__(self, make: Callable[[], Executor], what: str) -> None:
        self.what, self.busy = what, False
        place = Place(name=what, device=CPU, host=platform.node())
        self.process = Process(partial(held, make), place)
        with ExitStack() as undo:
            undo.callback(self.close)
            self._hear("starts")
            self.workers: tuple[Place, ...] = self._ask(places)
            undo.pop_all()

    def run(self, jobs: Iterable[Job] = ()) -> Iterator[Done]:
        listed = list(jobs)
        self.busy = True
        self._ask(partial(begin, listed))
        while (found := self._ask(following)) is not None:
            number, done = found
            yield replace(done, job=listed[number])
        self.busy = False
        self.workers = self._ask(places)

    def await_ready(self) -> None:
        """They are."""

    def _ask(self, what: Callable[["Held"], Any]) -> Any:
        self.process.give(what)
        return self._hear("works")

    def _hear(self, doing: str) -> Any:
        try:
            well, value = self.process.hear()
        except Lost as lost:
            raise UserError(
                f"{self.what} was lost: the process that held it {lost}; continue the run with "
                "--resume, with the same workers or with --executor local"
            ) from None
        if not well:
            raise portable.error(value, doing)
        return value

    def close(self) -> None:
        if self.busy:
            self.process.process.terminate()
        self.process.connection.close()  # an idle one ends by that
        self.process.join(time.monotonic() + JOIN_S)


@dataclass
class Held:
    """In that process: the executor, and the run that goes on."""

    executor: Executor
    running: Iterator[Done] = field(default_factory=lambda: iter(()))
    numbers: dict[Job, int] = field(default_factory=dict)


@contextlib.contextmanager
def held(make: Callable[[], Executor]) -> Iterator[Held]:
    with open(os.devnull, "w") as nowhere:
        sys.stdout = nowhere  # the run's own output goes there
        with contextlib.closing(make()) as executor:
            executor.await_ready()
            yield Held(executor)


def places(state: Held) -> tuple[Place, ...]:
    return state.executor.workers


def begin(jobs: list[Job], state: Held) -> None:
    state.numbers = {job: number for number, job in enumerate(jobs)}
    state.running = state.executor.run(jobs)


def following(state: Held) -> tuple[int, Done] | None:
    """The next job that is done, by its number; None after the last."""
    done = next(state.running, None)
    return None if done is None else (state.numbers[done.job], done)
