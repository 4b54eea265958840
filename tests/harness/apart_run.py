"""A process that loses one of its cluster's workers and says nothing of it on stdout: the address
and a folder for the worker's mark are its arguments."""

import functools
import json
import os
import signal
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

from harness.executors.ray import apart
from tests.harness.test_executors import job, marked, square, start


def kill(folder: Path) -> None:
    while not any(folder.iterdir()):
        time.sleep(0.01)
    os.kill(int(next(folder.iterdir()).name), signal.SIGKILL)


def main(address: str, folder: Path) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with closing(apart(start, address, "cpu", 2)) as executor:
        threading.Thread(target=kill, args=(folder,), daemon=True).start()
        waits = job(functools.partial(marked, folder), "waits")
        jobs = [job(functools.partial(square, n), f"squares {n}") for n in range(4)]
        found = {done.job.doing: done for done in executor.run([waits, *jobs])}
        told = {
            "squares": [found[j.doing].value() for j in jobs],
            "same": found["waits"].job is waits,
            "losses": found["waits"].losses,
            "workers": [place.name for place in executor.workers],
            "own_handler": signal.getsignal(signal.SIGTERM) == handler,
            "imported": "ray" in sys.modules,
        }
    told["code"] = executor.process.process.exitcode
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
