"""One life of a run's process: how it is begun, heard, ended for good. Torch-free.

The supervisor forks a keeper, the keeper forks the process that works. The keeper adopts what that
process leaves behind and ends all of it, also when the supervisor is killed; when the keeper is
killed, the supervisor does. Both stay without torch, so a life begins in milliseconds.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from agents.pulse import Pulse
from harness import confine
from harness.supervisor import descendants, reap, signalled, sweep

# What ends or stops a run from outside; the supervisor takes them and passes them on.
OUTSIDE = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP
KEEPER_TICK_S = 1.0  # between two looks of the keeper whether the supervisor is still there
END_S = 60.0  # for killed processes to be gone: a card's driver may hold them for long
# Of a run at once: a sandboxed worker's, and up to 32 compilers with a few processes each.
PROCESSES = 128 + 4 * min(32, os.cpu_count() or 1)


def take_signals() -> set[signal.Signals]:
    """Block what `OUTSIDE` names and a child's end, for `signal.sigtimedwait`; returns what was
    taken: not what the caller was started to ignore."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    taken = {s for s in OUTSIDE if signal.getsignal(s) is not signal.SIG_IGN} | {signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, taken)
    confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
    return taken


def begin(taken: set[signal.Signals]) -> "Life | Pulse":
    """Fork. Returns a Life to the caller, and a Pulse in the new process, which is to work."""
    sys.stdout.flush()
    sys.stderr.flush()
    supervisor = os.getpid()
    heard, told = os.pipe()
    os.set_blocking(heard, False)
    os.set_blocking(told, False)
    keeper = os.fork()
    if keeper:
        os.close(told)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(keeper, keeper)  # both do: whoever comes first
        return Life(keeper, heard)
    os.close(heard)
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)  # away from the terminal's signals
    _die_with(supervisor, signal.SIGHUP)
    keeper = os.getpid()
    worker = os.fork()
    if worker:
        _keep(worker, supervisor, Pulse(told))
    _die_with(keeper, signal.SIGKILL)
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.SIGINT in taken:
        signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # it may write to its terminal
    signal.pthread_sigmask(signal.SIG_UNBLOCK, taken)
    pulse = Pulse(told)
    pulse.tell(worker=os.getpid())
    return pulse


def _interrupt(_number: int, _frame: object) -> None:
    """As Ctrl-C does, but once: more of it must not break the clean end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _die_with(parent: int, number: signal.Signals) -> None:
    """Let the kernel send `number` when `parent`, this process's, ends."""
    confine.prctl(confine.PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def _keep(worker: int, supervisor: int, pulse: Pulse) -> NoReturn:
    """Wait until the worker ends or the supervisor has, then end whatever is left."""
    waited = {signal.SIGCHLD, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
    while os.getppid() == supervisor:
        status = reap(worker)
        if status is not None:
            pulse.tell(status=status)
            break
        signal.sigtimedwait(waited, KEEPER_TICK_S)
    sweep()
    os._exit(0)


class Life:
    """The process as its supervisor sees it. `told` is the last of each fact that it told."""

    def __init__(self, keeper: int, heard: int) -> None:
        self.keeper, self.heard = keeper, heard
        self.told: dict[str, Any] = {}
        self.heard_s = time.monotonic()  # when it told something last
        self.rest = b""
        self.tasks = tasks()

    def listen(self) -> None:
        """Take in what it told since."""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.heard, 1 << 16):
                self.rest += part
                self.heard_s = time.monotonic()
        *lines, self.rest = self.rest.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):
                self.told |= json.loads(line)

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self.heard_s

    def over(self) -> bool:
        """Whether it has ended by itself; then nothing is left of it."""
        try:
            if os.waitpid(self.keeper, os.WNOHANG)[0] == 0:
                return False
        except ChildProcessError:
            pass
        self.end()
        return True

    def interrupt(self) -> bool:
        """Ask it to end as after Ctrl-C; whether it could be asked already."""
        worker = self.told.get("worker")
        if isinstance(worker, int):
            signalled(worker, signal.SIGTERM)
        return worker is not None

    def pause(self) -> None:
        """Stop it, then this process; both go on when this one is continued."""
        signalled(-self.keeper, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        signalled(-self.keeper, signal.SIGCONT)
        self.heard_s = time.monotonic()

    def crowded(self) -> str | None:
        """That it has too many processes, or None. They are counted, and stopped for that, only
        where the machine has got so many more tasks: many that run hold the counting up."""
        now = tasks()
        if now - self.tasks <= PROCESSES:
            return None
        self.tasks = now
        signalled(-self.keeper, signal.SIGSTOP)
        count = len(descendants())
        if count > PROCESSES:
            return f"had {count} processes, {PROCESSES} are allowed"
        signalled(-self.keeper, signal.SIGCONT)
        return None

    def end(self) -> None:
        """Kill it and all that it started, and wait until they are gone."""
        signalled(-self.keeper, signal.SIGKILL)  # at once, so that none can fork meanwhile
        last = time.monotonic() + END_S
        sweep()
        while descendants() and time.monotonic() < last:
            time.sleep(0.05)
            sweep()
        self.listen()
        with contextlib.suppress(OSError):
            os.close(self.heard)

    def how(self) -> str:
        """How it ended, as the end of a sentence about the run's process."""
        if broke := self.told.get("broke"):
            return f"ended with {broke}"
        status = self.told.get("status")
        if not isinstance(status, int):
            return "was killed with its keeper"
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            memory = ", as the kernel does where memory runs out" * (number == signal.SIGKILL)
            known = number in set(signal.Signals)
            name = signal.Signals(number).name if known else f"signal {number}"
            return f"was killed by {name}{memory}"
        return f"ended with exit status {os.WEXITSTATUS(status)} before its work was done"


def tasks() -> int:
    """All processes and threads of this machine."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
