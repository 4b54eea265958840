"""Distances between tensors in units of the last place, pooled over cases."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.bounds import CaseNoise, Path
from harness.operators import is_real
from harness.trees import bits, same_bits

BUCKETS = {"0": (0, 0), "1": (1, 1), "2": (2, 2), "3-4": (3, 4), "5-8": (5, 8)}
BEYOND = ">8"
FAR = 0.75, 1.5  # ULPs of a row's largest: rows with an element further off are counted


def far_rows(apart: Tensor) -> list[Tensor]:
    """In how many rows the largest of some scaled distances is beyond each of `FAR`."""
    most = apart.amax(-1) if apart.ndim else apart
    return [(most > ulps).sum() for ulps in FAR]


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """How many representable values lie between a and b, int64; -0 and +0 are 0 apart."""
    if not is_real(a.dtype):
        return (a.long() - b.long()).abs()
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if a.dtype.itemsize == 1:
        a, b = a.bfloat16(), b.bfloat16()  # holds every FP8 value
    return (_ordered(a) - _ordered(b)).abs()


def _ordered(x: Tensor) -> Tensor:
    pattern = bits(x)
    lowest = torch.iinfo(pattern.dtype).min
    pattern = pattern.long()
    return torch.where(pattern < 0, lowest - pattern, pattern)


def differs(a: Tensor, b: Tensor, numerics: str) -> Tensor:
    """Where a and b differ: in any bit, save a zero's sign in the result of a reduction."""
    if numerics == "reduction":
        return (a != b) & ~(a.isnan() & b.isnan()) if is_real(a.dtype) else a != b
    return bits(a) != bits(b)


def scaled(a: Tensor, b: Tensor) -> Tensor:
    """|a - b| in ULPs (of their dtype) at the row's largest |b|; rows run along the last dim."""
    if not is_real(a.dtype):
        return (a != b).double()
    eps = torch.finfo(b.dtype).eps
    precision = torch.float64 if b.dtype.itemsize > 2 else torch.float32  # exact for both
    wide = b.to(precision)
    largest = wide.abs().amax(-1, keepdim=True) if b.ndim and b.numel() else wide.abs()
    exponent = torch.frexp(largest.clamp_min(torch.finfo(b.dtype).tiny)).exponent - 1
    unit = torch.ldexp(torch.full_like(largest, eps), exponent)
    return (a.to(precision) - wide).abs() / unit.clamp_min(torch.finfo(precision).tiny)


@dataclass
class SelfNoise:
    """What the noise replays of one output showed, by case; it depends on no candidate, so all
    that are judged on the same cases share it."""

    cases: dict[str, CaseNoise] = field(default_factory=dict)
    peak: float = 0.0  # largest |perturbed - replay|
    square: float = 0.0  # largest mean square of that in one replay
    elided: float = 0.0  # largest scaled distance of a typical case's replay from that without one
    # of the interior roundings that the contract keeps
    spread: float = 1.0  # known from other cases, see `bounds.spread`

    @property
    def draws(self) -> int:
        return sum(n.draws for n in self.cases.values())

    @property
    def count(self) -> int:
        return sum(sum(n.counts) for n in self.cases.values())


