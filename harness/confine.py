"""What the kernel is asked for, in the process that will run untrusted code, before it does.

Two places: `isolate` and `mount` in the supervisor, which keeps its rights, and `restrict` in the
worker, which gives them up for good. Each asks for one mechanism after the other and says which it
got. Landlock and seccomp come from their libraries; namespaces, mounts and capabilities have none
that works between fork and use, so they are plain system calls. Torch-free.
"""

import ctypes
import os
import resource
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.records import Record

ROOT = Path(__file__).resolve().parents[1]
NOBODY = 65534  # the user and group of nobody, on every Linux
GIB = 1 << 30
LIBC = ctypes.CDLL(None, use_errno=True)

# linux/sched.h, sys/mount.h, linux/prctl.h, linux/capability.h, asm/unistd_64.h
NEW = {
    "network namespace": 0x40000000,
    "mount namespace": 0x00020000,
    "ipc namespace": 0x08000000,
    "process namespace": 0x20000000,
}
NEW_USER = 0x10000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = (
    1, 2, 4, 8, 4096, 16384, 1 << 18,
)  # fmt: skip
SYS_MOUNT_SETATTR, SYS_CAPGET, SYS_CAPSET = 442, 125, 126
AT_RECURSIVE, AT_FDCWD, ATTR_RDONLY = 0x8000, -100, 1
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 1, 4, 24, 36
CAPABILITY_VERSION = 0x20080522
CAPABILITIES = 64

