"""Evaluations of the toy model's change files, and a worker that is killed in the middle of one."""

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from harness.environment import cpu_name
from harness.evaluation import Evaluation, evaluator, sha256_of

FOLDER = Path(__file__).parent
TOY = str(FOLDER / "toy_model.py")
GONE_S = 20.0
START = functools.partial(evaluator, "cpu", cpu_name())


def asked(name: str, *, timed: bool = True, backend: str | None = None) -> Evaluation:
    """Of a file among the cheats, by its text."""
    return Evaluation(
        model=TOY,
        preset="toy",
        device="cpu",
        seed=0,
        change=f"{name}.py",
        text=(FOLDER / "cheats" / f"{name}.py").read_text(),
        backend=backend,
        case_seed=3,
        timed=timed,
        model_sha256=sha256_of(TOY),
    )


@contextlib.contextmanager
def killed(find: Callable[[], int | None]) -> Iterator[list[int]]:
    """Meanwhile the process that `find` gives is killed, once it has a sandbox with a candidate in
    it; afterwards all that it had started must be gone. Gives the processes that were seen."""
    seen: list[int] = []

    def work() -> None:
        while True:
            victim = find()
            if victim is not None:
                found = below(victim)
                if len(found) >= 3:  # the server, a candidate's supervisor and its worker
                    time.sleep(0.3)
                    os.kill(victim, signal.SIGKILL)
                    seen.extend([victim, *found])
                    return
            time.sleep(0.05)

    killer = threading.Thread(target=work, daemon=True)
    killer.start()
    yield seen
    assert not killer.is_alive(), "nobody was killed"
    until = time.monotonic() + GONE_S
    while left := [pid for pid in seen if running(pid)]:
        assert time.monotonic() < until, f"still there: {left}"
        time.sleep(0.05)


def below(pid: int) -> list[int]:
    """All processes that it started, and theirs."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *below(child)]
    return found


def running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
