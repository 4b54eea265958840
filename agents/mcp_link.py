"""The line between an MCP server and the run's process: lines of JSON over a pair of sockets.

The run asks for one call at a time and answers it before it asks again. Its process may die and
begin anew in the middle of a line, so each begins with a greeting, and the server repeats the call
that has no result. A line that is no JSON is what a killed process left, and is passed over.
Torch-free.
"""

import json
import os
import select
import socket
from collections.abc import Callable, Iterator
from typing import Any

from harness.errors import UserError

MCP = "mcp"  # the proposer's name
FD = "KERNELWRIGHT_MCP_FD"  # of the environment: the run's end, inherited
TICK_S = 5.0  # between two words to whoever watches the run, while it waits for a call


def lines(text: bytes) -> Iterator[dict[str, Any]]:
    """The messages among whole lines."""
    for line in text.split(b"\n"):
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if isinstance(message, dict):
            yield message


def line(**facts: Any) -> bytes:
    return json.dumps(facts).encode() + b"\n"


class Link:
    """The run's end. `gone` once the server has left."""

    def __init__(self, fd: int) -> None:
        self.socket = socket.socket(fileno=os.dup(fd))
        self.rest = b""
        self.came: list[dict[str, Any]] = []
        self.gone = False

    @classmethod
    def inherited(cls) -> "Link":
        """UserError where no MCP server started this process."""
        fd = os.environ.get(FD)
        if fd is None:
            raise UserError(
                "the changes of this run come from a coding agent over MCP; continue it with "
                "python -m agents.mcp --resume DIR"
            )
        return cls(int(fd))

    def greet(self, **facts: Any) -> None:
        """Say what this process is, and pass over what was meant for an earlier one."""
        nonce = os.urandom(8).hex()
        self._send(b"\n" + line(hello=nonce, **facts))
        while not self.gone:
            if self._next(lambda: None).get("welcome") == nonce:
                return

    def tell(self, **facts: Any) -> None:
        self._send(line(**facts))

    def ask(self, meanwhile: Callable[[], None]) -> dict[str, Any] | None:
        """The next call, or None once the server has left; `meanwhile` is called now and then."""
        self.tell(ask=True)
        while not self.gone:
            meanwhile()
            if (call := self._next(meanwhile).get("call")) is not None:
                return call
        return None

    def close(self) -> None:
        self.socket.close()

    def _send(self, data: bytes) -> None:
        try:
            self.socket.sendall(data)
        except OSError:
            self.gone = True

    def _next(self, meanwhile: Callable[[], None]) -> dict[str, Any]:
        """The next message; an empty one once the server has left."""
        while not self.came:
            if not select.select([self.socket], [], [], TICK_S)[0]:
                meanwhile()
                continue
            try:
                part = self.socket.recv(1 << 16)
            except OSError:
                part = b""
            if not part:
                self.gone = True
                return {}
            whole, newline, rest = (self.rest + part).rpartition(b"\n")
            self.rest = rest if newline else self.rest + part
            self.came += lines(whole)
        return self.came.pop(0)