# Read and executed by any Python program, and by the compilers that candidates call.
SYSTEM = "/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/proc", "/sys", "/opt"
OWN_THREADS = "/proc/self/task"
DEVICES = "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"
PACKAGES = "reference", "optimized", "harness"
# What a kernel never needs and an attacker does.
DENIED = (
    "ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp", "mount", "umount2",
    "pivot_root", "move_mount", "open_tree", "fsopen", "fsmount", "mount_setattr", "unshare",
    "setns", "bpf", "perf_event_open", "keyctl", "add_key", "request_key", "userfaultfd",
    "io_uring_setup", "kexec_load", "init_module", "finit_module", "reboot", "swapon", "chroot",
    "setuid", "setreuid", "setresuid", "setfsuid",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Limits(Record):
    """What one candidate may use. Times are seconds, sizes bytes."""

    load_s: float = 120.0  # to import the change file and to build it for every node
    call_s: float = 120.0  # one call; a first one may compile
    memory: int = 8 * GIB  # of all its processes together, without what the judge hands over
    disk: int = GIB  # in its folder
    file: int = GIB  # one file
    processes: int = 64
    open_files: int = 1024


@dataclass(frozen=True, kw_only=True)
class Mechanism(Record):
    """One thing asked of the kernel; `why` says why it is absent."""

    name: str
    in_force: bool
    why: str = ""


def attempt(name: str, ask: Callable[[], None]) -> Mechanism:
    """Ask for a mechanism; whatever keeps it from being had becomes its reason."""
    try:
        ask()
    except (OSError, ImportError, RuntimeError, ValueError, AttributeError) as error:
        text = error.strerror if isinstance(error, OSError) else None
        return Mechanism(name=name, in_force=False, why=text or str(error) or type(error).__name__)
    return Mechanism(name=name, in_force=True)


def _call(function: str, *args: object) -> None:
    if getattr(LIBC, function)(*args) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def prctl(option: int, value: int) -> None:
    _call("prctl", option, ctypes.c_ulong(value), 0, 0, 0)


def die_with_parent() -> None:
    prctl(PR_SET_PDEATHSIG, 9)


def isolate() -> list[Mechanism]:
    """Another user and new namespaces, for this process's children. Single-threaded callers only.

    Root first becomes nobody, if nobody can read what the worker needs.
    """
    found = [attempt("own user", _become_nobody)]
    if not found[0].in_force and os.getuid() == 0:
        found.append(attempt("real user", _be_nobody_by_name))
    found.append(attempt("user namespace", _new_user_namespace))
    for name, flag in NEW.items():
        found.append(attempt(name, lambda flag=flag: _call("unshare", flag)))
    return found


def _new_user_namespace() -> None:
    user, group = os.geteuid(), os.getegid()
    _call("unshare", NEW_USER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _become_nobody() -> None:
    if os.getuid() != 0:
        raise OSError(0, "the caller is no root, and keeps its user")
    pid = os.fork()
    if pid == 0:
        _drop_user()
        needed = (sys.executable, __file__, socket.__file__)
        found = all(os.access(path, os.R_OK) for path in needed)
        usable = all(os.access(path, os.R_OK | os.W_OK) for path in devices())
        os._exit(0 if found and usable else 1)
    if os.waitpid(pid, 0)[1] != 0:
        raise OSError(0, f"user {NOBODY} cannot read {ROOT} or {sys.prefix}, or use the card")
    _drop_user()


def _drop_user() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    prctl(PR_SET_DUMPABLE, 1)  # or /proc/self would stay root's


def _be_nobody_by_name() -> None:
    """Root's files stay readable, but limits on the number of processes hold: they go by the real
    user, and root's are never counted."""
    os.setresuid(NOBODY, 0, 0)
    prctl(PR_SET_DUMPABLE, 1)


def mount(folder: str, limits: Limits, namespace: bool) -> list[Mechanism]:
    """In a mount namespace of its own: everything read-only but `folder`, which is a file system in
    memory of limited size; a /dev/shm of its own; and in a process namespace a /proc of its own."""
    names = "private folder", "own /dev/shm", "read-only mounts", "own /proc"
    if not namespace:
        why = "needs a mount namespace"
        return [Mechanism(name=name, in_force=False, why=why) for name in names]
    private = attempt("private mounts", _private_mounts)
    if not private.in_force:
        return [Mechanism(name=name, in_force=False, why=private.why) for name in names]
    size = f"size={limits.disk},mode=0777"

    def read_only() -> None:
        attributes = struct.pack("QQQQ", ATTR_RDONLY, 0, 0, 0)
        _set_attributes("/", attributes, AT_RECURSIVE)
        for path in (folder, "/dev/shm"):
            _set_attributes(path, struct.pack("QQQQ", 0, ATTR_RDONLY, 0, 0), 0)

    return [
        attempt("private folder", lambda: _mount("tmpfs", folder, MS_NOSUID | MS_NODEV, size)),
        attempt("own /dev/shm", lambda: _mount("tmpfs", "/dev/shm", MS_NOSUID | MS_NODEV, size)),
        attempt("read-only mounts", read_only),
        attempt("own /proc", lambda: _mount("proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)),
    ]


def _private_mounts() -> None:
    """Let no mount that follows be seen outside this namespace."""
    _call("mount", b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)


def _mount(kind: str, place: str, flags: int, options: str = "") -> None:
    name = kind.encode()
    _call("mount", name, place.encode(), name, ctypes.c_ulong(flags), options.encode() or None)


def _set_attributes(path: str, attributes: bytes, flags: int) -> None:
    _call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, attributes, len(attributes))


def restrict(
    folder: str, limits: Limits, extra: Iterable[str], *, shm: bool, connects: bool = False
) -> list[Mechanism]:
    """Give up, for good, what the worker does not need. `extra` may be read besides the system's
    own files; with `shm`, /dev/shm is the worker's own and may be written; with `connects` it may
    connect to local sockets, such as another process's of CUDA."""
    return [
        attempt("no capabilities", _drop_capabilities),
        attempt("rlimits", lambda: _limit(limits)),
        attempt("landlock", lambda: _landlock(folder, extra, shm)),
        attempt("seccomp", lambda: _seccomp(connects)),
    ]


def _drop_capabilities() -> None:
    for capability in range(CAPABILITIES):
        LIBC.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)  # unknown ones: EINVAL
    header, none = struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24)
    _call("syscall", SYS_CAPSET, header, none)
    prctl(PR_SET_DUMPABLE, 1)


def _limit(limits: Limits) -> None:
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, limits.file),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_NPROC, 4 * limits.processes),  # counts threads
        (resource.RLIMIT_DATA, limits.memory),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def readable(extra: Iterable[str] = ()) -> list[str]:
    """What the worker may read: the system, Python, three packages of this project, `extra`."""
    listed = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    paths = [*SYSTEM, sys.prefix, sys.base_prefix, *extra, *listed]
    paths += [str(ROOT / name) for name in PACKAGES]
    paths += [
        path for path in sys.path if path and not (Path(path) / "harness/confine.py").exists()
    ]
    return sorted({str(Path(path).resolve()) for path in paths if path and Path(path).exists()})


