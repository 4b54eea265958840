"""What runs jobs, wherever its workers are. Torch-free.

A job says what it does and what it needs to have prepared (`key`); a worker that prepared that for
one job gets the next of the same key. A worker that ends takes nothing with it but the job that it
was at, which another worker does again.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

Start = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Job:
    """`run` gets what the worker's start gave; it and its result have to be picklable."""

    doing: str  # "judges swiglu"
    key: str
    run: Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class Place:
    """A worker: `device` is "cpu" or the card that it alone sees, as the machine numbers it."""

    name: str
    device: str
    host: str


@dataclass(frozen=True, kw_only=True)
class Done:
    """A job that was done; `error` is what it raised. `losses` say how workers ended at it before,
    `worker` is the one that finished it, None if all of them ended."""

    job: Job
    worker: Place | None
    result: Any = None
    error: Exception | None = None
    losses: tuple[str, ...] = ()

    def value(self) -> Any:
        """The result; raises the job's error."""
        if self.error is not None:
            raise self.error
        return self.result


class Executor(Protocol):
    """Runs jobs on `workers`, in each of which a `Start` is entered once. Whoever makes one closes
    it."""

    @property
    def workers(self) -> tuple[Place, ...]: ...

    def run(self, jobs: Iterable[Job] = ()) -> Iterator[Done]:
        """Each job as it is done, in whatever order. Take all of them, or close the executor.

        A job's own error is in its `Done`. UserError if workers cannot start.
        """
        ...

    def await_ready(self) -> None:
        """Until all workers have started, so that nothing of it disturbs what is timed here."""
        ...

    def close(self) -> None:
        """End all workers; they close what they hold first, as far as they do so in time."""
        ...


def next_of(key: str, waiting: list[Any]) -> int:
    """Which of the waiting entries a worker takes that prepared `key`: the first with that key, or
    else the first."""
    return next((i for i, entry in enumerate(waiting) if entry.job.key == key), 0)
