"""Keeping the environment's secrets from the run's processes, one of which imports what was judged.

Workers of the sandbox get none of the environment but a few names. This is for the processes of the
run itself: any of them could be asked through /proc for the environment that it began with.
Torch-free.
"""

import ctypes
import os
import re
from pathlib import Path

SECRET = re.compile(
    r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|ANTHROPIC|(DSN|_PAT|_PWD)$", re.IGNORECASE
)
# An address with a password in it, a private key: whatever the variable is called.
VALUE = re.compile(r"://[^/\s@:]*:[^/\s@]+@|PRIVATE KEY")
TAKEN: dict[str, str] = {}
ENV_START = 47  # of /proc/self/stat, counted behind the command's name


def take() -> None:
    """Move every variable with a telling name or value from this process's environment to `TAKEN`,
    and out of the memory that /proc shows as what it began with. Processes forked later have
    neither."""
    TAKEN.update({name: value for name, value in os.environ.items() if tells(name, value)})
    block = Path("/proc/self/environ").read_bytes()
    for name in TAKEN:
        os.environ.pop(name, None)
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[ENV_START])
    at = 0
    for entry in block.split(b"\0"):
        name, _, value = entry.partition(b"=")
        if value and tells(os.fsdecode(name), os.fsdecode(value)):
            ctypes.memset(start + at + len(name) + 1, ord("x"), len(value))
        at += len(entry) + 1


def tells(name: str, value: str) -> bool:
    """Whether a variable looks like a secret."""
    return bool(SECRET.search(name) or VALUE.search(value))


def hand_over() -> dict[str, str]:
    """What was taken, for the one process that needs it; this one has it no more."""
    found = dict(TAKEN)
    TAKEN.clear()
    return found
