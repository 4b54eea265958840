"""Workers on this machine: a process for each device, which sees its own card. Torch-free.

Errors and Ctrl-C end all of them, and so does the end of their parent. They are forked from a
server that is started with the first of them: a worker that replaces one is free of whatever this
process gave up meanwhile (`harness.confined`).
"""

import contextlib
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from harness.confine import die_with_parent
from harness.errors import UserError
from harness.executors import portable
from harness.executors.base import Place, Start
from harness.executors.crew import AGAIN, Crew, Lost, Worker

CPU = "cpu"
VISIBLE = "CUDA_VISIBLE_DEVICES"
JOIN_S = 20.0  # for workers to close what they hold
ORPHAN_S = 1.0  # for one that waits to see that its parent is gone; one at work is ended then
# Many processes that compile must not start a process for each core, every one of them.
SET = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}


def devices(kind: str, count: int | None) -> list[str]:
    """A device for each of `count` workers; by default all cards, or one process on a CPU. Where
    there are more cards than workers the first, this process's own, is left out first. UserError
    for more workers than cards."""
    if kind == CPU:
        return [CPU] * (count or 1)
    cards = cards_here()
    if count is not None and count > len(cards):
        raise UserError(
            f"{count} workers need {count} cards, {len(cards)} are visible here; give --workers "
            f"{len(cards)} or fewer"
        )
    return cards[len(cards) - (count or len(cards)) :]


def cards_here() -> list[str]:
    """The cards that this process sees, by the names that `CUDA_VISIBLE_DEVICES` knows."""
    import torch

    named = [card for card in os.environ.get(VISIBLE, "").split(",") if card]
    return named or [str(n) for n in range(torch.cuda.device_count())]


class Local(Crew):
    """One process for each of `devices`: "cpu", or a card as `CUDA_VISIBLE_DEVICES` names it."""

    def __init__(self, start: Start, devices: Sequence[str], again: int = AGAIN) -> None:
        super().__init__(again)
        self.start = start
        self.count = 0
        self.team = [self._worker(device) for device in devices]

    def _worker(self, device: str) -> "Process":
        self.count += 1
        place = Place(name=f"worker {self.count}", device=device, host=platform.node())
        return Process(self.start, place)

    def wait(self, team: Sequence[Worker]) -> list[Worker]:
        by_connection = {w.connection: w for w in team if isinstance(w, Process)}
        return [by_connection[c] for c in wait(list(by_connection)) if isinstance(c, Connection)]

    def replacement(self, worker: Worker) -> Worker:
        return self._worker(worker.place.device)

    def close(self) -> None:
        processes = [worker for worker in self.team if isinstance(worker, Process)]
        for worker in processes:
            worker.process.terminate()
            worker.connection.close()  # the end, too, for one that waits and does not hear signals
        until = time.monotonic() + JOIN_S
        for worker in processes:
            worker.join(until)


class Process(Worker):
    """One worker's process. Its connection is readable, too, when it has ended."""

    def __init__(self, start: Start, place: Place) -> None:
        super().__init__(place)
        multiprocessing.set_forkserver_preload([])  # above all not the main module, and torch
        context = multiprocessing.get_context("forkserver")
        self.connection, theirs = context.Pipe()
        environment = dict(os.environ) | SET
        if place.device != CPU:
            environment[VISIBLE] = place.device
        self.process = context.Process(target=_work, args=(theirs, environment), name=place.name)
        with _ctrl_c_is_the_parents():
            self.process.start()
        theirs.close()
        self._send(start)

    def give(self, run: Callable[[Any], Any]) -> None:
        self._send(run)

    def hear(self) -> tuple[bool, Any]:
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise Lost(self._how_it_ended()) from None

    def _send(self, value: Any) -> None:
        # A worker that has ended shows when its answer is read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(value)

    def _how_it_ended(self) -> str:
        self.process.join(JOIN_S)
        code = self.process.exitcode
        if code is None:
            return "does not answer"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit status {code}"

    def end(self) -> None:
        self.join(0.0)

    def join(self, until: float) -> None:
        """Wait until then for it to end, and kill it if it does not."""
        self.process.join(max(0.0, until - time.monotonic()))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()


@contextlib.contextmanager
def _ctrl_c_is_the_parents() -> Iterator[None]:
    """The server that is started meanwhile does not see Ctrl-C; its parent ends it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(connection: Connection, environment: dict[str, str]) -> None:
    """The worker: first what to start, then one job after the other until the parent is gone."""
    die_with_parent()  # the server, which outlives the parent as long as it has a worker
    threading.Thread(
        target=_die_with, args=(multiprocessing.parent_process(),), daemon=True
    ).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ.clear()
    os.environ.update(environment)  # before torch is imported, by what comes next
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            start: Start = connection.recv()
            with start() as state:
                connection.send((True, None))
                while True:
                    connection.send(_done(connection.recv(), state))
        except (EOFError, BrokenPipeError):
            raise
        except Exception as error:  # noqa: BLE001 - raised again in the parent
            connection.send((False, portable.packed(error)))


def _die_with(parent: Any) -> None:
    """End this process, whatever it is at, when `parent` has ended."""
    wait([parent.sentinel])
    time.sleep(ORPHAN_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _done(run: Callable[[Any], Any], state: Any) -> tuple[bool, Any]:
    try:
        return True, run(state)
    except Exception as error:  # noqa: BLE001 - raised again in the parent
        return False, portable.packed(error)
