"""Which roundings a candidate really does: the set whose replay it equals most."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from harness.examine import Prepared
from harness.observe import Observed
from harness.operators import is_real
from harness.replay import Plan, Point, Run, replay

MANY = 40  # roundings beyond which only single ones, and all points together, are tried

# Elided points, added roundings, sums computed as fused multiply-adds.
Roundings = tuple[frozenset[str], frozenset[str], frozenset[str]]
NONE: frozenset[str] = frozenset()


@dataclass
class Sample:
    """A case kept for the explanation of a difference."""

    reference: nn.Module
    prepared: Prepared
    seen: Observed


@dataclass(frozen=True)
class Explanation:
    """What the candidate does otherwise than its contract says; points by role. `share` is how many
    of the samples' elements the two replays disagree in."""

    elided: tuple[Point, ...]
    kept: tuple[Point, ...]  # though the contract elides them
    wider: tuple[Point, ...]  # uses that the contract elides; elided everywhere
    added: tuple[Point, ...]
    fused: tuple[Point, ...]
    share: float

    def text(self) -> str:
        parts = []
        if self.elided:
            parts.append(f"rounds once where the reference rounds at {listed(self.elided)}")
        if self.kept:
            parts.append(f"rounds at {listed(self.kept)}, which its contract elides")
        if self.wider:
            parts.append(f"elides everywhere what its contract elides only at {listed(self.wider)}")
        if self.added:
            parts.append(f"rounds to BF16 at {listed(self.added)}, where the reference keeps FP32")
        if self.fused:
            parts.append(
                f"contracts a product and a sum into {listed(self.fused)}, "
                "where the reference rounds the product"
            )
        return f"{'; '.join(parts)}; {percent(self.share)} of the elements show it"


def percent(share: float) -> str:
    return f"{share:.3%}" if share >= 1e-3 else f"{share:.2g}"


def listed(points: tuple[Point, ...]) -> str:
    """`a` (file:line), `b` (file:line) and at `c` (file:line)"""
    names = [f"`{p.name}` ({p.source})" for p in points]
    return " and at ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]


def explain(samples: list[Sample], declared: Plan) -> Explanation | None:
    """Search for the roundings that explain the candidate; None if none does.

    From the declared set, and from all interior points elided at once (members of a set may show
    in company only), single points are flipped while that makes more elements equal; what changes
    nothing is then taken back. Single uses of points follow, where they halve what differs. It is
    an explanation if at most half as many elements differ as from the contract's replay.
    """
    points = {p.name: p for s in samples for p in s.prepared.first.points if p.interior}
    uses = {u.name: (p.name, u) for p in points.values() for u in p.uses}
    wides = {p.name: p for s in samples for p in s.prepared.first.wides}
    sums = {p.name: p for s in samples for p in s.prepared.first.fusable}
    known: dict[Roundings, int] = {}

    def missed(*key: frozenset[str]) -> int:
        elide, add, fuse = key
        if (elide, add, fuse) not in known:
            plan = Plan(elide=elide, add=add, fuse=fuse)
            known[elide, add, fuse] = sum(_differing(sample, plan) for sample in samples)
        return known[elide, add, fuse]

    start = declared.elide, declared.add, declared.fuse
    every = frozenset(points), declared.add, declared.fuse
    elisions: list[Roundings] = [(frozenset((n,)), NONE, NONE) for n in points]
    ends = [_descend(begin, elisions, missed) for begin in dict.fromkeys((start, every))]
    best = min(ends, key=lambda s: (missed(*s), len(s[0] ^ start[0])))
    if known[best] > missed(*start) / 2:
        flips = [(NONE, NONE, frozenset((n,))) for n in sums]
        flips += [*elisions, *((NONE, frozenset((n,)), NONE) for n in wides)]
        best = _descend(min((best, start), key=lambda s: missed(*s)), flips, missed)
    refined = _descend(best, _of_uses(uses), missed)
    best = refined if known[refined] < known[best] / 2 else best
    best = _least(best, start, missed)
    if best == start or known[best] > known[start] / 2:
        return None
    everywhere = points | {name: use for name, (_, use) in uses.items()}
    return Explanation(
        elided=tuple(p for n, p in everywhere.items() if n in best[0] - start[0]),
        kept=tuple(
            point
            for name, point in everywhere.items()
            if name in start[0] - best[0] and uses.get(name, (None,))[0] not in best[0]
        ),
        wider=tuple(
            use for n, (p, use) in uses.items() if n in start[0] and p in best[0] - start[0]
        ),
        added=tuple(wides[n] for n in wides if n in best[1] - start[1]),
        fused=tuple(sums[n] for n in sums if n in best[2] - start[2]),
        share=_share(samples, start, best),
    )


def _descend(best: Roundings, flips: list[Roundings], missed: Callable[..., int]) -> Roundings:
    """Flip one rounding after the other, always the one that helps most."""
    while flips:
        tried: list[Roundings] = [_flipped(best, flip) for flip in flips]
        nearest = min(tried, key=lambda s: missed(*s))
        if missed(*nearest) >= missed(*best):
            break
        best = nearest
        if len(flips) > MANY:
            break
    return best


def _of_uses(uses: dict[str, tuple[str, Point]]) -> list[Roundings]:
    """Each use flipped, and with it the point itself."""
    found: list[Roundings] = []
    for name, (point, _) in uses.items():
        found += [(frozenset((name,)), NONE, NONE), (frozenset((name, point)), NONE, NONE)]
    return found


def _flipped(a: Roundings, b: Roundings) -> Roundings:
    return a[0] ^ b[0], a[1] ^ b[1], a[2] ^ b[2]


def _least(best: Roundings, start: Roundings, missed: Callable[..., int]) -> Roundings:
    """Without the departures from `start` that explain nothing."""
    for place in range(len(best)):
        for name in sorted(best[place] ^ start[place]):
            parts = [frozenset((name,)) if i == place else NONE for i in range(len(best))]
            without = _flipped(best, (parts[0], parts[1], parts[2]))
            if missed(*without) <= missed(*best):
                best = without
    return best


def _replayed(sample: Sample, plan: Plan) -> Run:
    case = sample.prepared.case
    return replay(sample.reference, case.args, plan, sample.prepared.first, case.kwargs)


def _counted(sample: Sample, name: str, wrong: Tensor) -> int:
    """How many of an output's elements are `wrong`, of those that count."""
    mask = sample.prepared.masks.get(name)
    return int((wrong if mask is None else wrong & mask).sum())


def _differing(sample: Sample, plan: Plan) -> int:
    count = 0
    for name, ours in _replayed(sample, plan).results.items():
        if is_real(ours.dtype) and ours.numel():
            mine = sample.seen.results.get(name, sample.seen.arguments.get(name))
            assert mine is not None
            count += _counted(sample, name, mine != ours)
    return count


def _share(samples: list[Sample], start: Roundings, best: Roundings) -> float:
    """The share of elements in which the replays of two sets of roundings differ."""
    apart, elements = 0, 0
    for sample in samples:
        ours, others = (
            _replayed(sample, Plan(elide=elide, add=add, fuse=fuse)).results
            for elide, add, fuse in (start, best)
        )
        for name, a in ours.items():
            if is_real(a.dtype) and a.numel():
                differs = a != others[name]
                apart += _counted(sample, name, differs)
                elements += _counted(sample, name, differs | True)
    return apart / elements if elements else 0.0
