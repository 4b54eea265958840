"""The trusted processes around a candidate: a server that forks them, and one supervisor each.

The server has imported torch and nothing else, so a candidate's process starts in a fraction of a
second and holds nothing of the judge's memory. Its supervisor makes the namespaces, starts the
worker, watches memory, disk and processes, stops and continues all of them when the judge says so,
and takes them with it when it ends. In a process namespace it is process 1, so the kernel does.
"""

import contextlib
import importlib
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import confine, wire
from harness.confine import Limits, Mechanism

TICK_S = 0.05  # between two looks at what a candidate uses
PRELOADED = "harness.worker", "optimized.catalog", "torch._dynamo"  # the last takes seconds
ENOUGH = 100  # rounds of killing before the kernel is left to it


def serve(sock: socket.socket, preload: list[str]) -> None:
    """Fork a supervisor for each message until the other side closes."""
    confine.die_with_parent()
    for name in PRELOADED:
        importlib.import_module(name)
    from reference import models

    for model in preload:
        models.load(model)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for supervisors
    with contextlib.suppress(wire.Closed):
        wire.send(sock, {"ready": True, "card": _holds_card()})
    while True:
        try:
            message, _, fds = wire.receive(sock, fds=2)
        except wire.Closed:
            return
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                sock.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                supervise(message, *fds)
            os._exit(70)
        for fd in fds:
            os.close(fd)
        wire.send(sock, {"pid": pid})


def _holds_card() -> bool:
    """Whether this process has a card open: its children could not use CUDA then."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/nvidia"):
                return True
    return False


def supervise(order: dict[str, Any], worker_fd: int, control_fd: int) -> None:
    """Isolate, start the worker, watch it; returns when it and all its children have ended."""
    os.setsid()
    limits = Limits.from_json(order["limits"])
    found = confine.isolate()
    confine.die_with_parent()  # a new user forgets it
    names = {m.name for m in found if m.in_force}
    pid = os.fork()
    if pid != 0:  # the first of a new process namespace is a child, and this one waits for it
        os.close(worker_fd)
        os.close(control_fd)
        os.waitpid(pid, 0)
        os._exit(0)
    confine.die_with_parent()
    spaced = "mount namespace" in names
    found += confine.mount(order["folder"], limits, spaced)
    control = socket.socket(fileno=control_fd)
    confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
    worker = os.fork()
    if worker == 0:
        control.close()
        start_worker(order, limits, found, worker_fd)
    os.close(worker_fd)
    confine.prctl(confine.PR_SET_DUMPABLE, 0)
    private = any(m.name == "private folder" and m.in_force for m in found)
    reason, status = watch(control, worker, limits, None if private else order["folder"])
    left = len(set(descendants().values()) - {worker})
    sweep()
    with contextlib.suppress(wire.Closed):
        wire.send(control, {"ended": status, "reason": reason, "left": left})
    os._exit(0)


def start_worker(
    order: dict[str, Any], limits: Limits, found: list[Mechanism], worker_fd: int
) -> None:
    """In the worker's process: its folder, its environment, its restrictions, then its loop."""
    from harness import worker

    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.environ.clear()
    os.environ.update(order["environment"])
    folder = Path(order["folder"])
    for path in [Path(os.environ[name]) for name in order["folders"]]:
        path.mkdir(parents=True, exist_ok=True)
    for name, text in order["files"].items():
        (folder / name).write_text(text)
    os.chdir(folder)
    tempfile.tempdir = None  # it remembers the server's
    confine.die_with_parent()
    shm = any(m.name == "own /dev/shm" and m.in_force for m in found)
    # CUDA IPC may connect to the judge's process, which is out of reach in a network namespace.
    alone = any(m.name == "network namespace" and m.in_force for m in found)
    connects = not alone and len(confine.devices()) > len(confine.DEVICES)
    readable = order["readable"]
    found += confine.restrict(str(folder), limits, readable, shm=shm, connects=connects)
    try:
        worker.main(socket.socket(fileno=worker_fd), order, [m.to_json() for m in found])
    finally:
        os._exit(70)


def watch(
    control: socket.socket, worker: int, limits: Limits, folder: str | None
) -> tuple[str | None, int | None]:
    """Until the worker ends or has to: why it had to end, and its wait status."""
    while True:
        if select.select([control], [], [], TICK_S)[0]:
            try:
                message, _, _ = wire.receive(control, 1.0)
            except (wire.Closed, wire.Late):
                return None, None
            for pid in descendants().values():
                signalled(pid, signal.SIGSTOP if message["stop"] else signal.SIGCONT)
            if message["stop"]:
                wire.send(control, {"stopped": True})
            continue
        status = reap(worker)
        if status is not None:
            return None, status
        reason = excess(limits, folder)
        if reason is not None:
            return reason, None


def reap(worker: int) -> int | None:
    """Collect ended children; the worker's wait status if it was among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == worker:
            found = status


def excess(limits: Limits, folder: str | None) -> str | None:
    """Which limit is passed by all processes together, or None."""
    pids = descendants()
    if len(pids) > limits.processes:
        return f"has {len(pids)} processes, {limits.processes} are allowed"
    memory = sum(private_bytes(pid) for pid in pids)
    if memory > limits.memory:
        return f"holds {memory >> 20} MiB of memory, {limits.memory >> 20} MiB are allowed"
    if folder is not None:
        disk = sum(size for size in sizes(folder))
        if disk > limits.disk:
            return f"holds {disk >> 20} MiB of disk, {limits.disk >> 20} MiB are allowed"
    return None


def descendants() -> dict[int, int]:
    """All processes below this one, by their number in /proc: what `kill` calls them. The two
    differ in a process namespace without a /proc of its own. Orphans count: they are adopted."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    children.setdefault(int(fields[1]), []).append(int(name))
    me = int(os.readlink("/proc/self"))
    found, todo = [], [me]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    if me == os.getpid():
        return {pid: pid for pid in found}
    return {pid: inner for pid in found if (inner := _inner_number(pid)) is not None}


def _inner_number(pid: int) -> int | None:
    """What a process is called in the innermost process namespace."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid"):
                return int(line.split()[-1])
    return None


def private_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
    return 0


def sizes(folder: str) -> Iterator[int]:
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                yield os.lstat(os.path.join(root, name)).st_size


def signalled(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def sweep() -> None:
    """Kill all that is left, until nothing is."""
    for _ in range(ENOUGH):
        pids = descendants()
        for pid in pids.values():
            signalled(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not pids:
            return


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    os._exit(0)  # tearing torch down takes seconds
