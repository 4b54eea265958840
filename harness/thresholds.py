"""The batch sizes at which a change's guard or its launch knobs decide otherwise.

A decode's call is probed at 1 sequence up to the most tokens that a target's step has, in powers of
two and one to each side; where the answer changes, halving finds the size, and the call is judged
just below it, at it and above it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from harness.cases import REFUSALS, Axes, Case, axes, widened
from harness.steps import BATCH
from harness.trees import leaves
from harness.workload import TARGETS, Workload, target
from optimized.change import Implementation

MOST_SIZES = 9  # judged, of one node


@dataclass
class Thresholds:
    """Makes the cases for one implementation; `notes` say what was found."""

    implementation: Implementation
    most: int  # tokens
    limit_bytes: int  # of a call's arguments
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, implementation: Implementation, workload: Workload, limit_bytes: int):
        steps = [target(name, toy=workload.toy) for name in TARGETS]
        return cls(implementation, max(t.batch * t.tokens for t in steps), limit_bytes)

    @property
    def decides(self) -> bool:
        """Whether anything but the kernel itself looks at a call's sizes."""
        one = self.implementation
        return one.guard is not None or (one.knobs is not None and one.shape is not None)

    def cases(self, node: nn.Module, calls: list[Case]) -> list[Case]:
        """The node's calls on both sides of each threshold."""
        found = pair(calls) if self.decides else None
        if found is None:
            return []
        call, where = found
        each = sum(t.nbytes for _, t in leaves((call.args, call.kwargs))) / BATCH
        largest = min(self.most, int(self.limit_bytes / max(1.0, each)))

        def answer(size: int) -> Any:
            return self.answer(node, widened(call, where.sequences, size, ""))

        at = crossings(answer, largest)
        sizes = sorted({n for t in at for n in (t - 1, t, t + 1) if n <= largest})
        judged, left = sizes[:MOST_SIZES], sizes[MOST_SIZES:]
        if at:
            text = f"its guard or its knobs change at {listed(at)} sequences: judged at"
            self.notes.append(f"{text} {listed(judged)}" + f", not at {listed(left)}" * bool(left))
        return [widened(call, where.sequences, n, f"{n} sequences") for n in judged]

    def answer(self, node: nn.Module, call: Case) -> Any:
        """What the guard and the heuristic say about a call, comparable."""
        one = self.implementation
        try:
            if one.guard is not None and one.guard(node, *call.args) is not None:
                return "declines"
            if one.knobs is None or one.shape is None:
                return None
            return repr(one.knobs.heuristic(one.shape(node, *call.args)))
        except (*REFUSALS, KeyError, AttributeError) as error:
            return type(error).__name__


def pair(calls: list[Case]) -> tuple[Case, Axes] | None:
    """A call of several sequences of one token, and which dimensions count them."""
    for call in calls:
        for other in calls:
            where = axes([call, other])
            if where.sequences and not where.tokens:
                return call, where
    return None


def crossings(answer: Callable[[int], Any], largest: int) -> list[int]:
    """The sizes whose answer is another than that of one less, as far as the probes show."""
    powers = [2**n for n in range(largest.bit_length() + 1)]
    sizes = sorted({n for p in powers for n in (p - 1, p, p + 1) if 1 <= n <= largest})
    answers = {n: answer(n) for n in sizes}
    found = []
    for low, high in zip(sizes, sizes[1:], strict=False):
        if answers[low] == answers[high]:
            continue
        a, b = low, high
        while b - a > 1:
            middle = (a + b) // 2
            a, b = (middle, b) if answer(middle) == answers[low] else (a, middle)
        found.append(b)
    return found


def listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))


def fits(call: Case, count: int, limit_bytes: int) -> bool:
    """Whether the call's arguments for `count` sequences take at most so many bytes."""
    size = sum(t.nbytes for _, t in leaves((call.args, call.kwargs)))
    return size * count // BATCH <= limit_bytes
