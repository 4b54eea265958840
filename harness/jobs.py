"""Work spread over processes, in which nothing may be lost. Torch-free.

Tasks are an executor's jobs whose results are taken in as they come, and may add other tasks. A
worker that ends is an error here that says what it was doing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness.errors import UserError
from harness.executors.base import Job, Start
from harness.executors.here import Here
from harness.executors.local import CPU, Local


@dataclass(frozen=True)
class Task(Job):
    """A job with what is to be done with its result, in this process."""

    then: Callable[[Any], None]  # may add tasks


class Pool:
    """Runs tasks in `jobs` processes, or in this one where that is 1. Use as a context manager.

    Each worker enters `start()` once. All work on the same device, whichever that is.
    """

    def __init__(self, start: Start, jobs: int) -> None:
        self.executor = Local(start, [CPU] * jobs, again=0) if jobs > 1 else Here(start)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.executor.close()

    def add(self, *tasks: Task) -> None:
        self.executor.add(*tasks)

    def run(self) -> None:
        """Until no task is left; raises what went wrong with one."""
        for done in self.executor.run():
            if done.losses:
                raise UserError(f"{done.losses[-1]}; try again with fewer --jobs")
            assert isinstance(done.job, Task)
            done.job.then(done.value())
