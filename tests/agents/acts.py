"""A run without a model, for its supervisor: each life plays one of the acts in its arguments.

`python acts.py DIRECTORY ACT...`; life N of the run plays act N, where an earlier program began the
run, too. Before an act whose name begins with "in_" a
change is begun.
"""

import atexit
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from agents.history import Started
from agents.pulse import Pulse
from agents.supervised import Supervisor
from harness import cli
from harness.errors import ExitCode
from harness.ledger import Ledger
from harness.records import SCHEMA, Status
from reports.write import write_reports  # noqa: F401 - imported before lives begin

RUN = {
    "schema": SCHEMA,
    "target": "decode-bs1",
    "model": "none",
    "preset": "none",
    "device": "cpu",
    "proposer": "none",
    "seed": 0,
}


def begin_change(ledger: Ledger, number: int, control: str | None = None) -> Started:
    change = Started(
        index=number,
        name=f"change-{number}",
        region="r",
        backend="torch",
        predicted_us=None,
        bound_us=None,
        control=control,
        parent=None,
    )
    ledger.append("started", change)
    return change


def sleeps_elsewhere() -> None:
    """A grandchild in a session of its own, whose parent is gone."""
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            time.sleep(3600)
        os._exit(0)
    os.wait()


def play(acts: list[str], run: Path, directory: Path | None, used_s: float, pulse: Pulse) -> int:
    ledger = Ledger.create(run) if directory is None else Ledger(directory)
    if directory is None:
        ledger.append("run", RUN)
    lives = sum(e.kind == "life" for e in ledger.events())
    act = acts[lives]
    ledger.append("life", {"used_s": used_s})
    pulse.tell(directory=str(run), budget=10.0)
    pulse.tell(stage=act)
    if act.startswith("in_"):
        change = begin_change(ledger, lives + 1, "slowed" if act == "in_control" else None)
        if act == "in_change_decided":
            ledger.append("attempt", change.ended(Status.REJECTED, "no gain", 1.0))
            begin_change(ledger, 100 + lives)
    match act:
        case "in_change" | "in_control" | "in_change_decided" | "outside":
            os._exit(0)
        case "in_change_keeper":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(3600)
        case "in_change_deaf":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            sleeps_elsewhere()
            ledger.append("sleeps", {})
            time.sleep(3600)
        case "in_change_polite":
            ledger.append("sleeps", {})
            try:
                time.sleep(3600)
            except KeyboardInterrupt:
                time.sleep(0.3)
                ledger.append("stopped", {"reason": "interrupted"})
                return ExitCode.INTERRUPTED
        case "in_change_interrupts":
            raise KeyboardInterrupt
        case "raises":
            raise ZeroDivisionError("our own mistake")
        case "crashes_at_its_end":
            atexit.register(os.abort)
    ledger.append("stopped", {"reason": "done"})
    return int(act) if act.isdigit() else 0


if __name__ == "__main__":
    where, *rest = sys.argv[1:]
    known = Path(where) if Path(where).exists() else None
    supervisor = Supervisor(partial(play, rest, Path(where)), known, None)
    sys.exit(cli.run(supervisor.run))
