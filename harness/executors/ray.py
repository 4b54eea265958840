"""Workers on a Ray cluster that runs already: an actor for each free GPU, or for each free CPU slot
for work on CPUs. Torch-free.

An actor runs the project as it is installed on its node, and refuses if that is another source than
this process runs. One that dies, or whose node does, is replaced wherever the cluster has room.
"""

import contextlib
import functools
import logging
import os
import platform
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from harness.errors import UserError
from harness.executors import portable
from harness.executors.apart import Apart
from harness.executors.base import Place, Start
from harness.executors.crew import AGAIN, Crew, Lost, Worker
from harness.executors.local import CPU, JOIN_S, SET, VISIBLE
from harness.executors.source import Source

ADDRESS = "RAY_ADDRESS"
AUTO = "auto"  # the cluster that runs on this machine
CONNECT_S = 10.0
START_S = 300.0  # for the first worker; a node may have to be started for it
EXIT = re.compile(r"exit type: (\w+)")


def imported() -> Any:
    """Ray; UserError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise UserError(
            "--executor ray needs Ray, which is not installed; install the extra: "
            "pip install -c constraints.txt -e '.[cluster]'"
        ) from error
    return ray


def address_of(given: str | None) -> str:
    """The cluster's address, by flag or environment; UserError if there is none, or nobody listens
    there: Ray itself would try for minutes."""
    address = given or os.environ.get(ADDRESS)
    if not address:
        raise UserError(
            f"--executor ray needs a running cluster; give --ray-address HOST:PORT, or set "
            f"{ADDRESS} (ray start --head starts one and prints its address)"
        )
    if address == AUTO:
        return address
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"{address!r} is no address of a Ray cluster; give HOST:PORT, or {AUTO}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"nobody listens at {address} ({error}); give the address of a running Ray cluster by "
            f"--ray-address or {ADDRESS}, or do without one: --executor local"
        ) from error
    return address


class Ray(Crew):
    """Actors on the cluster at `address`, at most `count`. `device` is "cpu" or "cuda".

    Ray ends the process that loses its cluster; `apart` keeps it in one of its own.
    """

    def __init__(
        self,
        start: Start,
        address: str,
        device: str,
        count: int | None = None,
        again: int = AGAIN,
    ) -> None:
        super().__init__(again)
        self.ray = imported()
        self.start, self.device, self.source = start, device, Source.here()
        self.ours = not self.ray.is_initialized()
        if self.ours:
            self._connect(address)
        resource = "CPU" if device == CPU else "GPU"
        free = int(self.ray.available_resources().get(resource, 0))
        self.count = 0
        with ExitStack() as undo:
            undo.callback(self.close)
            if not free:
                raise UserError(
                    f"the Ray cluster at {address} has no free {resource}; ray status shows what "
                    "it has and who uses it"
                )
            self.team = [self._worker() for _ in range(min(free, count or free))]
            undo.pop_all()

    def _connect(self, address: str) -> None:
        try:
            self.ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, AssertionError) as error:
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError(
                f"no Ray cluster can be used at {address}: {first.rstrip('.')}; give its address "
                f"by --ray-address or {ADDRESS}, and use its Ray version ({self.ray.__version__} "
                "here) and Python version"
            ) from error

    def _worker(self) -> "Seat":
        self.count += 1
        return Seat(self, Place(name=f"worker {self.count}", device=self.device, host="?"))

    def wait(self, team: Sequence[Worker]) -> list[Worker]:
        pending = {w.pending: w for w in team if isinstance(w, Seat) and w.pending is not None}
        working = any(worker.at for worker in pending.values())
        timeout = None if working else START_S
        heard, _ = self.ray.wait(list(pending), num_returns=1, timeout=timeout)
        if not heard:
            raise UserError(
                f"no worker of the Ray cluster has started within {START_S:g} s; ray status shows "
                "what it has room for"
            )
        return [pending[ref] for ref in heard]

    def replacement(self, worker: Worker) -> Worker:
        return self._worker()

    def close(self) -> None:
        seats = [worker for worker in self.team if isinstance(worker, Seat)]
        closing = [seat.actor.close.remote() for seat in seats if seat.ready and seat.at is None]
        if closing:
            self.ray.wait(closing, num_returns=len(closing), timeout=JOIN_S)
        for seat in seats:
            seat.end()
        if self.ours:
            self.ray.shutdown()


class Seat(Worker):
    """One actor. `pending` is what it is asked for, if anything is."""

    def __init__(self, crew: Ray, place: Place) -> None:
        super().__init__(place)
        self.ray = crew.ray
        room = {"num_cpus": 1} if crew.device == CPU else {"num_cpus": 0, "num_gpus": 1}
        self.actor = self.ray.remote(Actor).options(max_restarts=0, **room).remote()
        self.same = self.actor.same.remote(crew.source)
        self.pending: Any = self.actor.begin.remote(crew.start)

    def give(self, run: Callable[[Any], Any]) -> None:
        self.pending = self.actor.do.remote(run)

    def hear(self) -> tuple[bool, Any]:
        pending, self.pending = self.pending, None
        errors = self.ray.exceptions
        try:
            if not self.ready and not (same := self.ray.get(self.same))[0]:
                return same
            well, value = self.ray.get(pending)
        except errors.RayTaskError as error:  # what was sent could not be read there
            return False, ("", str(error))
        except errors.RayError as error:
            raise Lost(_how(error)) from None
        if not self.ready and well:
            device, host = value
            self.place = replace(self.place, device=device, host=host)
        return well, value

    def end(self) -> None:
        self.ray.kill(self.actor)


class Actor:
    """What runs on the cluster."""

    def __init__(self) -> None:
        self.stack = contextlib.ExitStack()
        self.state: Any = None

    def same(self, source: Source) -> tuple[bool, Any]:
        return _tried(source.require)

    def begin(self, start: Start) -> tuple[bool, Any]:
        """Where it is, if that went well."""
        os.environ.update(SET)

        def enter() -> tuple[str, str]:
            self.state = self.stack.enter_context(start())
            return os.environ.get(VISIBLE) or CPU, platform.node()

        return _tried(enter)

    def do(self, run: Callable[[Any], Any]) -> tuple[bool, Any]:
        return _tried(lambda: run(self.state))

    def close(self) -> None:
        self.stack.close()


def _tried(run: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        return True, run()
    except Exception as error:  # noqa: BLE001 - raised again where the executor is
        return False, portable.packed(error)


def _how(error: Exception) -> str:
    """How an actor ended, in some words of Ray's many."""
    kind = EXIT.search(str(error))
    return f"ended (Ray: {type(error).__name__}{f', {kind.group(1)}' if kind else ''})"


def apart(start: Start, address: str, device: str, count: int | None = None) -> Apart:
    """The executor as a run uses it; UserError where it cannot be had."""
    make = functools.partial(Ray, start, address, device, count)
    return Apart(make, f"the Ray cluster at {address}")
