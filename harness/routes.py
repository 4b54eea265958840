"""Routing flips: integer results may differ only where the reference's own margin is noise."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.operators import is_real
from harness.replay import Choice, Run


@dataclass
class Deviations:
    """How far noise moves what is sorted, relative to the largest of it, by the sort's order."""

    relative: dict[int, float] = field(default_factory=dict)

    def add(self, first: Run, perturbed: Run) -> None:
        for i, (a, b) in enumerate(zip(first.choices, perturbed.choices, strict=False)):
            if a.values.shape != b.values.shape:
                continue
            finite = torch.isfinite(a.values) & torch.isfinite(b.values)
            if not bool(finite.any()):
                continue
            apart = (a.values.double() - b.values.double()).abs().masked_fill(~finite, 0.0)
            size = a.values.double().abs().masked_fill(~finite, 0.0).max()
            share = float(apart.max() / size) if float(size) else 0.0
            self.relative[i] = max(self.relative.get(i, 0.0), share)

    def near_ties(self, choices: list[Choice], rows: int) -> Tensor | None:
        """Which of `rows` rows have a choice whose margin is within noise; None if no choice is
        made by these rows."""
        found = None
        for i, choice in enumerate(choices):
            values = choice.values.double()
            if values.shape[:-1].numel() != rows or values.shape[-1] < 2:
                continue
            finite = torch.isfinite(values)
            size = values.abs().masked_fill(~finite, 0.0).max() if values.numel() else 0.0
            ordered = values.masked_fill(~finite, -torch.inf).sort(-1, descending=True).values
            last = min(choice.kept + 1, values.shape[-1])
            margins = ordered[..., : last - 1] - ordered[..., 1:last]
            margins = margins.nan_to_num(nan=torch.inf)  # between two that were masked out
            limit = 2 * self.relative.get(i, 0.0) * size  # either may move
            near = (margins <= limit).any(-1).reshape(-1)
            found = near if found is None else found | near
        return found


@dataclass
class Flips:
    """Rows that were routed differently, and those of them that noise does not explain."""

    rows: Tensor | None = None
    count: int = 0
    unexplained: str | None = None


def find_flips(
    pairs: list[tuple[str, Tensor, Tensor]], choices: list[Choice], deviations: Deviations
) -> Flips:
    """Compare integer results (name, reference's, candidate's), row by row."""
    flips = Flips()
    for name, ours, theirs in pairs:
        if ours.shape != theirs.shape:
            flips.unexplained = f"{name} has shape {tuple(theirs.shape)}, not {tuple(ours.shape)}"
            continue
        if not ours.ndim or not ours.numel() or is_real(ours.dtype):
            continue
        differs = (ours != theirs).reshape(-1, ours.shape[-1]).any(-1)
        if not bool(differs.any()):
            continue
        near = deviations.near_ties(choices, differs.numel())
        bad = differs if near is None else differs & ~near
        if bool(bad.any()) and flips.unexplained is None:
            row = int(bad.nonzero()[0])
            flips.unexplained = (
                f"{name} routes {int(bad.sum())} row(s) differently, row {row} first, "
                "where the reference's margin is above its self-noise"
            )
        flips.count += int(differs.sum())
        if flips.rows is None or flips.rows.numel() == differs.numel():
            flips.rows = differs if flips.rows is None else flips.rows | differs
    return flips


def kept_rows(flipped: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask of `like`'s elements whose row was not flipped; None if all count."""
    if flipped is None or like.ndim < 2:
        return None
    for dims in range(like.ndim - 1, 0, -1):  # a row may hold several dimensions, as [N, K, D]
        if like.shape[:dims].numel() == flipped.numel():
            return ~flipped.reshape(*like.shape[:dims], *[1] * (like.ndim - dims))
    return None
