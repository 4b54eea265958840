"""The exact bounds against values from tables, and what they mean for a candidate."""

import math
import random

import pytest
import torch

from harness.bounds import (
    FALSE_ALARM,
    CaseNoise,
    Limit,
    Path,
    allowed,
    beta_cdf,
    binomial_limit,
    extreme_factor,
    limits,
    spread,
    upper_rate,
)
from harness.compare import SelfNoise, Tally
from harness.examine import Examination
from harness.region import RegionCases
from harness.verdicts import distance_limit, far_limit, output_report, path_words
from harness.workload import Workload
from optimized.change import Contract

# The paths of many tokens and of few: the operators that round on each.
MANY: Path = frozenset({("", "mm", "x.py:1"), ("", "add", "x.py:3")})
FEW: Path = frozenset({("", "bmm", "x.py:2"), ("", "add", "x.py:3")})


def binomial_tail(n: int, p: float, k: int) -> float:
    """P(X > k), summed."""
    return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1, n + 1))


@pytest.mark.parametrize(
    ("differing", "elements", "level", "expected"),
    [(0, 1000, 0.05, 1 - 0.05**0.001), (5, 1000, 0.025, 0.0116294), (3, 10, 0.025, 0.652453)],
)
def test_clopper_pearson(differing: int, elements: int, level: float, expected: float) -> None:
    assert math.isclose(upper_rate(differing, elements, level), expected, rel_tol=1e-5)


def test_nothing_seen_follows_the_rule_of_three() -> None:
    assert math.isclose(upper_rate(0, 10**6, 0.05), 3e-6, rel_tol=0.01)
    assert upper_rate(7, 7) == 1.0


def test_binomial_limit_is_the_quantile() -> None:
    limit = int(binomial_limit(50, 0.1, 0.01))
    assert binomial_tail(50, 0.1, limit) < 0.01 <= binomial_tail(50, 0.1, limit - 1)
    assert math.isclose(beta_cdf(0.1, limit + 1, 50 - limit), binomial_tail(50, 0.1, limit))


def test_allowance_is_sharp_and_never_zero() -> None:
    quiet = allowed([CaseNoise(10_000, [0] * 64)], 100_000)
    assert 1 <= quiet < 20  # an elided rounding changes 30 000 of them
    noisy = allowed([CaseNoise(10_000, [1] * 64)], 100_000)
    assert 10 < noisy < 60
    assert allowed([CaseNoise(10_000, [0] * 64)], 0) == 0


def test_cases_weigh_by_their_elements_not_by_their_replays() -> None:
    often, seldom = CaseNoise(10_000, [0] * 60), CaseNoise(10_000, [100] * 4)
    assert 100 < allowed([often, seldom], 20_000) < 300


def test_clusters_widen_the_bound() -> None:
    clustered = [CaseNoise(10_000, [64] + [0] * 63)]
    even = [CaseNoise(10_000, [1] * 64)]
    assert spread(even) == 1.0
    assert spread(clustered) > 30
    assert spread([CaseNoise(10_000, [0] * 8), CaseNoise(10_000, [900] * 8)]) == 1.0
    assert allowed(clustered, 10_000) > allowed(even, 10_000)


def test_the_noisier_kind_of_replays_counts() -> None:
    """A kernel is like one layout of the library's product, not like the mean of two."""
    half = [CaseNoise(10**6, [1400, 2800] * 4, [0, 1] * 4)] * 4
    mean = [CaseNoise(10**6, [2100] * 8)] * 4
    assert spread(half) == 1.0  # what sets kinds apart is no clustering
    most = allowed([CaseNoise(10**6, [2800] * 4)] * 4, 4 * 10**6)
    assert allowed(half, 4 * 10**6) == most
    assert 1.25 < most / allowed(mean, 4 * 10**6) < 1.4
    # A case without replays of a kind says nothing about it.
    alone = CaseNoise(10**6, [0] * 4, [0] * 4)
    assert allowed([*half, alone], 4 * 10**6) >= most


