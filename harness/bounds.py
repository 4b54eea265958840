"""How many elements may differ: exact binomial bounds on the reference's own noise.

Noise replays show `k` of `n` elements differing. The rate behind that is at most p (Clopper and
Pearson), so a correct candidate differs in more than the bound's number of its `m` elements with a
probability below `FALSE_ALARM`. No noise seen is not no noise: k = 0 still gives p = -ln(a) / n,
the rule of three for other levels than 95%.

Replays come in kinds, by how products are computed, and a candidate is of one kind: the
noisier one counts, not their mean.

Cases compute on paths: a model may multiply a few tokens in one way and many in another. Each path
has a limit of its own beside that of all cases, for one that is noisy says nothing about another.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

FALSE_ALARM = 1e-5  # policy: the chance that a correct output of a change is refused
STEPS = 200  # of bisection: more than doubles have bits
TURNS = 20  # of a fit that halves its error in a few

Path = frozenset[tuple[str, str, str]]  # module, operator and source line of each
Replays = Sequence[tuple[int, int]]  # counts and kinds


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by Lentz's continued fraction."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1.0 - beta_cdf(1.0 - x, b, a)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front += a * math.log(x) + b * math.log1p(-x)
    tiny = 1e-300
    c, d = 1.0, 1.0 - (a + b) * x / (a + 1)
    d = 1.0 / (d if abs(d) > tiny else tiny)
    total = d
    for m in range(1, 10_000):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 + numerator * d
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = 1.0 + numerator / c
            c = c if abs(c) > tiny else tiny
            total *= c * d
        if abs(c * d - 1.0) < 1e-13:
            break
    return math.exp(front) * total / a


def upper_rate(differing: float, elements: float, level: float = FALSE_ALARM) -> float:
    """The Clopper-Pearson upper bound of a rate: above it, seeing so few has a chance < `level`."""
    if elements <= 0 or differing >= elements:
        return 1.0
    low, high = differing / elements, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        if 1.0 - beta_cdf(middle, differing + 1, elements - differing) > level:
            low = middle
        else:
            high = middle
    return high


def binomial_limit(elements: float, rate: float, level: float = FALSE_ALARM) -> float:
    """The smallest count that a binomial of this rate exceeds with a chance < `level`."""
    if rate >= 1.0 or elements <= 0:
        return max(0.0, elements)
    low, high = -1, math.ceil(elements)  # P(X > high) = 0
    while high - low > 1:
        middle = (low + high) // 2
        exceeds = beta_cdf(rate, middle + 1, elements - middle) if middle < elements else 0.0
        low, high = (low, middle) if exceeds < level else (middle, high)
    return float(high)


@dataclass
class CaseNoise:
    """One case's noise replays: how many of `size` elements each changed, and the worst distance.

    `typical` cases are of one scale, so that their distances are comparable.
    """

    size: int
    counts: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)  # of the replays; all of kind 0 if empty
    worst: float = 0.0
    typical: bool = True
    rows: int = 0  # that hold the elements
    path: Path = frozenset()  # the operators that rounded in it
    far: dict[float, list[int]] = field(default_factory=dict)  # rows with one so many ULPs off

    def rows_beyond(self, ulps: float) -> "CaseNoise":
        """The same of rows in place of elements, those with one further off than `ulps`."""
        return CaseNoise(self.rows, self.far.get(ulps, []), self.kinds)

    @property
    def replays(self) -> list[tuple[int, int]]:
        """Each replay's count and kind."""
        return list(zip(self.counts, self.kinds or [0] * len(self.counts), strict=True))

    def of_kind(self, kind: int) -> "CaseNoise":
        """The same of one kind's replays alone."""
        return CaseNoise(self.size, [count for count, of in self.replays if of == kind])

    @property
    def expected(self) -> float:
        return sum(self.counts) / len(self.counts) if self.counts else 0.0

    @property
    def draws(self) -> int:
        return self.size * len(self.counts)


def spread(noise: Sequence[CaseNoise]) -> float:
    """How much more the counts of replays vary than independent elements would, given their case's
    rate and, on their path, their kind's: at least 1. Elements of a row share its norm, so they
    come in clusters; the bounds then count clusters.
    """
    paths: dict[Path, list[CaseNoise]] = {}
    for case in noise:
        paths.setdefault(case.path, []).append(case)
    found = [_dispersion(cases) for cases in paths.values()]
    freedom = sum(free for _, free in found)
    return max(1.0, sum(squares for squares, _ in found) / freedom) if freedom else 1.0


