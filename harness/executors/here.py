"""Jobs in this very process, one after the other: what an executor is without workers. Torch-free.

What a job raises keeps its traceback. Nothing protects this process from a job that ends it.
"""

import contextlib
import platform
from collections.abc import Iterable, Iterator
from typing import Any

from harness.executors.base import Done, Job, Place, Start, next_of


class Here:
    """An executor (`harness.executors.base.Executor`); `start` is entered with the first job."""

    def __init__(self, start: Start, device: str = "cpu") -> None:
        self.start = start
        self.workers = (Place(name="this process", device=device, host=platform.node()),)
        self.waiting: list[Done] = []
        self.stack = contextlib.ExitStack()
        self.state: Any = None
        self.entered = False

    def add(self, *jobs: Job) -> None:
        """More jobs for the `run` that goes on."""
        self.waiting += (Done(job=job, worker=self.workers[0]) for job in jobs)

    def run(self, jobs: Iterable[Job] = ()) -> Iterator[Done]:
        self.add(*jobs)
        key = ""
        while self.waiting:
            todo = self.waiting.pop(next_of(key, self.waiting))
            key = todo.job.key
            yield self._done(todo.job)

    def _done(self, job: Job) -> Done:
        if not self.entered:
            self.state = self.stack.enter_context(self.start())
            self.entered = True
        try:
            return Done(job=job, worker=self.workers[0], result=job.run(self.state))
        except Exception as error:  # noqa: BLE001 - raised again by whoever asks for the value
            return Done(job=job, worker=self.workers[0], error=error)

    def await_ready(self) -> None:
        """It is."""

    def close(self) -> None:
        self.stack.close()
