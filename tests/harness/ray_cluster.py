"""A Ray cluster of this machine alone, for one test module."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

START_S = 60.0


@contextlib.contextmanager
def cluster(cpus: int) -> Iterator[str]:
    """Its address; skips the test, with the reason, where Ray is not installed or does not start.

    All of its processes are in one session, which is killed afterwards: `ray stop` would end other
    people's clusters, too.
    """
    pytest.importorskip("ray", reason="Ray is not installed (the cluster extra)")
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        log, port = Path(folder) / "start.log", _free_port()
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        words += [f"--port={port}", f"--num-cpus={cpus}", "--num-gpus=0", f"--temp-dir={folder}"]
        words += ["--node-ip-address=127.0.0.1", "--include-dashboard=false"]
        words += ["--disable-usage-stats", f"--object-store-memory={100 << 20}"]
        with log.open("w") as out:
            head = subprocess.Popen(words, stdout=out, stderr=out, start_new_session=True)
        try:
            _wait_for(head, log)
            yield f"127.0.0.1:{port}"
        finally:
            _end(head)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _wait_for(head: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while "Ray runtime started" not in log.read_text():
        if time.monotonic() > until or head.poll() is not None:
            pytest.skip(f"ray start did not start a cluster here: {log.read_text()[-500:]}")
        time.sleep(0.1)


def _end(head: subprocess.Popen[bytes]) -> None:
    while running := _session(head.pid):
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        head.poll()
        time.sleep(0.05)


def _session(leader: int) -> list[int]:
    """Processes of that session that run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(stat.parent.name))
    return found