def _dispersion(noise: Sequence[CaseNoise]) -> tuple[float, int]:
    """Pearson's chi-square of the counts of one path, and its degrees of freedom. Kinds that never
    showed anything say nothing about how elements cluster."""
    loud = {kind for case in noise for count, kind in case.replays if count}
    rows = []
    for case in noise:
        row = [(count, kind) for count, kind in case.replays if kind in loud]
        mean = sum(count for count, _ in row) / max(1, len(row))
        if len(row) > 1 and 0 < mean < case.size:
            rows.append((row, mean * (1 - mean / case.size)))
    factors = _kind_factors([row for row, _ in rows])
    freedom = sum(len(row) - 1 for row, _ in rows) - max(0, len(factors) - 1)
    if freedom <= 0:
        return 0.0, 0
    squares = 0.0
    for row, variance in rows:
        base = _base(row, factors)
        squares += sum((count - base * factors[kind]) ** 2 for count, kind in row) / variance
    return squares, freedom


def _kind_factors(rows: Sequence[Replays]) -> dict[int, float]:
    """By how much each kind is noisier, where counts are their case's rate times that: the maximum
    of the likelihood, by turns."""
    found = {kind: 1.0 for row in rows for _, kind in row}
    for _ in range(TURNS if len(found) > 1 else 0):
        bases = [_base(row, found) for row in rows]
        pairs = [(n, kind, b) for row, b in zip(rows, bases, strict=True) for n, kind in row]
        for kind in found:
            own = [(n, b) for n, of, b in pairs if of == kind]
            found[kind] = sum(n for n, _ in own) / sum(b for _, b in own)
    return found


def _base(row: Replays, factors: Mapping[int, float]) -> float:
    """The rate of a case, of a kind of factor 1."""
    return sum(count for count, _ in row) / sum(factors[kind] for _, kind in row)


def allowed(
    noise: Sequence[CaseNoise], elements: int, least: float = 1.0, level: float = FALSE_ALARM
) -> int:
    """How many of a candidate's `elements` may differ, given the noise replays of its cases, whose
    spread is at `least` so large; a correct one exceeds it with a chance below `level`."""
    if elements == 0:
        return 0
    factor = max(least, spread(noise))
    kinds = {kind for case in noise for kind in case.kinds} or {0}
    rate = max(_rate([case.of_kind(kind) for case in noise], factor, level) for kind in kinds)
    limit = binomial_limit(elements / factor, rate, level / 2) * factor
    return min(elements, math.ceil(limit))


@dataclass(frozen=True)
class Limit:
    """How many of the `elements` of some `cases` may differ: of all, or of those on one `path`."""

    cases: frozenset[str]
    elements: int
    allowed: int
    path: Path | None = None


def limits(
    noise: Mapping[str, CaseNoise], sizes: Mapping[str, int], least: float = 1.0
) -> list[Limit]:
    """The limit of all cases, whose elements `sizes` counts, and where they compute on more than
    one path, of each path; together they refuse what is correct with a chance below FALSE_ALARM.

    All of `noise` counts, that of cases without a size too: a large call may have none of its own.
    A path's few replays hardly show that elements cluster, so none has a smaller spread than all.
    """
    every = list(noise.values())
    factor = max(least, spread(every))
    paths: dict[Path, set[str]] = {}
    for case, size in sizes.items():
        if size and case in noise:
            paths.setdefault(noise[case].path, set()).add(case)
    groups: list[tuple[Path | None, Iterable[str]]] = [(None, sizes)]
    groups += paths.items() if len(paths) > 1 else ()
    found = []
    for path, cases in groups:
        seen = every if path is None else [case for case in every if case.path == path]
        elements = sum(sizes[case] for case in cases)
        most = allowed(seen, elements, factor, FALSE_ALARM / len(groups))
        found.append(Limit(frozenset(cases), elements, most, path))
    return found


def _rate(noise: Sequence[CaseNoise], factor: float, level: float) -> float:
    """At most how often an element differs in replays of one kind."""
    replayed = [case for case in noise if case.counts]
    draws, size = sum(case.draws for case in replayed), sum(case.size for case in replayed)
    # Cases have different rates and numbers of replays: each weighs as the candidate's elements do.
    seen = sum(case.expected for case in replayed) / size * draws if size else 0.0
    return upper_rate(seen / factor, draws / factor, level / 2)


def extreme_factor(elements: int, draws: int) -> float:
    """By how much the largest of `elements` deviations may exceed the largest of `draws` seen.

    For normal deviations the largest of n grows as sqrt(2 ln n), so the level that a candidate
    exceeds with a chance below FALSE_ALARM is this much above what was seen.
    """
    if draws < 2:
        return math.inf
    return max(1.0, math.sqrt(math.log(max(2, elements) / FALSE_ALARM) / math.log(draws)))