def test_clusters_are_told_from_what_sets_kinds_apart() -> None:
    """Kinds of which one is twice as noisy, in cases that have other numbers of each; and the same
    in clusters of 20 elements, where a replay's count leaves its mean by sqrt(20) times as much."""
    rates = (1000, 1000, 2000)
    drawn = random.Random(0)

    def case(scale: int, kinds: list[int], cluster: int) -> CaseNoise:
        means = [rates[kind] * scale for kind in kinds]
        counts = [round(drawn.gauss(m, math.sqrt(m * cluster))) for m in means]
        return CaseNoise(10**7, counts, kinds)

    def cases(cluster: int) -> list[CaseNoise]:
        order = [0, 1, 2, 0, 1]
        return [case(1 + i % 5, order[i % 3 :] + order[: i % 3], cluster) for i in range(60)]

    assert 0.8 < spread(cases(1)) < 1.3
    assert 15 < spread(cases(20)) < 26


def quiet_decodes(count: int = 8) -> dict[str, CaseNoise]:
    """Prefills are noisy; decodes compute otherwise and are not."""
    noise = {f"prefill {i}": CaseNoise(30_000, [150] * 6, path=MANY) for i in range(8)}
    return noise | {f"decode {i}": CaseNoise(1_000, [0] * 6, path=FEW) for i in range(count)}


def sizes_of(noise: dict[str, CaseNoise]) -> dict[str, int]:
    return {case: one.size for case, one in noise.items()}


def test_each_path_has_a_limit_of_its_own() -> None:
    noise = quiet_decodes()
    whole, *paths = limits(noise, sizes_of(noise))
    assert (whole.elements, whole.cases, whole.path) == (248_000, frozenset(noise), None)
    assert [(path.elements, path.path) for path in paths] == [(240_000, MANY), (8_000, FEW)]
    assert paths[1].cases == {f"decode {i}" for i in range(8)}
    assert whole.allowed > 1300 and paths[1].allowed < 20
    # All together refuse a correct output no more often than one limit does.
    prefills = [noise[f"prefill {i}"] for i in range(8)]
    assert paths[0].allowed == allowed(prefills, 240_000, 1.0, FALSE_ALARM / 3)
    (alone,) = limits({"decode 0": noise["decode 0"]}, {"decode 0": 1_000})
    assert alone.allowed == allowed([noise["decode 0"]], 1_000)


def test_elements_of_a_path_cluster_as_those_of_all_do() -> None:
    """Three quiet replays of a few rows hardly show that a flip moves a whole row. Which path comes
    first makes no difference, and one that clusters less than all has no larger spread than all."""
    noise = {f"prefill {i}": CaseNoise(30_000, [0, 256, 0, 0], path=MANY) for i in range(8)}
    noise["decode"] = CaseNoise(768, [0, 0, 0], path=FEW)
    sizes = sizes_of(noise)
    found = limits(noise, sizes)
    assert [limit.elements for limit in found] == [240_768, 240_000, 768]
    assert found[2].allowed >= 256
    turned = limits(noise, dict(reversed(sizes.items())))
    assert [limit.allowed for limit in turned] == [found[i].allowed for i in (0, 2, 1)]


def test_calls_without_noise_of_their_own_have_that_of_all() -> None:
    """A step too large to be replayed, and layers' later calls: on no path, within the whole."""
    noise = quiet_decodes(count=0)
    (whole,) = limits(noise, {"a large step": 10**6})
    assert whole.allowed == allowed(list(noise.values()), 10**6) < 6000
    (both,) = limits(noise, sizes_of(noise) | {"a later decode": 10_000})
    assert both.elements == 250_000 and both.path is None


