"""Which roundings a candidate really does: the set whose replay it equals most."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from harness.examine import Prepared
from harness.observe import Observed
from harness.operators import is_real
from harness.replay import Plan, Point, replay

MANY = 40  # roundings beyond which only single ones, and all points together, are tried


Roundings = tuple[frozenset[str], frozenset[str]]  # elided points, added roundings
NONE: frozenset[str] = frozenset()


@dataclass
class Sample:
    """A case kept for the explanation of a difference."""

    reference: nn.Module
    prepared: Prepared
    seen: Observed


@dataclass(frozen=True)
class Explanation:
    """What the candidate does otherwise than its contract says; points by role."""

    elided: tuple[Point, ...]
    kept: tuple[Point, ...]  # though the contract elides them
    added: tuple[Point, ...]

    def text(self) -> str:
        parts = []
        if self.elided:
            parts.append(f"rounds once where the reference rounds at {_list(self.elided)}")
        if self.kept:
            parts.append(f"rounds at {_list(self.kept)}, which its contract elides")
        if self.added:
            parts.append(f"rounds to BF16 at {_list(self.added)}, where the reference keeps FP32")
        return "; ".join(parts)


def _list(points: tuple[Point, ...]) -> str:
    return " and at ".join(f"`{p.name}` ({p.source})" for p in points)


def explain(samples: list[Sample], declared: Plan) -> Explanation | None:
    """Search for the roundings that explain the candidate; None if none does.

    From the declared set and from all interior points elided at once, single points are flipped
    while that makes more elements equal. It is an explanation if at most half as many elements
    differ as from the contract's replay.
    """
    points = {p.name: p for s in samples for p in s.prepared.first.points if p.interior}
    wides = {p.name: p for s in samples for p in s.prepared.first.wides}
    known: dict[Roundings, int] = {}

    def missed(elide: frozenset[str], add: frozenset[str]) -> int:
        key = elide, add
        if key not in known:
            plan = Plan(elide=elide, add=add)
            known[key] = sum(_differing(sample, plan) for sample in samples)
        return known[key]

    start = declared.elide, declared.add
    best = min((start, (frozenset(points), declared.add)), key=lambda s: missed(*s))
    best = _descend(best, [(frozenset((n,)), NONE) for n in points], missed)
    if known[best] > known[start] / 2:
        flips = [(frozenset((n,)), NONE) for n in points] + [(NONE, frozenset((n,))) for n in wides]
        best = _descend(min((best, start), key=lambda s: missed(*s)), flips, missed)
    if best == start or known[best] > known[start] / 2:
        return None
    return Explanation(
        elided=tuple(points[n] for n in points if n in best[0] - declared.elide),
        kept=tuple(points[n] for n in points if n in declared.elide - best[0]),
        added=tuple(wides[n] for n in wides if n in best[1] - declared.add),
    )


def _descend(best: Roundings, flips: list[Roundings], missed: Callable[..., int]) -> Roundings:
    """Flip one rounding after the other, always the one that helps most."""
    while flips:
        tried = [(best[0] ^ elide, best[1] ^ add) for elide, add in flips]
        nearest = min(tried, key=lambda s: missed(*s))
        if missed(*nearest) >= missed(*best):
            break
        best = nearest
        if len(flips) > MANY:
            break
    return best


def _differing(sample: Sample, plan: Plan) -> int:
    prepared = sample.prepared
    case = prepared.case
    run = replay(sample.reference, case.args, plan, prepared.first, case.kwargs)
    count = 0
    for name, ours in run.results.items():
        if is_real(ours.dtype) and ours.numel():
            mine = sample.seen.results.get(name, sample.seen.arguments.get(name))
            assert mine is not None
            wrong = mine != ours
            mask = prepared.masks.get(name)
            count += int((wrong if mask is None else wrong & mask).sum())
    return count
