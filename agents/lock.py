"""One process at a time works on a run: it holds a lock on the run's ledger, which the kernel takes
back when the process ends, however it does. Torch-free."""

import fcntl
import os
import time
from collections.abc import Callable

from harness.errors import UserError
from harness.ledger import Ledger

PATIENCE_S = 3.0  # for what is left of a run that was just killed to end
TICK_S = 0.1

# By path, what this process holds, or the one that it was forked from.
_held: dict[str, int] = {}


def take(
    ledger: Ledger, patience_s: float = PATIENCE_S, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Hold the run, whose directory exists, until `let_go` or this process's end; once is enough.

    UserError if another process still holds it after `patience_s`; until then `meanwhile` is called
    now and then.
    """
    path = str(ledger.path.resolve())
    if path in _held:
        return
    fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    last = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _held[path] = fd
            return
        except BlockingIOError:
            pass
        if time.monotonic() > last:
            os.close(fd)
            raise UserError(
                f"another process works on {ledger.directory}; wait for its end, interrupt it or "
                "disconnect its coding agent, or start a new run"
            )
        meanwhile()
        time.sleep(TICK_S)


def let_go() -> None:
    """Of all that this process holds; one that it was forked from holds on."""
    while _held:
        os.close(_held.popitem()[1])
