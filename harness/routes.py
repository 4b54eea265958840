"""Routing flips: integer results may differ only where the reference's own margin is noise."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.operators import is_real
from harness.records import Flip, Routing
from harness.replay import Choice, Run

LISTED = 32  # flips in a record; the largest margins of more


@dataclass
class Deviations:
    """How far noise moves what is sorted, relative to the largest of it, by the sort's order; and
    what the comparisons of integer results found: how many rows, how many of them differed, and
    those that are furthest from a near-tie."""

    relative: dict[int, float] = field(default_factory=dict)
    rows: int = 0
    flipped: int = 0
    flips: list[Flip] = field(default_factory=list)
    where: str = ""  # the call that is being compared

    def add(self, first: Run, perturbed: Run) -> None:
        for i, (a, b) in enumerate(zip(first.choices, perturbed.choices, strict=False)):
            if a.values.shape != b.values.shape:
                continue
            if not a.values.numel():
                continue
            finite = torch.isfinite(a.values) & torch.isfinite(b.values)
            apart = (a.values.double() - b.values.double()).abs().masked_fill(~finite, 0.0)
            size = a.values.double().abs().masked_fill(~finite, 0.0).max()
            # 0 where nothing is finite, or all values are 0
            share = float((apart.max() / size).nan_to_num(0.0, 0.0, 0.0))
            self.relative[i] = max(self.relative.get(i, 0.0), share)

    def note(self, output: str, differs: Tensor, margin: Tensor, limit: Tensor) -> Flip:
        """Count the rows that differ and list the worst of them; returns the very worst."""
        self.flipped += int(differs.sum())
        excess = (margin - limit).masked_fill(~differs, -torch.inf)
        at = excess.sort(descending=True, stable=True).indices[: min(LISTED, int(differs.sum()))]
        facts = zip(at.tolist(), margin[at].tolist(), limit[at].tolist(), strict=True)
        made = [
            Flip(where=self.where, output=output, row=row, margin=_finite(m), limit=most)
            for row, m, most in facts
        ]
        self.flips = sorted(self.flips + made, key=lambda f: f.excess, reverse=True)[:LISTED]
        return made[0]

    def margins(
        self, choices: list[Choice], ours: Tensor, mine: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """By row of two integer results [..., k]: how far apart, in the reference's own values,
        what it chose and what the candidate chose are, and how far noise explains.

        If noise moves every value by at most d, what a perturbed order puts in some place is at
        most 2 d from what belongs there. A choice among values that an earlier one masked out, and
        one that is not read off a sort's order, needs a near-tie in some sort. One that lacks an
        earlier choice's group (`_without_a_group`) needs it there. None if these rows sort nothing.
        """
        rows = ours.shape[:-1].numel()
        a, b = ours.reshape(rows, -1), mine.reshape(rows, -1)
        direct: tuple[Tensor, Tensor] | None = None
        others: list[tuple[Tensor, Tensor]] = []
        earlier: list[tuple[Tensor, int, Tensor]] = []
        whole: list[Tensor] = []
        k = a.shape[-1]
        exact = any(c.kept == k < c.values.shape[-1] for c in choices)
        for i, choice in enumerate(choices):
            values = choice.values.double()
            if values.shape[:-1].numel() != rows or values.shape[-1] < 2:
                if values.ndim > 2 and values.shape[0] == rows:  # in parts of each row
                    whole.append(values.flatten(1))
                continue
            values = values.reshape(rows, -1)
            finite = torch.isfinite(values)
            size = values.abs().masked_fill(~finite, 0.0).max()
            limit = (2 * self.relative.get(i, 0.0) * size).expand(rows)  # either may move
            ordered = values.masked_fill(~finite, -torch.inf).sort(-1, descending=True).values
            fits = choice.kept == k < values.shape[-1] or not exact
            if direct is None and fits and _reads(values, ordered, a):
                direct = _apart(values, ordered, a, b), limit
                for scores, kept, most in earlier:
                    before = next((w for w in whole if w.shape == values.shape), values)
                    apart = _without_a_group(values, before, scores, kept, a, b, limit)
                    take = torch.isfinite(direct[0]) & (direct[0] >= direct[1]) & (apart < most)
                    margin, limits = direct
                    direct = torch.where(take, apart, margin), torch.where(take, most, limits)
                continue
            earlier.append((values, choice.kept, limit))
            last = min(choice.kept + 1, values.shape[-1])
            between = ordered[..., : last - 1] - ordered[..., 1:last]
            # NaN between two that were masked out
            others.append((between.nan_to_num(torch.inf, torch.inf).amin(-1), limit))
        return _merged(direct, others)


def _reads(values: Tensor, ordered: Tensor, chosen: Tensor) -> bool:
    """Whether `chosen` [rows, k] are the places of the largest `values` [rows, n]."""
    k, n = chosen.shape[-1], values.shape[-1]
    if k > n or not bool(((chosen >= 0) & (chosen < n)).all()):
        return False
    found = values.gather(-1, chosen.long()).sort(-1, descending=True).values
    return torch.equal(found, ordered[..., :k])


def _apart(values: Tensor, ordered: Tensor, ours: Tensor, mine: Tensor) -> Tensor:
    """The largest difference between what two results chose, place by place; sets that are not in
    order are sorted first. Infinite where a value was masked out, NaN where no choice gives such
    indices: one is out of range, or there twice."""
    n = values.shape[-1]
    bad = ((mine < 0) | (mine >= n)).any(-1)
    a, b = values.gather(-1, ours.long()), values.gather(-1, mine.long().clamp(0, n - 1))
    if not torch.equal(a, ordered[..., : a.shape[-1]]):
        a, b = a.sort(-1, descending=True).values, b.sort(-1, descending=True).values
    repeated = (mine.sort(-1).values.diff(dim=-1) == 0).any(-1)  # chosen twice
    apart = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(torch.inf, torch.inf).amax(-1)
    return apart.masked_fill(bad | repeated, torch.nan)


def _without_a_group(
    values: Tensor,
    before: Tensor,
    scores: Tensor,
    kept: int,
    ours: Tensor,
    mine: Tensor,
    limit: Tensor,
) -> Tensor:
    """How far, by row, the score of a group that was kept is above the best one that was not, where
    the candidate may have kept that in its place: it chose the best of what is then there, within
    `limit`. Infinite elsewhere.

    The groups, of which `kept` with the largest `scores` [rows, g] had been chosen, are equal parts
    of `values` [rows, n], which are masked out in the others; `before` are those before that. A row
    of which that is not so has none.
    """
    (rows, n), g, k = values.shape, scores.shape[-1], mine.shape[-1]
    none = values.new_full((rows,), torch.inf)
    if n % g or not 0 < kept < g:
        return none
    best = scores.sort(dim=-1, descending=True, stable=True).indices
    opened = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best[:, :kept], True)
    wide, visible = n // g, torch.isfinite(values)
    grouped = (opened.repeat_interleave(wide, dim=-1) == visible).all(-1)
    known = torch.isfinite(before).all(-1) & ((values == before) | ~visible).all(-1)
    gone = ~(ours[..., None] == mine[:, None, :]).any(-1)
    group = torch.where(gone, ours.long() // wide, 0)
    closed = torch.zeros_like(opened).long().scatter_add(-1, group, gone.long()) > 0
    instead = (opened & ~closed).scatter(-1, best[:, kept : kept + 1], True)
    left = before.masked_fill(~instead.repeat_interleave(wide, dim=-1), -torch.inf)
    chosen = left.gather(-1, mine.long().clamp(0, n - 1)).sort(-1, descending=True).values
    apart = left.sort(-1, descending=True).values[:, :k] - chosen
    apart = apart.abs().nan_to_num(torch.inf, torch.inf).amax(-1)
    fits = grouped & known & (apart < limit) & (closed.sum(-1) == 1)
    above = scores - scores.gather(-1, best[:, kept : kept + 1])
    return torch.where(fits, above.masked_fill(~closed, -torch.inf).amax(-1), none)


def _merged(
    direct: tuple[Tensor, Tensor] | None, others: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor] | None:
    """The direct margins, and where they are infinite, or missing, the others' closest to a tie."""
    if direct is None and not others:
        return None
    found = direct
    for margin, limit in others:
        if found is None:
            found = margin, limit
            continue
        take = margin - limit < found[0] - found[1]
        if direct is not None:
            take = take & torch.isinf(direct[0])
        found = torch.where(take, margin, found[0]), torch.where(take, limit, found[1])
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
    """Compare integer results (name, reference's, candidate's), row by row; `deviations` keeps
    count, and lists what differs."""
    flips = Flips()
    for name, ours, theirs in pairs:
        if ours.shape != theirs.shape:
            flips.unexplained = f"{name} has shape {tuple(theirs.shape)}, not {tuple(ours.shape)}"
            continue
        if not ours.ndim or not ours.numel() or is_real(ours.dtype):
            continue
        differs = (ours != theirs).reshape(-1, ours.shape[-1]).any(-1)
        deviations.rows += differs.numel()
        if not bool(differs.any()):
            continue
        found = deviations.margins(choices, ours, theirs)
        if found is None:
            none = torch.zeros_like(differs, dtype=torch.float64)
            found = none + torch.inf, none
        worst = deviations.note(name, differs, *found)
        bad = int((differs & ~(found[0] < found[1])).sum())  # a tie without noise is none
        if bad and flips.unexplained is None:
            far = "none" if worst.margin is None else f"{worst.margin:.3g}"
            flips.unexplained = (
                f"{name} routes {bad} row(s) differently, row {worst.row} worst, where the "
                f"reference's margin is above its self-noise ({far}, {worst.limit:.3g} is noise)"
            )
        flips.count += int(differs.sum())
        if flips.rows is None or flips.rows.numel() == differs.numel():
            flips.rows = differs if flips.rows is None else flips.rows | differs
    return flips


def _finite(margin: float) -> float | None:
    return margin if math.isfinite(margin) else None


def routing(found: list[Deviations], before: Routing | None = None) -> Routing | None:
    """The record of all comparisons, `before` among them; None if nothing returns a choice."""
    rows, flipped = sum(d.rows for d in found), sum(d.flipped for d in found)
    if not rows:
        return before
    flips = [flip for d in found for flip in d.flips]
    if before is not None:
        rows, flipped, flips = before.rows + rows, before.flipped + flipped, [*before.flips, *flips]
    flips.sort(key=lambda flip: flip.excess, reverse=True)
    return Routing(rows=rows, flipped=flipped, flips=tuple(flips[:LISTED]))


def kept_rows(flipped: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask of `like`'s elements whose row was not flipped; None if all count."""
    if flipped is None or like.ndim < 2:
        return None
    for dims in range(like.ndim - 1, 0, -1):  # a row may hold several dimensions, as [N, K, D]
        if like.shape[:dims].numel() == flipped.numel():
            return ~flipped.reshape(*like.shape[:dims], *[1] * (like.ndim - dims))
    return None