def test_a_part_of_the_cases_has_no_larger_limit_than_all() -> None:
    """So that what ends an examination early is refused in the end."""
    noise = {f"case {i}": CaseNoise(10**5, [1] * 4, [0, 1, 0, 1]) for i in range(20)}
    noise["edge"] = CaseNoise(10**5, [0, 400, 0, 0], [1, 0, 1, 0])
    sizes = sizes_of(noise)
    part = {"edge": sizes["edge"], "case 0": sizes["case 0"]}
    assert limits(noise, part)[0].allowed <= limits(noise, sizes)[0].allowed


def test_kinds_are_set_apart_on_each_path_by_itself() -> None:
    """On one path a kind is twice as noisy, on the other it makes no difference."""
    noise = {f"a{i}": CaseNoise(10**6, [1400, 2800] * 4, [0, 1] * 4, path=MANY) for i in range(4)}
    noise |= {f"b{i}": CaseNoise(10**6, [2100] * 8, [0, 1] * 4, path=FEW) for i in range(4)}
    assert spread(list(noise.values())) == 1.0
    found = limits(noise, sizes_of(noise))
    assert 8_400 < found[2].allowed < 9_200  # of the path where all are alike


def test_kinds_that_show_nothing_say_nothing_of_clusters() -> None:
    drawn = random.Random(1)
    loud = [[20 * drawn.randint(0, 10) for _ in range(6)] for _ in range(30)]
    mixed = [
        CaseNoise(10**6, [n for count in row for n in (0, 0, count)], [0, 1, 2] * 6) for row in loud
    ]
    alone = [CaseNoise(10**6, row, [2] * 6) for row in loud]
    assert spread(mixed) == spread(alone) > 10


def test_a_path_is_named_by_what_sets_it_apart() -> None:
    one, two, three = (("", operator, "x.py:1") for operator in ("add", "mul", "mm"))
    paths = [frozenset({one, two}), frozenset({one}), frozenset({one, two, three})]
    named = [Limit(frozenset({str(i)}), 1, 0, path) for i, path in enumerate(paths)]
    assert [path_words(limit, named) for limit in named] == [
        "lack mm at x.py:1",
        "lack mm at x.py:1",
        "go through mm at x.py:1",
    ]
    sums = [Limit(frozenset({str(i)}), 1, 0, frozenset(p)) for i, p in enumerate(([one], [two]))]
    both = Limit(frozenset({"2"}), 1, 0, frozenset({one, two}))
    assert path_words(both, [*sums, both]) == "go through all that the others do"


def test_what_differs_on_a_quiet_path_alone_is_refused() -> None:
    exam = Examination(Contract(numerics="reduction"), set(), 0)
    replay = torch.ones(100, 300)
    tally = exam.tally("out")
    for case, path, moved in (("prefill", MANY, 150), ("decode", FEW, 0)):
        noisy = replay.clone()
        noisy.flatten()[:moved] *= 1 + 2**-20
        for _ in range(64):
            tally.add_noise(case, noisy, replay, None, path=path)
    honest, wrong = replay.clone(), replay.clone()
    honest.flatten()[:160] *= 1 + 2**-20
    wrong.flatten()[:40] *= 1 + 2**-20
    tally.add("prefill", honest, replay, None)
    tally.add("decode", replay.clone(), replay, None)
    output_report(exam, tally)
    assert exam.faults.reason is None
    tally.add("decode", wrong, replay, None)
    report = output_report(exam, tally)
    assert report.allowed_share * report.elements > 200  # of all cases: enough for both
    reason = exam.faults.reason
    assert reason is not None and "in the 1 of 2 cases that go through bmm at x.py:2, " in reason
    assert reason.endswith("most in decode: 0.00067")


def test_a_known_spread_widens_the_bound_of_few_replays() -> None:
    few = [CaseNoise(10_000, [100] * 4)]
    assert allowed(few, 10_000, 20.0) > allowed(few, 10_000) == allowed(few, 10_000, 0.5)


