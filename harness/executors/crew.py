"""Jobs spread over workers that may end at any moment. Torch-free.

Written once for all kinds of workers: who gets which job, what becomes of a job whose worker ended,
what replaces that worker.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.errors import UserError
from harness.executors import portable
from harness.executors.base import Done, Job, Place, next_of

AGAIN = 2  # times at most that a job is begun anew because its worker ended


class Lost(Exception):
    """A worker ended; how, as the end of a sentence about it: "was killed by SIGKILL"."""


@dataclass(frozen=True)
class Waiting:
    job: Job
    losses: tuple[str, ...] = ()


class Worker(ABC):
    """One worker as its executor sees it: it starts, then does one job at a time."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.ready = False
        self.at: Waiting | None = None
        self.key = ""

    @abstractmethod
    def give(self, run: Callable[[Any], Any]) -> None:
        """Begin a job. A worker that has ended shows in `hear`."""

    @abstractmethod
    def hear(self) -> tuple[bool, Any]:
        """The answer that is there: that it is ready, or what came of its job. True with a result,
        or False with an error as `portable.packed` gives it; raises Lost."""

    @abstractmethod
    def end(self) -> None:
        """End it now, whatever it does."""


class Crew(ABC):
    """An executor (`harness.executors.base.Executor`) whose workers begin to start when it is
    made. A job whose worker ended is begun `again` so many times at most."""

    def __init__(self, again: int = AGAIN) -> None:
        self.again = again
        self.team: list[Worker] = []
        self.waiting: list[Waiting] = []
        self.unstarted = 0  # workers in a row that ended before they were ready

    @property
    def workers(self) -> tuple[Place, ...]:
        return tuple(worker.place for worker in self.team)

    def add(self, *jobs: Job) -> None:
        """More jobs for the `run` that goes on."""
        self.waiting += map(Waiting, jobs)

    def run(self, jobs: Iterable[Job] = ()) -> Iterator[Done]:
        self.add(*jobs)
        while self.waiting or any(worker.at for worker in self.team):
            for worker in self.team:
                if self.waiting and worker.ready and worker.at is None:
                    self._give(worker)
            for worker in self.wait(self.team):
                done = self._hear(worker)
                if done is not None:
                    yield done

    def await_ready(self) -> None:
        while not all(worker.ready for worker in self.team):
            for worker in self.wait([w for w in self.team if not w.ready]):
                self._hear(worker)

    def _give(self, worker: Worker) -> None:
        worker.at = self.waiting.pop(next_of(worker.key, self.waiting))
        worker.key = worker.at.job.key
        worker.give(worker.at.job.run)

    def _hear(self, worker: Worker) -> Done | None:
        try:
            well, value = worker.hear()
        except Lost as lost:
            return self._lost(worker, str(lost))
        if not worker.ready:
            if not well:
                raise portable.error(value, "starts")
            worker.ready, self.unstarted = True, 0
            return None
        entry, worker.at = worker.at, None
        assert entry is not None
        if well:
            return Done(job=entry.job, worker=worker.place, result=value, losses=entry.losses)
        if portable.unforeseen(value):  # it may have left the process, or its card, unusable
            self._renew(worker)
        error = portable.error(value, entry.job.doing)
        return Done(job=entry.job, worker=worker.place, error=error, losses=entry.losses)

    def _lost(self, worker: Worker, how: str) -> Done | None:
        entry = worker.at
        doing = "starts" if not worker.ready else entry.job.doing if entry else "waits"
        told = f"{worker.place.name} {how} while it {doing}"
        if not worker.ready:
            self.unstarted += 1
            if self.unstarted > self.again:
                raise UserError(told)
        self._renew(worker)
        if entry is None:
            return None
        losses = (*entry.losses, told)
        if len(losses) > self.again:
            return Done(job=entry.job, worker=None, error=UserError(told), losses=losses)
        self.waiting.insert(0, replace(entry, losses=losses))
        return None

    def _renew(self, worker: Worker) -> None:
        """Another worker takes its place."""
        self.team.remove(worker)
        worker.end()
        self.team.append(self.replacement(worker))

    @abstractmethod
    def wait(self, team: Sequence[Worker]) -> list[Worker]:
        """Those of the workers that have answered or ended; waits for one."""

    @abstractmethod
    def replacement(self, worker: Worker) -> Worker:
        """A new worker where `worker` was, or wherever there is room."""

    @abstractmethod
    def close(self) -> None: ...
