"""What changed between two traces, by module: kernels that came or went, time won or lost.

Two traces of one model never take the very same times. How far they differ by themselves is read
off the modules that launch the same kernels in both: a time has changed if it moved further.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

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
    shift: float = 1.0  # how many times as long everything takes after

    @property
    def beyond_us(self) -> float:
        """By how much it moved beyond the shift of everything."""
        return self.after_us - self.shift * self.before_us

    @property
    def delta_us(self) -> float:
        return self.after_us - self.before_us

    @property
    def changed(self) -> bool:
        """Whether its time moved, or what it launches."""
        return self.status != "same" or bool(self.appeared or self.vanished)


FEWEST = 5  # modules with the same kernels that tell noise
FALSE_ALARM = 0.05  # policy: the chance that any module of two traces of one program seems changed


@dataclass(frozen=True, kw_only=True)
class Noise(Record):
    """What two traces differ by where nothing changed.

    A module's time is a sum over kernels, so its scatter grows as the square root of its time.
    Single kernels are now and then late by much, so its tail is taken as an exponential's.
    """

    ratio: float  # the median of after over before
    scatter: float  # the median distance from that, us per square root of us
    modules: int  # that launch the same kernels in both

    def explains(self, before_us: float, after_us: float) -> bool:
        moved = abs(after_us - self.ratio * before_us)
        return moved <= self.medians * self.scatter * math.sqrt(before_us) + 1e-9

    @property
    def medians(self) -> float:
        """How many medians any of so many modules is off with a chance of `FALSE_ALARM`."""
        return math.log(self.modules / FALSE_ALARM) / math.log(2)

    @property
    def words(self) -> str:
        return (
            f"{self.modules} modules that launch the same kernels in both take "
            f"{self.ratio:.3f} times as long after; faster or slower is what moved further from "
            f"that than noise moves any of so many once in {1 / FALSE_ALARM:.0f} comparisons"
        )


UNKNOWN = f"fewer than {FEWEST} modules launch the same kernels in both, so any difference counts"


def noise(before: Sequence[KernelRow], after: Sequence[KernelRow]) -> Noise | None:
    """From the modules with the same kernels in both; None where there are too few."""
    old, new = _by_module(before), _by_module(after)
    times = [
        (_time_us(old[module]), _time_us(new[module]))
        for module in old.keys() & new.keys()
        if _counts(old[module]) == _counts(new[module]) and _time_us(old[module]) > 0
    ]
    if len(times) < FEWEST:
        return None
    ratio = median(b / a for a, b in times)
    scatter = median(abs(b - ratio * a) / math.sqrt(a) for a, b in times)
    return Noise(ratio=ratio, scatter=scatter, modules=len(times))


def diff(before: Sequence[KernelRow], after: Sequence[KernelRow]) -> list[Difference]:
    """Every module of either trace: what changed first, then the largest change of time."""
    sides = [_by_module(rows) for rows in (before, after)]
    still = noise(before, after)
    shift = 1.0 if still is None else still.ratio
    found = []
    for module in dict.fromkeys((*sides[0], *sides[1])):
        old, new = (side.get(module, []) for side in sides)
        names_old, names_new = (_counts(rows) for rows in (old, new))
        before_us, after_us = _time_us(old), _time_us(new)
        found.append(
            Difference(
                module=module,
                status=_status(sides, module, still),
                before_us=before_us,
                after_us=after_us,
                kernels_before=sum(names_old.values()),
                kernels_after=sum(names_new.values()),
                appeared=dict(names_new - names_old),
                vanished=dict(names_old - names_new),
                shift=shift,
            )
        )
    return sorted(found, key=lambda d: (not d.changed, -abs(d.beyond_us)))


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


def _time_us(rows: Sequence[KernelRow]) -> float:
    return sum(row.time_us for row in rows)


def _status(
    sides: Sequence[Mapping[str, Sequence[KernelRow]]], module: str, still: Noise | None
) -> str:
    if module not in sides[0]:
        return "appeared"
    if module not in sides[1]:
        return "vanished"
    before_us, after_us = (_time_us(side[module]) for side in sides)
    if after_us == before_us or (still is not None and still.explains(before_us, after_us)):
        return "same"
    ratio = 1.0 if still is None else still.ratio
    return "faster" if after_us < ratio * before_us else "slower"