def test_extremes_grow_slowly() -> None:
    assert 1.0 < extreme_factor(10**5, 64 * 10**5) < 2.0
    assert extreme_factor(10, 1) == math.inf
    assert FALSE_ALARM < 1e-3


def test_a_flipped_interior_rounding_may_be_magnified() -> None:
    """No noise seen: one ULP, and twice what eliding a kept rounding shows."""
    tally = Tally("q", "reduction", SelfNoise({"case": CaseNoise(1000, [0] * 4)}))
    assert distance_limit(tally, "case", 1000) == 1.0
    replay, unit = torch.tensor([[9.0, 1.0]]).bfloat16(), 2.0**-4  # of 9.0
    other = replay.float() + torch.tensor([[0.7 * unit, 3 * unit]])
    tally.add_elided(other, replay, torch.tensor([[True, False]]))
    assert math.isclose(distance_limit(tally, "case", 1000), 1.0 + 2 * 0.7, rel_tol=1e-5)


def test_the_largest_distance_is_taken_on_as_an_exponentials() -> None:
    """1.2 ULPs the most of a million draws: 2.5 in a layer's ten thousand elements are noise."""
    noise = CaseNoise(10_000, [100] * 100, worst=1.2)
    tally = Tally("out[0]", "reduction", SelfNoise({"case": noise}))
    expected = 1 + 1.2 * math.log(10_000 / FALSE_ALARM) / math.log(10**6)
    assert math.isclose(distance_limit(tally, "case", 10_000), expected)
    assert 2.5 < expected < 3


def test_in_a_few_replays_only_what_moved_tells_how_far() -> None:
    """Four replays of a derived case in which 24 of 113,664 draws moved, one ULP at most: of 6
    elements 3 ULPs off are noise; 8 moved are the fewest that tell anything."""
    noise = CaseNoise(28_416, [6, 5, 9, 4], worst=1.0, typical=False)
    tally = Tally("out", "reduction", SelfNoise({"edge": noise}))
    expected = 1 + math.log(6 / FALSE_ALARM) / math.log(24)
    assert math.isclose(distance_limit(tally, "edge", 28_416), expected)
    noise.counts[:] = [1, 0, 0, 0]
    assert math.isclose(
        distance_limit(tally, "edge", 28_416), 1 + math.log(2 / FALSE_ALARM) / math.log(8)
    )


def test_rows_far_off_are_counted_against_those_of_noise() -> None:
    """Ten of 1000 rows moved by one ULP where no replay moved any: noise explains five."""
    replay = torch.ones(1000, 64).bfloat16()
    tally = Tally("out", "reduction")
    for _ in range(32):
        tally.add_noise("case", replay.clone(), replay, None)
    candidate = replay.clone()
    candidate[:10, 3] += 2.0**-7
    tally.add("case", candidate, replay, None)
    assert (tally.far[0.75], tally.far[1.5], tally.rows) == (10, 0, 1000)
    assert far_limit(tally, 0.75) == far_limit(tally, 1.5) == 5
    moved = replay.clone()
    moved[:40, 5] += 2.0**-7
    for _ in range(8):
        tally.add_noise("case", moved, replay, None)
    assert far_limit(tally, 1.5) == 5 < 10 < far_limit(tally, 0.75)


@pytest.mark.slow
def test_roundings_before_a_factor_are_magnified_in_a_models_region() -> None:
    """Queries of Muse Spark are multiplied by 5.5 after a rounding, keys are not."""
    work = Workload.load("muse-spark", "mini", "cpu")
    contract = Contract(numerics="reduction")
    cases = RegionCases.prepare(work.model, "qk_unit_norm", contract, work, 0)
    list(cases.nodes())
    elided = {n: t.self_noise.elided for n, t in cases.measured.tallies.items()}
    assert 0.5 < elided["q"] < 2
    assert elided["v_cache"] == 0
