"""Messages between the judge and an untrusted process: a length, JSON, optionally bytes after it.

The judge reads nothing but JSON and never unpickles what such a process sends. Every wait has an
end. Torch-free.
"""

import json
import select
import socket
import struct
import time
from typing import Any

MOST = 1 << 24  # bytes of one message from an untrusted process
HEADER = struct.Struct("<II")


class Closed(Exception):
    """The other side has gone."""


class Late(Exception):
    """No whole message came in time."""


class Garbled(Exception):
    """What came is no message."""


def send(sock: socket.socket, message: dict[str, Any], blob: bytes = b"", *fds: int) -> None:
    """Send JSON, a blob of the judge's own and open files; raises Closed."""
    text = json.dumps(message).encode()
    try:
        socket.send_fds(sock, [HEADER.pack(len(text), len(blob))], list(fds))
        sock.sendall(text)
        if blob:  # once it has the whole message, the other side may answer and go
            sock.sendall(blob)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed from error


def receive(
    sock: socket.socket, seconds: float | None = None, *, most: int = MOST, fds: int = 0
) -> tuple[dict[str, Any], bytes, list[int]]:
    """One message: its JSON, its blob, and up to `fds` open files. Raises Closed, Late, Garbled."""
    deadline = None if seconds is None else time.monotonic() + seconds
    _wait(sock, deadline)
    try:
        header, received, _, _ = socket.recv_fds(sock, HEADER.size, fds)
    except ConnectionResetError as error:
        raise Closed from error
    if not header:
        raise Closed
    header += _exactly(sock, HEADER.size - len(header), deadline)
    sizes = HEADER.unpack(header)
    if sum(sizes) > most:
        raise Garbled(f"a message of {sum(sizes)} bytes, where {most} are allowed")
    text, blob = (_exactly(sock, size, deadline) for size in sizes)
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Garbled("a message that is no JSON") from error
    if not isinstance(message, dict):
        raise Garbled("a message that is no JSON object")
    return message, blob, received


def _exactly(sock: socket.socket, count: int, deadline: float | None) -> bytes:
    parts = []
    while count:
        _wait(sock, deadline)
        try:
            part = sock.recv(min(count, 1 << 20))
        except ConnectionResetError as error:
            raise Closed from error
        if not part:
            raise Closed
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _wait(sock: socket.socket, deadline: float | None) -> None:
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    if not select.select([sock], [], [], left)[0]:
        raise Late
