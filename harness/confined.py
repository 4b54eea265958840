"""What a process gives up that runs candidates which passed the sandbox, to tune and time them.

It needs its card, its compilers and whatever it reads, so it keeps far more than a worker does: it
loses the right to write elsewhere than in given folders, and the internet. Both hold for the
calling thread and all that it starts from then on, not for threads that run already nor for
processes started before, such as the sandbox's server. Torch-free.
"""

import os
import socket
from collections.abc import Iterable
from pathlib import Path

from harness.confine import Mechanism, attempt, refuse_local_sockets
from harness.protections import Protection

WRITES, NETWORK = "no writes outside its folders", "no network"


def give_up(folders: Iterable[Path]) -> tuple[Protection, ...]:
    """For good: write in `folders` and to devices only, open no internet sockets and connect to no
    local ones, behind which other programs of the user do as they are told. Which of the two are in
    force, and why one is not."""
    writable = [str(path) for path in (*folders, Path("/dev"))]
    network = attempt("seccomp", _no_network)
    rows = (WRITES, attempt("landlock", lambda: _write_only(writable))), (NETWORK, network)
    return tuple(_protection(name, mechanism) for name, mechanism in rows)


def describe(rows: Iterable[Protection]) -> str:
    """One line: what holds for the process, by what, and what does not and why."""
    words = [
        f"{row.name} ({', '.join(row.by)})"
        if row.in_force
        else f"not: {row.name} ({', '.join(f'{m}: {why}' for m, why in row.absent.items())})"
        for row in rows
    ]
    return "; ".join(words)


def _protection(name: str, mechanism: Mechanism) -> Protection:
    by = (mechanism.name,) if mechanism.in_force else ()
    absent = {} if mechanism.in_force else {mechanism.name: mechanism.why}
    return Protection(name=name, in_force=mechanism.in_force, by=by, absent=absent)


def _write_only(writable: Iterable[str]) -> None:
    import ctypes

    from landlock import FSAccess, Ruleset

    ctypes.set_errno(0)  # the library takes an old error for its own
    all_rights = FSAccess.all()
    rules = Ruleset(all_rights)
    rules.allow("/", rules=FSAccess.READ_FILE | FSAccess.READ_DIR | FSAccess.EXECUTE)
    for path in writable:
        if os.path.isdir(path):
            rules.allow(path, rules=all_rights)
    rules.apply()


def _shares_a_card() -> bool:
    """Whether CUDA has to reach the daemon of its Multi-Process Service."""
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return os.path.exists(os.path.join(pipes, "control"))


def _no_network() -> None:
    import pyseccomp as seccomp

    rules = seccomp.SyscallFilter(defaction=seccomp.ALLOW)
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_PACKET):
        refused = seccomp.Arg(0, seccomp.EQ, int(family))
        rules.add_rule(seccomp.ERRNO(1), "socket", refused)  # EPERM
    if not _shares_a_card():
        refuse_local_sockets(rules)
    rules.load()