def devices() -> list[str]:
    """Devices the worker may use: the harmless ones and NVIDIA's."""
    cards = [p for p in sorted(Path("/dev").glob("nvidia*")) if not p.is_dir()]
    return [*DEVICES, *map(str, cards), *map(str, sorted(Path("/dev/nvidia-caps").glob("*")))]


def allow_naming_threads(rules: Any) -> None:
    """CUDA does not start where it may not name its threads (driver 580, 2026-11-30). Of this
    process's threads only, not of those that it starts."""
    from landlock import FSAccess

    os.open(OWN_THREADS, os.O_PATH)  # held for good: the rule is about this very folder
    name = FSAccess.READ_FILE | FSAccess.WRITE_FILE | FSAccess.TRUNCATE
    rules.allow(OWN_THREADS, rules=name | FSAccess.READ_DIR)


def _landlock(folder: str, extra: Iterable[str], shm: bool) -> None:
    from landlock import FSAccess, Ruleset, landlock_abi_version

    ctypes.set_errno(0)  # the library takes an old error for its own
    newest = FSAccess.all()
    rules = Ruleset(newest)
    look = FSAccess.READ_FILE | FSAccess.READ_DIR | FSAccess.EXECUTE
    look_file = FSAccess.READ_FILE | FSAccess.EXECUTE
    use = FSAccess.READ_FILE | FSAccess.WRITE_FILE
    if landlock_abi_version() >= 5:
        use |= FSAccess.IOCTL_DEV
    for path in readable(extra):
        rules.allow(path, rules=look if os.path.isdir(path) else look_file)
    for path in devices():
        rules.allow(path, rules=use)
    if len(devices()) > len(DEVICES):
        allow_naming_threads(rules)
    for path in (folder, "/dev/shm") if shm else (folder,):
        rules.allow(path, rules=newest)
    rules.apply()


def _seccomp(connects: bool) -> None:
    import pyseccomp as seccomp

    refuse = seccomp.ERRNO(1)  # EPERM
    rules = seccomp.SyscallFilter(defaction=seccomp.ALLOW)
    for name in DENIED:
        try:
            rules.add_rule(refuse, name)
        except (ValueError, OSError):  # an older libseccomp does not know the newest calls
            continue
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET):
        rules.add_rule(refuse, "socket", seccomp.Arg(0, seccomp.EQ, int(family)))
    if not connects:
        refuse_local_sockets(rules)
    rules.load()


def refuse_local_sockets(rules: Any) -> None:
    """No way to what other programs listen on: an agent that holds keys, a daemon that starts
    processes. Sockets that are connected already, and pairs of them, stay."""
    import pyseccomp as seccomp

    refuse, local = seccomp.ERRNO(1), seccomp.Arg(0, seccomp.EQ, int(socket.AF_UNIX))
    unconnected = seccomp.Arg(1, seccomp.MASKED_EQ, 0xF, int(socket.SOCK_DGRAM))
    rules.add_rule(refuse, "connect")
    rules.add_rule(refuse, "socket", local, unconnected)
