"""Processes for candidates, from the judge's side: start, ask, stop, end.

One server process imports torch once and forks a supervised worker for each candidate
(`harness.supervisor`). The judge talks to workers in JSON and shared memory only, never waits
without an end, and turns whatever happens to a worker into a `CandidateError`.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harness import wire
from harness.confine import ROOT, Limits, Mechanism
from harness.errors import UserError
from harness.observe import CandidateError
from harness.protections import protections

START_S = 120.0  # to import torch; a cold disk takes long
GRACE_S = 1.0  # for a supervisor to say that a limit was passed
CONTROL_S = 10.0  # for a supervisor to answer, which does nothing else
CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
FOLDERS = {"HOME": "home", "TMPDIR": "tmp", **CACHES}
# What a worker sees of the caller's environment: how to compile and which card.
KEPT = (
    "PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CC", "CXX",
    "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TRITON_INTERPRET",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE",
    "TRITON_PTXAS_PATH", "TRITON_LIBCUDA_PATH",
)  # fmt: skip
SET = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONWARNINGS": "ignore",  # that a process with threads forks, from Python 3.12 on
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # looking for a card must not start CUDA before the fork
}


def scrubbed(folder: str) -> dict[str, str]:
    """A worker's environment: what it needs of ours, and its own folder for all it writes."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    own = {name: os.path.join(folder, place) for name, place in FOLDERS.items()}
    return kept | SET | own


class Server:
    """The process that forks workers. `preload` names model files that it may import; it runs the
    project's files at `root`."""

    def __init__(self, preload: Sequence[str] = (), root: Path = ROOT) -> None:
        ours, theirs = socket.socketpair()
        environment = {n: v for n, v in scrubbed(tempfile.gettempdir()).items() if n not in FOLDERS}
        command = [sys.executable, "-m", "harness.supervisor", str(theirs.fileno())]
        self.process = subprocess.Popen(
            [*command, *(str(Path(p).resolve()) if p.endswith(".py") else p for p in preload)],
            cwd=root,
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the judge
        )
        theirs.close()
        self.socket = ours
        self.ready = False

    def spawn(self, order: dict[str, Any], *fds: int) -> int:
        """Start a supervisor with its worker; the supervisor's process number."""
        try:
            if not self.ready:
                told = wire.receive(self.socket, START_S)[0]
                self.ready = True
                if told["card"]:
                    raise UserError("the sandbox's server has started CUDA before it could fork")
            wire.send(self.socket, order, b"", *fds)
            return int(wire.receive(self.socket, CONTROL_S)[0]["pid"])
        except (wire.Closed, wire.Late, wire.Garbled) as error:
            raise UserError(
                f"the sandbox's server does not answer ({type(error).__name__}); "
                "python -m harness sandbox says what this machine gives"
            ) from error

    def close(self) -> None:
        self.socket.close()
        try:
            self.process.wait(CONTROL_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Process:
    """One worker. `fault` is what ended it, once something has."""

    def __init__(
        self, server: Server, limits: Limits, files: dict[str, str], readable: Sequence[str] = ()
    ) -> None:
        """`files` are written into its folder; `readable` may be read besides the usual places."""
        self.limits = limits
        self.fault: str | None = None
        self.ended: dict[str, Any] | None = None
        self.folder = tempfile.mkdtemp(prefix="candidate-")
        os.chmod(self.folder, 0o777 if os.getuid() == 0 else 0o700)
        self.socket, worker = socket.socketpair()
        self.control, control = socket.socketpair()
        order = {
            "folder": self.folder,
            "limits": limits.to_json(),
            "environment": scrubbed(self.folder),
            "folders": list(FOLDERS),
            "files": files,
            "readable": list(readable),
            "threads": torch.get_num_threads(),
        }
        try:
            self.supervisor = server.spawn(order, worker.fileno(), control.fileno())
        finally:
            worker.close()
            control.close()
        try:
            found = self.ask({}, seconds=START_S, send=False)["mechanisms"]
        except CandidateError as error:
            raise UserError(f"no sandbox can be started here: its worker {error}") from error
        self.mechanisms = [Mechanism.from_json(m) for m in found]
        self.protections = protections(self.mechanisms)

    def ask(
        self,
        message: dict[str, Any],
        blob: bytes = b"",
        fds: Sequence[int] = (),
        *,
        seconds: float,
        send: bool = True,
    ) -> dict[str, Any]:
        """Send an order and wait for the answer. CandidateError if none comes, or a bad one."""
        if self.fault is not None:
            raise CandidateError(self.fault)
        try:
            if send:
                wire.send(self.socket, message, blob, *fds)
            answer = wire.receive(self.socket, seconds)[0]
        except wire.Late:
            self.end(f"gave no answer within {seconds:g} s")
        except wire.Garbled as error:
            self._wait_for_end(GRACE_S)  # several processes may have answered at once
            self.end((self.ended or {}).get("reason") or f"answered with {error}")
        except wire.Closed:
            self.end(None)
        else:
            return answer
        raise CandidateError(str(self.fault))

    def end(self, reason: str | None) -> None:
        """End the worker and all its children for good; `reason`, else its exit, is the fault."""
        if reason is None:
            self._wait_for_end()
            reason = describe_end(self.ended)
        self.fault = self.fault or reason
        self.close()

    def freeze(self) -> None:
        """Stop the worker and its children; nothing it does is seen until `thaw`."""
        self._control({"stop": True}, answered=True)

    def thaw(self) -> None:
        self._control({"stop": False}, answered=False)

    def _control(self, message: dict[str, Any], *, answered: bool) -> None:
        try:
            wire.send(self.control, message)
            if answered and "ended" in (reply := wire.receive(self.control, CONTROL_S)[0]):
                self.ended = reply
                self.end(describe_end(reply))
                raise CandidateError(str(self.fault))
        except (wire.Closed, wire.Late, wire.Garbled) as error:
            self.end(f"its supervisor does not answer ({type(error).__name__})")
            raise CandidateError(str(self.fault)) from error

    def _wait_for_end(self, seconds: float = CONTROL_S) -> None:
        if self.ended is not None or self.control.fileno() < 0:
            return
        with contextlib.suppress(wire.Closed, wire.Late, wire.Garbled):
            while self.ended is None:
                message = wire.receive(self.control, seconds)[0]
                self.ended = message if "ended" in message else None

    def finish(self) -> list[str]:
        """Let the worker end by itself; what it left behind."""
        if self.fault is None:
            with contextlib.suppress(CandidateError):
                self.ask({"op": "stop"}, seconds=CONTROL_S)
                self._wait_for_end()
        self.close()
        left = (self.ended or {}).get("left", 0)
        return [f"leaves {left} process(es) behind"] if left else []

    def close(self) -> None:
        """Kill what is left and remove the folder."""
        self.control.close()
        self.socket.close()
        if self.ended is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.supervisor, signal.SIGKILL)
        self.fault = self.fault or "was ended"
        shutil.rmtree(self.folder, ignore_errors=True)


def describe_end(ended: dict[str, Any] | None) -> str:
    """Why a worker ended, from what its supervisor saw."""
    if ended is None:
        return "ended with its supervisor"
    if ended["reason"]:
        return str(ended["reason"])
    status = ended["ended"]
    if status is None:
        return "was ended"
    if os.WIFEXITED(status):
        return f"ended with exit status {os.WEXITSTATUS(status)} before it answered"
    number = os.WTERMSIG(status)
    name = signal.Signals(number).name
    if number in (signal.SIGSEGV, signal.SIGBUS):
        return f"was killed by {name}: it touched memory that it may not, such as the weights"
    return f"was killed by {name}"
