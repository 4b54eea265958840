"""`python -m agents.run --resume DIR` with short measurements, killed at random moments.

Every second life may decide a change first: one that was begun three times counts as deadly.
Arguments: a seed, how many lives are killed, the run's directory, and flags of `agents.run`.
PyTorch is imported before the lives are forked, so each is at work at once. Prints a line for each
life: its seconds, how it ended, and the ledger's events by then.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from agents import measure, run
from agents.proposers.auto import PROPOSERS
from harness import cli
from harness.ledger import Ledger
from harness.workload import Workload
from tests.agents import killers

SHORTEST_S, LONGEST_S = 0.2, 3.0


def decided(directory: Path) -> int:
    return sum(event.kind == "attempt" for event in Ledger(directory).events())


def life(words: list[str], directory: Path, most_s: float | None, more: int) -> int:
    """Run it, and kill its first process `most_s` seconds after it has decided so many `more`
    changes; the exit code."""
    wanted = decided(directory) + more
    process = os.fork()
    if not process:
        sys.exit(cli.run(lambda: run.supervised([*words, "--resume", str(directory)])))
    if most_s is not None:
        while decided(directory) < wanted and not os.waitid(
            os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT
        ):
            time.sleep(0.05)
        time.sleep(most_s)
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)


def main(seed: int, lives: int, directory: Path, words: list[str]) -> int:
    for name in os.environ["KILLERS"].split(","):
        killers.KILLERS[name] = killers.slow
    PROPOSERS["killers"] = killers.Killers  # type: ignore[assignment]
    measure.SHARES.update(decode=(0.02, 0.2), prefill=(0.02, 0.2))
    Workload.load(killers.TOY, "toy", "cpu", 0)  # each life would import what this does
    drawn = random.Random(seed)
    for number in range(lives + 1):
        most_s = drawn.uniform(SHORTEST_S, LONGEST_S) if number < lives else None
        code = life(words, directory, most_s, number % 2)
        events = sum(1 for _ in Ledger(directory).events())
        print(f"life {number + 1} {most_s} s: {code}, {events} events", flush=True)
        if code != -signal.SIGKILL:
            return code
    raise AssertionError("the last life was killed")


if __name__ == "__main__":
    given, lives, directory, *words = sys.argv[1:]
    sys.exit(main(int(given), int(lives), Path(directory), words))
