"""What a candidate cannot do, by which mechanisms, and which of them this machine does not give.

Torch-free; the rows go into the ledger and the reports.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.confine import Mechanism
from harness.errors import UserError
from harness.records import Record

# Each protection, and the mechanisms of which any one provides it. The first is the strongest.
PROTECTIONS = {
    "no network": ("network namespace", "seccomp"),
    "no writes outside its folder": ("read-only mounts", "landlock"),
    "reads only what it needs": ("landlock",),
    "no access to other processes": ("process namespace", "landlock", "own user"),
    "no privileges": ("no capabilities",),
    "fewer system calls": ("seccomp",),
    "dies with its children": ("process namespace", "supervisor"),
    "memory limited": ("supervisor",),
    "processes limited": ("own user", "real user", "supervisor"),
    "disk limited": ("private folder", "supervisor"),
    "files limited": ("rlimits",),
    "time limited": ("supervisor",),
    "own environment and caches": ("supervisor",),
}


@dataclass(frozen=True, kw_only=True)
class Protection(Record):
    """One thing a candidate cannot do: by which mechanisms, and which are absent and why."""

    name: str
    in_force: bool
    by: tuple[str, ...]
    absent: dict[str, str]


def protections(found: Sequence[Mechanism]) -> tuple[Protection, ...]:
    known = {m.name: m for m in found}
    known["supervisor"] = Mechanism(name="supervisor", in_force=True)
    rows = []
    for name, mechanisms in PROTECTIONS.items():
        by = tuple(m for m in mechanisms if m in known and known[m].in_force)
        absent = {m: known[m].why for m in mechanisms if m in known and not known[m].in_force}
        rows.append(Protection(name=name, in_force=bool(by), by=by, absent=absent))
    return tuple(rows)


def require(rows: Sequence[Protection]) -> None:
    """UserError in one line if a protection is missing."""
    missing = [f"{r.name} ({_reasons(r.absent)})" for r in rows if not r.in_force]
    if missing:
        raise UserError(
            f"--require-sandbox: this machine does not give: {'; '.join(missing)}; "
            "run where it does, or leave --require-sandbox out"
        )


def describe(rows: Sequence[Protection]) -> str:
    """One line: how many protections are in force, and which are not."""
    missing = [f"{r.name} ({_reasons(r.absent)})" for r in rows if not r.in_force]
    count = sum(r.in_force for r in rows)
    text = f"sandbox: {count} of {len(rows)} protections in force"
    return text + (f"; absent: {'; '.join(missing)}" if missing else "")


def _reasons(absent: dict[str, str]) -> str:
    return ", ".join(f"{mechanism}: {why}" for mechanism, why in absent.items()) or "not tried"
