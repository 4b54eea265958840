"""The findings of a check: no false alarm on a real scatter, and what is planted is found."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.records import Latency, Paired
from harness.stats import abba_differences, detectable, median, median_interval, null_effect
from reports.regression import (
    Outcome,
    Snapshot,
    bits,
    compare,
    interleaved,
    latency,
    measured,
    student,
)
from reports.run import Run
from tests.reports.test_pictures import EVIDENCE

# Times in us of a decode step of tests/agents/toy_model.py in three processes of one commit, as
# `rigs.in_turns` took them in six rounds, beside seven other processes on two cores (2026-11-30).
SCATTER = Path(__file__).parent / "scatter.json"
COMPARISONS = 100
SLOWDOWN = 0.03
REDRAWN = 3  # times each round is redrawn: 18 rounds tell 3% on a machine as busy as that one
RUN = 4  # blocks that are drawn together, for neighbours share bursts of noise


@pytest.fixture(scope="module")
def scatter() -> dict[str, list[np.ndarray]]:
    found = json.loads(SCATTER.read_text())
    return {name: [np.array(times) for times in rounds] for name, rounds in found.items()}


def drawn(rounds: list[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
    """As many blocks again, redrawn in runs; which of the two was the baseline is redrawn, too."""
    found = []
    for times in rounds:
        starts = rng.integers(len(times) - RUN + 1, size=-(-len(times) // RUN))
        again = np.concatenate([times[s : s + RUN] for s in starts])[: len(times)]
        found.append(again[:, [1, 0, 3, 2]] if rng.random() < 0.5 else again)
    return found


def outcomes(scatter: dict[str, list[np.ndarray]], slower: float) -> list[Outcome]:
    found = []
    for seed in range(COMPARISONS):
        rng = np.random.default_rng(seed)
        pairs, twins = (drawn(scatter[name] * REDRAWN, rng) for name in ("pairs", "twins"))
        for times in pairs:
            times[:, 1:3] *= 1 + slower
        found.append(measured("decode", interleaved(pairs, twins), len(pairs)).outcome)
    return found


def test_a_hundred_comparisons_of_a_commit_with_itself_raise_no_alarm(
    scatter: dict[str, list[np.ndarray]],
) -> None:
    assert outcomes(scatter, 0.0) == [Outcome.SAME] * COMPARISONS


def test_a_slowdown_of_three_percent_is_found_every_time(
    scatter: dict[str, list[np.ndarray]],
) -> None:
    assert outcomes(scatter, SLOWDOWN) == [Outcome.SLOWER] * COMPARISONS


def run_alone(scatter: dict[str, list[np.ndarray]], rng: np.random.Generator) -> Paired:
    """What a run of its own records at its end: one process, on a machine whose level is its own,
    with the smallest effect from its own twins, as `harness.bench` computes both."""
    level = rng.uniform(0.9, 1.1)
    (times,) = drawn([scatter["pairs"][rng.integers(len(scatter["pairs"]))] * level], rng)
    twins = [abba_differences(twin * level) for twin in drawn(scatter["twins"], rng)]
    base, candidate = times[:, [0, 3]].ravel(), times[:, 1:3].ravel()
    differences = abba_differences(times)
    gain = median(differences)
    return Paired(
        base_us=median(base),
        candidate_us=median(candidate),
        candidate_interval_us=median_interval(candidate),
        gain_us=gain,
        gain_interval_us=median_interval(differences),
        mde_us=max(detectable(twins), null_effect(differences - gain)),
        pairs=len(differences),
    )


@pytest.mark.slow
def test_a_hundred_comparisons_of_two_runs_raise_no_alarm(
    base: Snapshot, scatter: dict[str, list[np.ndarray]]
) -> None:
    """Of a run with a file or another run: nothing was interleaved, and the machine drifted."""
    found = []
    for seed in range(COMPARISONS):
        rng = np.random.default_rng(seed)
        pairs = [run_alone(scatter, rng) for _ in range(2)]
        sides = (replace(base, pairs=Latency(decode=pair, prefill=pair)) for pair in pairs)
        found.append(latency("decode", *sides).outcome)
    assert found == [Outcome.SAME] * COMPARISONS


def test_a_gain_is_no_regression(scatter: dict[str, list[np.ndarray]]) -> None:
    pairs = [times * np.array([1, 0.95, 0.95, 1]) for times in scatter["pairs"]]
    finding = measured("decode", interleaved(pairs, scatter["twins"]), len(pairs))
    assert finding.outcome is Outcome.FASTER and not finding.regression


def test_a_build_that_lies_badly_is_no_regression(scatter: dict[str, list[np.ndarray]]) -> None:
    """One process of six is slow for good, by more than 3% of them all: not its code's doing."""
    pairs = [times.copy() for times in scatter["pairs"]]
    pairs[0][:, 1:3] *= 1.3
    pair = interleaved(pairs, scatter["twins"])
    assert pair.gain_us < -SLOWDOWN * pair.base_us
    assert measured("decode", pair, len(pairs)).outcome is Outcome.SAME


