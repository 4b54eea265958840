"""Work spread over processes. Torch-free.

A task says what it does and what it needs to have prepared (`key`); a worker that has prepared
that for one task gets the next of the same key. A worker that ends is an error that says what it
was doing. Ctrl-C and errors end all workers, and so does the end of their parent.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from harness.confine import die_with_parent
from harness.errors import SelfTestError, UserError

JOIN_S = 20.0  # for workers to close what they hold
# Many processes that compile must not start a process for each core, every one of them.
SET = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
MEMORY = "MemoryError", "OutOfMemoryError"  # torch's is told by its name

Start = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Task:
    """`run` gets what the worker's start gave; it and its result have to be picklable."""

    doing: str  # "judges mutants 25 to 48 of swiglu"
    key: str
    run: Callable[[Any], Any]
    then: Callable[[Any], None]  # called here with the result; may add tasks


class Pool:
    """Runs tasks in `jobs` processes, or in this one where that is 1. Use as a context manager.

    Each worker enters `start()` once.
    """

    def __init__(self, start: Start, jobs: int) -> None:
        self.start = start
        self.waiting: list[Task] = []
        self.workers = [_Worker(start, n) for n in range(jobs)] if jobs > 1 else []

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.process.terminate()
        until = time.monotonic() + JOIN_S
        for worker in self.workers:
            worker.end(until)

    def add(self, *tasks: Task) -> None:
        self.waiting += tasks

    def run(self) -> None:
        """Until no task is left."""
        if not self.workers:
            self._run_here()
        while True:
            for worker in self.workers:
                if worker.task is None and self.waiting:
                    worker.give(self._next(worker.key))
            busy = [w for w in self.workers if w.task is not None]
            if not busy:
                return
            wait([w.connection for w in busy])  # readable, too, when its process has ended
            for worker in busy:
                if worker.connection.poll():
                    task, result = worker.take()
                    task.then(result)

    def _run_here(self) -> None:
        key = ""
        with self.start() as state:
            while self.waiting:
                task = self._next(key)
                key = task.key
                task.then(task.run(state))

    def _next(self, key: str) -> Task:
        """The first task of that key, or else the first."""
        same = (i for i, task in enumerate(self.waiting) if task.key == key)
        return self.waiting.pop(next(same, 0))


class _Worker:
    def __init__(self, start: Start, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), name=f"worker {number}")
        self.task: Task | None = None
        self.key = ""
        with _ctrl_c_is_the_parents():
            self.process.start()
        theirs.close()
        self._send(start)

    def give(self, task: Task) -> None:
        self.task, self.key = task, task.key
        self._send(task.run)

    def take(self) -> tuple[Task, Any]:
        """The task and its result; raises what went wrong."""
        task = self.task
        assert task is not None
        try:
            ended_well, value = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise UserError(self._how_it_ended()) from None
        if not ended_well:
            raise _as_error(value, task.doing)
        self.task = None
        return task, value

    def _send(self, value: Any) -> None:
        # A worker that has ended shows when its answer is read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(value)

    def _how_it_ended(self) -> str:
        self.process.join(JOIN_S)
        code = self.process.exitcode
        how = "does not answer" if code is None else f"ended with exit status {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        doing = self.task.doing if self.task is not None else "starts"
        return f"{self.process.name} {how} while it {doing}; try again with fewer --jobs"

    def end(self, until: float) -> None:
        self.process.join(max(0.0, until - time.monotonic()))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()


@contextlib.contextmanager
def _ctrl_c_is_the_parents() -> Iterator[None]:
    """A process started meanwhile does not see Ctrl-C; its parent ends it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(connection: Connection) -> None:
    """The worker: first what to start, then one task after the other until the parent is gone."""
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ.update(SET)  # before torch is imported, by what comes next
    try:
        start: Start = connection.recv()
        with start() as state:
            while True:
                run = connection.recv()
                connection.send((True, run(state)))
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:  # noqa: BLE001 - raised again in the parent
        with contextlib.suppress(BrokenPipeError):
            connection.send((False, _portable(error)))


def _portable(error: Exception) -> tuple[str, str]:
    """An error as data: what kind it is, and its text."""
    if isinstance(error, (UserError, SelfTestError)):
        return type(error).__name__, str(error)
    if type(error).__name__ in MEMORY:
        return MEMORY[0], str(error).partition("\n")[0]
    return "", traceback.format_exc()


def _as_error(value: tuple[str, str], doing: str) -> Exception:
    kind, text = value
    for known in (UserError, SelfTestError):
        if kind == known.__name__:
            return known(text)
    if kind == MEMORY[0]:
        return UserError(f"out of memory while a worker {doing}: {text}; use fewer --jobs")
    return RuntimeError(f"a worker failed while it {doing}:\n{text}")
