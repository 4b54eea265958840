"""What changed between two traces, by module: kernels that came or went, time won or lost."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harness.records import KernelRow, Record
from traces.kernels import wildcard


@dataclass(frozen=True, kw_only=True)
class Difference(Record):
    """One module (list indices as *) in two traces; times and counts are sums over a step."""

    module: str
    status: str  # "appeared", "vanished", "faster", "slower" or "same"
    before_us: float
    after_us: float
    kernels_before: int
    kernels_after: int
    appeared: dict[str, int]  # kernels by name, with how many more calls than before
    vanished: dict[str, int]

    @property
    def delta_us(self) -> float:
        return self.after_us - self.before_us


def diff(before: Sequence[KernelRow], after: Sequence[KernelRow]) -> list[Difference]:
    """Every module of either trace, the largest change of time first."""
    sides = [_by_module(rows) for rows in (before, after)]
    found = []
    for module in dict.fromkeys((*sides[0], *sides[1])):
        old, new = (side.get(module, []) for side in sides)
        names_old, names_new = (_counts(rows) for rows in (old, new))
        before_us, after_us = (sum(row.time_us for row in rows) for rows in (old, new))
        found.append(
            Difference(
                module=module,
                status=_status(old, new, before_us, after_us),
                before_us=before_us,
                after_us=after_us,
                kernels_before=sum(names_old.values()),
                kernels_after=sum(names_new.values()),
                appeared=dict(names_new - names_old),
                vanished=dict(names_old - names_new),
            )
        )
    return sorted(found, key=lambda d: -abs(d.delta_us))


def _by_module(rows: Sequence[KernelRow]) -> dict[str, list[KernelRow]]:
    modules: dict[str, list[KernelRow]] = {}
    for row in rows:
        modules.setdefault(wildcard(row.module), []).append(row)
    return modules


def _counts(rows: Sequence[KernelRow]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row.name] += row.calls
    return counts


def _status(
    old: Sequence[KernelRow], new: Sequence[KernelRow], before_us: float, after_us: float
) -> str:
    if not old:
        return "appeared"
    if not new:
        return "vanished"
    if after_us == before_us:
        return "same"
    return "faster" if after_us < before_us else "slower"
