"""Looks for secrets, files and somebody to talk to, and tells what it found.

`TOLD` is where its test has put what there is to find.
"""

import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

TOLD: dict[str, Any] = {}  # told


def outcome(act: Callable[[], Any]) -> str:
    """What came of an act: the error's name, or what it gave."""
    try:
        return f"got {str(act())[:60]}"
    except OSError as error:
        return type(error).__name__


def opened(acts: dict[str, Callable[[], Any]]) -> list[str]:
    """Those of `acts` that nothing refused."""
    return [name for name, act in acts.items() if outcome(act).startswith("got ")]


def talk(family: int, kind: int, address: Any) -> None:
    with socket.socket(family, kind) as sock:
        sock.settimeout(1.0)
        if kind == socket.SOCK_DGRAM:
            sock.sendto(b"x", address)
        else:
            sock.connect(address)


def holders(places: list[Path]) -> list[str]:
    """The files among `places` in which the secret stands."""
    secret, found = TOLD["secret"][::-1].encode(), []
    for place in places:
        try:
            if secret in place.read_bytes():
                found.append(str(place))
        except OSError:
            continue
    return found


def look() -> dict[str, Any]:
    """What can be seen of the environment, of other processes, of files."""
    processes = sorted(p for p in Path("/proc").iterdir() if p.name.isdigit())
    judge, parent = Path(f"/proc/{TOLD['judge']}"), Path(f"/proc/{os.getppid()}")
    secret, own = TOLD["secret"][::-1], list(Path("/proc/self/fd").iterdir())
    project, hidden = Path(TOLD["project"]), [Path(path) for path in TOLD["hidden"]]
    files = [
        project / n for n in (".git/config", "README.md", "agents/run.py", "tests/conftest.py")
    ]
    files += [*hidden, Path(f"/proc/self/root{hidden[0]}"), parent / f"root{hidden[0]}"]
    files += [place / n for place in (judge, parent) for n in ("environ", "mem", "maps", "fd/3")]
    folders = [hidden[0].parent, project, Path("/tmp")]
    return {
        "variables": [n for n, v in os.environ.items() if secret in v or "TOKEN" in n],
        "home": str(Path.home().relative_to(Path.cwd())),
        "holders": holders([p / n for p in processes for n in ("environ", "cmdline")]),
        "descriptors": holders(own),
        "sockets": sum("socket:" in outcome(partial(os.readlink, f)) for f in own),
        "read": opened({str(f): f.read_bytes for f in files}),
        "listed": opened({str(f): partial(os.listdir, f) for f in folders}),
        "signalled": opened({"judge": partial(os.kill, TOLD["judge"], 0)}),
    }


def speak() -> dict[str, Any]:
    """Who can be reached, and where can be written."""
    home, project = Path(TOLD["hidden"][0]).parent, Path(TOLD["project"])
    places = [home, project, Path("/var/tmp"), Path("/etc")]
    stream, packets, datagrams = socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM
    local, near = socket.AF_UNIX, ("127.0.0.1", TOLD["port"])
    ways = {
        "ipv4": (socket.AF_INET, stream, near),
        "ipv6": (socket.AF_INET6, stream, ("::1", TOLD["port"])),
        "udp": (socket.AF_INET, datagrams, near),
        "path": (local, stream, TOLD["path"]),
        "packets": (local, packets, TOLD["path"]),
        "datagrams": (local, datagrams, TOLD["path"] + "d"),
        "abstract": (local, stream, "\0" + TOLD["abstract"]),
    }
    mine = {
        "folder": partial(Path("mine").write_text, "x"),
        "pair": socket.socketpair,
    }
    return {
        "written": opened({str(f): partial((f / "written").write_text, "x") for f in places}),
        "spoke": opened({name: partial(talk, *way) for name, way in ways.items()}),
        "works": opened(mine),
    }