@pytest.mark.parametrize(
    ("share", "degrees", "expected"),
    [(0.999, 1, 318.309), (0.999, 5, 5.893), (0.975, 11, 2.201), (0.999, 11, 4.025)],
)
def test_quantiles_of_students_t_are_those_of_the_tables(
    share: float, degrees: int, expected: float
) -> None:
    assert student(share, degrees) == pytest.approx(expected, abs=6e-4)


@pytest.fixture(scope="module")
def base() -> Snapshot:
    return replace(
        Snapshot.of(Run.load(EVIDENCE)), points={f"layers.{i}.norm": f"{i:016x}" for i in range(52)}
    )


def slowed(snapshot: Snapshot, result: float, machine: float = 1.0) -> Snapshot:
    """The result slower by a factor, and everything by another."""
    assert snapshot.pairs is not None
    pairs = {}
    for kind in ("decode", "prefill"):
        pair = getattr(snapshot.pairs, kind)
        low, high = pair.candidate_interval_us
        factor = result * machine
        pairs[kind] = replace(
            pair,
            base_us=pair.base_us * machine,
            gain_us=(pair.base_us - (pair.base_us - pair.gain_us) * result) * machine,
            candidate_us=pair.candidate_us * factor,
            candidate_interval_us=(low * factor, high * factor),
        )
    return replace(snapshot, pairs=Latency(**pairs))


def by_name(base: Snapshot, current: Snapshot, **options) -> dict[str, Outcome]:
    return {f.name: f.outcome for f in compare(base, current, **options)}


def test_the_same_run_twice_is_the_same(base: Snapshot) -> None:
    found = compare(base, Snapshot.from_json(json.loads(json.dumps(base.to_json()))))
    assert [f.outcome for f in found] == [Outcome.SAME] * 4
    assert not any(f.regression for f in found)


def test_a_slower_result_is_told_from_a_slower_machine(base: Snapshot) -> None:
    worse = by_name(base, slowed(base, 1.03))
    assert worse["latency, decode"] is worse["latency, prefill"] is Outcome.SLOWER
    assert by_name(base, slowed(base, 1 / 1.03))["latency, decode"] is Outcome.FASTER
    machine = compare(base, slowed(base, 1.0, machine=1.1))[1]
    assert machine.outcome is Outcome.SAME and "so the machine did" in machine.words
    assert by_name(base, slowed(base, 1.0001))["latency, decode"] is Outcome.SAME


def test_one_rounding_is_found_and_named(base: Snapshot) -> None:
    points = {**base.points, "layers.7.norm": "changed", "layers.8.norm": "changed"}
    finding = bits(base, replace(base, points=points))
    assert finding.outcome is Outcome.CHANGED and finding.regression
    assert "2 of 52 rounding points have other bits, first in layers.7.norm" in finding.words
    assert finding.details[0] == f"layers.7.norm: {7:016x} → changed"


def test_points_that_differ_from_run_to_run_are_left_out(base: Snapshot) -> None:
    points = {**base.points, "layers.7.norm": "changed"}
    finding = bits(base, replace(base, points=points, unstable=("layers.7.norm",)))
    assert finding.outcome is Outcome.SAME and "51 rounding points" in finding.words


def test_points_that_came_or_went_are_a_change(base: Snapshot) -> None:
    fewer = dict(list(base.points.items())[1:])
    finding = bits(base, replace(base, points={**fewer, "new": "0"}))
    assert finding.outcome is Outcome.CHANGED
    assert set(finding.details) == {"layers.0.norm: gone", "new: new"}


@pytest.mark.parametrize(
    ("field", "value", "judged"),
    [("driver", "590.1", {"bits"}), ("torch", "3.0", set()), ("sm_clock_mhz", 1200, {"bits"})],
)
def test_another_environment_is_not_compared_unless_asked(
    base: Snapshot, field: str, value: object, judged: set[str]
) -> None:
    assert base.environment is not None
    there = replace(base.environment, **{field: value})
    worse = replace(
        slowed(base, 1.5), environment=there, points={**base.points, "layers.0.norm": "changed"}
    )
    found = by_name(base, worse)
    assert found["environment"] is Outcome.CHANGED
    compared = {name for name, outcome in found.items() if outcome is not Outcome.UNKNOWN}
    assert compared == judged | {"environment"}
    asked = by_name(base, worse, across=True)
    assert (asked["bits"], asked["latency, decode"]) == (Outcome.CHANGED, Outcome.SLOWER)


def test_a_run_that_kept_nothing_has_no_times_to_compare(base: Snapshot) -> None:
    bare = replace(base, pairs=None, points={})
    found = by_name(base, bare)
    assert found["latency, decode"] is found["bits"] is Outcome.UNKNOWN
