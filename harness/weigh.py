"""Which of two replays, that differ in one rounding, does a candidate equal where they differ?"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.operators import is_real
from harness.replay import Point


@dataclass
class Evidence:
    """For one rounding: what telling the contract's replay from the flipped one found."""

    point: Point
    declared: str
    visible: int = 0
    elements: int = 0
    equals_declared: int = 0  # of the visible elements
    equals_flipped: int = 0
    differs_flipped: int = 0  # of all elements
    noise: int = 0  # elements that noise changes where the rounding is not added
    drawn: int = 0  # visible elements of all noise replays
    moved: int = 0  # those of them that noise changed
    stirred: float = 0.0  # other elements that one noise replay changes

    @property
    def strayed(self) -> int:
        """Elements that do not show the rounding, in which the candidate differs all the same."""
        return self.differs_flipped - self.visible + self.equals_flipped


@dataclass
class Flip:
    """The contract's replay of a case with one rounding flipped."""

    point: Point
    declared: str
    results: dict[str, Tensor]
    noise: int = 0  # elements that noise changes where the rounding is not added


def weigh(
    points: dict[str, Evidence],
    flips: Iterable[Flip],
    ours: dict[str, Tensor],
    mine: dict[str, Tensor],
    masks: dict[str, Tensor],
    moved: dict[str, Tensor] | None = None,
    draws: int = 0,
) -> None:
    """Add to `points` what the candidate's results `mine` show in one case, against the contract's
    replay `ours` and each of `flips`; of a result in `masks`, those elements count alone. `moved`
    says in how many of `draws` noise replays an element changed.

    All counts of a case are read at once, since on a card each reading waits.
    """
    real = [n for n, t in ours.items() if is_real(t.dtype) and t.numel()]
    counted = {n: masks[n].expand_as(ours[n]) for n in real if n in masks}
    elements = sum(int(counted[n].sum()) if n in counted else ours[n].numel() for n in real)
    differing = {n: mine[n] for n in real if not torch.equal(mine[n], ours[n])}
    stirred = _stirred(real, counted, moved or {})
    evidence: list[tuple[Evidence, str]] = []
    counts: list[Tensor] = []
    for flip in flips:
        found = points.setdefault(flip.point.name, Evidence(flip.point, flip.declared))
        found.noise += flip.noise
        found.elements += elements
        for n in real:
            seen = _counts(ours[n], flip.results[n], counted.get(n), differing.get(n))
            noisy = _moved(ours[n], flip.results[n], counted.get(n), (moved or {}).get(n))
            counts.append(torch.cat((seen, noisy)))
            evidence.append((found, n))
    numbers = torch.stack(counts).tolist() if counts else []
    for (found, name), (visible, declared, flipped, apart, noisy) in zip(
        evidence, numbers, strict=True
    ):
        found.visible += visible
        found.equals_declared += declared
        found.equals_flipped += flipped
        found.differs_flipped += apart
        found.drawn += draws * visible
        found.moved += noisy
        found.stirred += (stirred[name] - noisy) / draws if draws else 0.0


def _stirred(
    names: list[str], masks: dict[str, Tensor], moved: dict[str, Tensor]
) -> dict[str, int]:
    """How many elements all noise replays of a case changed, by result."""
    sums = {
        n: (moved[n] * masks[n] if n in masks else moved[n]).sum(dtype=torch.int64)
        for n in names
        if n in moved
    }
    return {n: int(sums[n]) if n in sums else 0 for n in names}


def _moved(ours: Tensor, other: Tensor, mask: Tensor | None, moved: Tensor | None) -> Tensor:
    """How often noise changed the elements in which two replays differ, int64 [1]."""
    if moved is None:
        return torch.zeros(1, dtype=torch.int64, device=ours.device)
    visible = ours != other if mask is None else (ours != other) & mask
    return (moved * visible).sum(dtype=torch.int64)[None]


def _counts(ours: Tensor, other: Tensor, mask: Tensor | None, mine: Tensor | None) -> Tensor:
    """How many elements of two replays differ, in how many of these the candidate equals the first
    and the second, and in how many elements it differs from the second; int64 [4]. `mine` is None
    where the candidate equals `ours`."""
    visible = ours != other
    if mine is None:
        count = (visible if mask is None else visible & mask).sum()
        return torch.stack((count, count, torch.zeros_like(count), count))
    found = torch.stack(
        (visible, (mine == ours) & visible, (mine == other) & visible, mine != other)
    )
    return (found if mask is None else found & mask).reshape(4, -1).sum(1)
