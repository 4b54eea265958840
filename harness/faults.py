"""What is wrong with a candidate whatever its numerics: shapes, stray writes, NaN, instability."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.observe import Observed
from harness.operators import is_real
from harness.replay import Run
from harness.trees import bits, same_bits

# The first of these that has something to say gives the verdict's reason.
ORDER = (
    "policy",
    "call",
    "parameters",
    "unwritten",
    "finite",
    "repeat",
    "writes",
    "points",
    "route",
    "share",
    "distance",
    "golden",
    "batch",
)


@dataclass
class Faults:
    """The first fault of each kind."""

    found: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, text: str | None) -> None:
        assert kind in ORDER
        if text is not None:
            self.found.setdefault(kind, text)

    @property
    def reason(self) -> str | None:
        return next((self.found[kind] for kind in ORDER if kind in self.found), None)


def arguments_and_shapes(first: Run, seen: Observed, initial: dict[str, Tensor]) -> str | None:
    """Whether the candidate returns what the reference does, and alters only what it alters."""
    if seen.results.keys() != first.outputs.keys():
        ours, theirs = ", ".join(first.outputs), ", ".join(seen.results) or "nothing"
        return f"returns {theirs}, the reference returns {ours}"
    for name, ours in first.outputs.items():
        mine = seen.results[name]
        if mine.shape != ours.shape or mine.dtype != ours.dtype or mine.device != ours.device:
            return f"returns {name} as {_describe(mine)}, the reference as {_describe(ours)}"
    for name, before in initial.items():
        if name not in first.written and not same_bits(before, seen.arguments[name]):
            return f"writes to its argument {name}, which the reference leaves as it is"
    return None


def _describe(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)} on {t.device}"


def non_finite(where: str, mine: Tensor, ours: Tensor) -> str | None:
    if not is_real(ours.dtype):
        return None
    bad = ~torch.isfinite(mine) & torch.isfinite(ours)
    count = int(bad.sum())
    return (
        f"{where}: {count} element(s) NaN or infinite where the reference is finite" * bool(count)
        or None
    )


def written_rows(before: Tensor, after: Tensor) -> Tensor:
    """The rows (along the last dimension) of which something was written, [..., 1] bool."""
    changed = (bits(before) != bits(after)).reshape(before.shape)
    return changed.any(-1, keepdim=True) if changed.ndim else changed


def cache_writes(
    where: str, before: Tensor, ours: Tensor, mine: Tensor, loose: Tensor | None
) -> str | None:
    """Rows written that the reference leaves, and rows left that it writes."""
    theirs, rows = written_rows(before, mine), written_rows(before, ours)
    if loose is not None:
        checked = ~loose.all(-1, keepdim=True)
        theirs, rows = theirs & checked, rows & checked
    stray, missing = int((theirs & ~rows).sum()), int((rows & ~theirs).sum())
    if stray:
        return f"{where}: writes {stray} row(s) that the reference leaves as they are"
    if missing:
        return f"{where}: leaves {missing} of {int(rows.sum())} row(s) unwritten"
    return None


def repeat_differs(where: str, before: Tensor, after: Tensor) -> tuple[str, str]:
    """Which fault it is that a second call on poisoned memory gave other bits."""
    bad = bits(before) != bits(after)
    count = int(bad.sum())
    poisoned = is_real(after.dtype) and bool((after.isnan() & ~before.isnan()).any())
    if poisoned:
        return "unwritten", f"{where}: not fully written, {count} element(s) show poisoned memory"
    return "repeat", f"{where}: {count} element(s) differ from run to run on the same input"


def integer_pairs(first: Run, seen: Observed) -> list[tuple[str, Tensor, Tensor]]:
    """Integers that submodules return, the reference's beside the candidate's."""
    pairs = []
    for name, ours in first.integers.items():
        for mine, reference in zip(seen.integers.get(name, []), ours, strict=False):
            pairs.append((name, reference, mine))
    return pairs