@dataclass
class Tally:
    """One output of a candidate against the contract's replay."""

    output: str
    numerics: str
    self_noise: SelfNoise = field(default_factory=SelfNoise)
    elements: int = 0
    differing: int = 0
    equal: int = 0
    one: int = 0
    histogram: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*BUCKETS, BEYOND), 0))
    worst: float = 0.0
    worst_index: tuple[int, ...] | None = None
    worst_values: tuple[float, float] | None = None
    worst_case: str | None = None
    candidate_error: float = 0.0  # sums of squares
    replay_error: float = 0.0
    golden_norm: float = 0.0
    distances: dict[str, tuple[float, int]] = field(default_factory=dict)  # worst, of how many
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)  # differing, of how many
    rows: int = 0
    far: dict[float, int] = field(default_factory=lambda: dict.fromkeys(FAR, 0))  # rows beyond
    quantum: float = 0.0  # one unit in the last place of the largest result
    golden_elements: int = 0

    @property
    def noise(self) -> dict[str, CaseNoise]:
        return self.self_noise.cases

    def add(self, case: str, candidate: Tensor, replay: Tensor, keep: Tensor | None) -> int:
        """Pool one case, all elements or those of `keep`; returns how many differ."""
        if candidate.numel() == 0:
            return 0
        self.rows += candidate.numel() // (candidate.shape[-1] if candidate.ndim else 1)
        if same_bits(candidate, replay):  # most are, and this is one comparison of many
            kept = candidate.numel() if keep is None else int(keep.expand_as(candidate).sum())
            self._pool(case, 0, kept, [kept, *[0] * len(BUCKETS)], 0.0)
            return 0
        distance = ulp_distance(candidate, replay)
        wrong = differs(candidate, replay, self.numerics)
        apart = scaled(candidate, replay)
        if keep is not None:
            keep = keep.expand_as(wrong)
            distance = distance.masked_fill(~keep, 0)
            wrong, apart = wrong & keep, apart.masked_fill(~keep, 0.0)
        edges = torch.tensor([0, 1, 2, 4, 8], device=distance.device)
        bucket = torch.searchsorted(edges, distance.flatten())
        found = torch.bincount(bucket, minlength=6)
        place = apart.flatten().argmax()
        sums = wrong.sum(), keep.sum() if keep is not None else place, place
        facts = torch.stack((*sums, *far_rows(apart)))
        (differing, kept, worst_place, *far), counts = facts.tolist(), found.tolist()
        for ulps, rows in zip(FAR, far, strict=True):
            self.far[ulps] += rows
        if keep is None:
            kept = candidate.numel()
        else:
            counts[0] -= candidate.numel() - kept  # what is not kept was set to distance 0
        top = float(apart.flatten()[worst_place])
        self._pool(case, differing, kept, counts, top)
        if top > self.worst:
            self.worst, self.worst_case = top, case
            at = torch.unravel_index(torch.tensor(worst_place), candidate.shape)
            self.worst_index = tuple(int(i) for i in at)
            values = candidate.flatten()[worst_place], replay.flatten()[worst_place]
            self.worst_values = float(values[0]), float(values[1])
        return differing

    def _pool(self, case: str, differing: int, kept: int, counts: list[int], top: float) -> None:
        self.elements += kept
        self.differing += differing
        self.equal += kept - differing
        self.one += counts[1]
        for key, count in zip((*BUCKETS, BEYOND), counts, strict=True):
            self.histogram[key] += count
        self.distances[case] = top, kept
        before = self.counts.get(case, (0, 0))
        self.counts[case] = before[0] + differing, before[1] + kept

    def add_noise(
        self,
        case: str,
        perturbed: Tensor,
        replay: Tensor,
        keep: Tensor | None,
        *,
        typical: bool = True,
        kind: int = 0,
        path: Path = frozenset(),
    ) -> None:
        """Pool one noise replay of a case against the unperturbed one; its kind and the case's path
        as in `bounds`."""
        if perturbed.numel() == 0 or not is_real(perturbed.dtype):
            return
        size = perturbed.numel() if keep is None else int(keep.expand_as(perturbed).sum())
        rows = perturbed.numel() // (perturbed.shape[-1] if perturbed.ndim else 1)
        noise = self.noise.setdefault(case, CaseNoise(size, typical=typical, rows=rows, path=path))
        noise.kinds.append(kind)
        if same_bits(perturbed, replay):
            noise.counts.append(0)
            for ulps in FAR:
                noise.far.setdefault(ulps, []).append(0)
            return
        wrong, apart = differs(perturbed, replay, self.numerics), scaled(perturbed, replay)
        moved = (perturbed.to(apart.dtype) - replay).nan_to_num(0.0, 0.0, 0.0)
        if keep is not None:
            keep = keep.expand_as(wrong)
            wrong, apart, moved = wrong & keep, apart.masked_fill(~keep, 0.0), moved * keep
        facts = wrong.sum(), apart.max(), moved.abs().max(), moved.square().mean()
        told = torch.stack([f.double() for f in (*facts, *far_rows(apart))]).tolist()
        count, top, peak, square, *far = told
        noise.counts.append(int(count))
        for ulps, found in zip(FAR, far, strict=True):
            noise.far.setdefault(ulps, []).append(int(found))
        noise.worst = max(noise.worst, top)
        self.self_noise.peak = max(self.self_noise.peak, peak)
        self.self_noise.square = max(self.self_noise.square, square)

    def add_elided(self, other: Tensor, replay: Tensor, keep: Tensor | None) -> None:
        """Pool one replay that lacks an interior rounding which the contract keeps."""
        if other.numel() == 0 or same_bits(other, replay):
            return
        apart = scaled(other, replay).nan_to_num(0.0, 0.0, 0.0)
        if keep is not None:
            apart = apart.masked_fill(~keep.expand_as(apart), 0.0)
        self.self_noise.elided = max(self.self_noise.elided, float(apart.max()))

    def add_golden(self, candidate: Tensor, replay: Tensor, golden: Tensor) -> None:
        """Pool one case's distances from the FP64 result."""
        if candidate.numel() == 0 or not is_real(candidate.dtype):
            return
        errors = [(x.double() - golden).square().sum() for x in (candidate, replay)]
        largest = replay.double().abs().max()
        mine, theirs, norm, top = torch.stack(
            (*errors, golden.double().square().sum(), largest)
        ).tolist()
        if all(math.isfinite(x) for x in (mine, theirs, norm)):
            self.candidate_error += mine
            self.replay_error += theirs
            self.golden_norm += norm
            self.golden_elements += candidate.numel()
            exponent = math.frexp(top)[1] - 1
            eps = torch.finfo(replay.dtype).eps
            self.quantum = max(self.quantum, math.ldexp(eps, exponent))
