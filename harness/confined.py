"""What a process gives up that runs candidates which passed the sandbox, to tune and time them.

It needs its card and its compilers, so it keeps more than a worker does: it loses the right to
write elsewhere than in given folders, and the internet; if told what it needs, also to read all
else, and to look into other processes. All hold for the calling thread and all that it starts from
then on, not for threads that run already nor for processes started before, such as the sandbox's
server. Torch-free.
"""

import ctypes
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

from harness import confine
from harness.confine import Mechanism, attempt, refuse_local_sockets
from harness.protections import Protection

WRITES, NETWORK = "no writes outside its folders", "no network"
READS, PROCESSES = "reads only what it needs", "no access to other processes"
# linux/capability.h: CAP_SYS_PTRACE, CAP_SYS_ADMIN and CAP_PERFMON, with which root sees through
# Landlock into the memory and the environment of any process.
SIGHTED = 19, 21, 38


def give_up(
    folders: Iterable[Path], readable: Iterable[Path] | None = None
) -> tuple[Protection, ...]:
    """For good: write in `folders` and to devices only, open no internet sockets and connect to no
    local ones, behind which other programs of the user do as they are told. With `readable`, read
    that, `folders` and what any worker may only, and see no other process's memory or environment.
    What of it is in force, and why something is not."""
    writable = [str(path) for path in (*folders, Path("/dev"))]
    needed = None if readable is None else confine.readable(map(str, readable))
    network = attempt("seccomp", _no_network)
    blind = None if needed is None else attempt("no capabilities", _drop_sight)
    landlock = attempt("landlock", lambda: _only(writable, needed))
    rows = [(WRITES, landlock), (NETWORK, network)]
    if blind is not None:  # Landlock refuses it to whoever has no such capability
        rows += [(READS, landlock), (PROCESSES, landlock if blind.in_force else blind)]
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


def _only(writable: Iterable[str], readable: Iterable[str] | None) -> None:
    from landlock import FSAccess, Ruleset

    ctypes.set_errno(0)  # the library takes an old error for its own
    all_rights = FSAccess.all()
    rules = Ruleset(all_rights)
    for path in ["/"] if readable is None else readable:
        look = FSAccess.READ_FILE | FSAccess.EXECUTE
        rules.allow(path, rules=look | FSAccess.READ_DIR if os.path.isdir(path) else look)
    for path in writable:
        if os.path.isdir(path):
            rules.allow(path, rules=all_rights)
    confine.allow_naming_threads(rules)
    rules.apply()


def _drop_sight() -> None:
    header, words = (
        struct.pack("Ii", confine.CAPABILITY_VERSION, 0),
        ctypes.create_string_buffer(24),
    )
    if confine.LIBC.syscall(confine.SYS_CAPGET, header, words) < 0:
        raise OSError(ctypes.get_errno(), "capget")
    kept = list(struct.unpack("6I", words.raw))  # effective, permitted, inheritable; upper halves
    for capability in SIGHTED:
        half, bit = divmod(capability, 32)
        for at in range(3 * half, 3 * half + 3):
            kept[at] &= ~(1 << bit)
    if confine.LIBC.syscall(confine.SYS_CAPSET, header, struct.pack("6I", *kept)) < 0:
        raise OSError(ctypes.get_errno(), "capset")


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
