"""Medians, intervals and the A/A-calibrated smallest effect, on noise as machines make it."""

import numpy as np
import pytest

from harness.stats import abba_differences, median, median_interval, null_effect

STEP_US = 1000.0
BLOCKS = 60
COMPARISONS = 100


def white(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.normal(0, 0.05 * STEP_US, count)


def drift(rng: np.random.Generator, count: int) -> np.ndarray:
    """A card that gets warm: 30% slower over the run, on top of white noise."""
    return white(rng, count) + np.linspace(0, 0.3 * STEP_US, count)


def heavy_tails(rng: np.random.Generator, count: int) -> np.ndarray:
    """Interrupts: most samples are fine, a few take several times as long."""
    return white(rng, count) + 0.02 * STEP_US * rng.pareto(1.2, count)


def steps(rng: np.random.Generator, count: int) -> np.ndarray:
    """Clocks that jump: the level changes by up to 20% every forty samples or so."""
    jumps = np.where(rng.random(count) < 1 / 40, rng.uniform(-0.2, 0.2, count), 0.0)
    return white(rng, count) + STEP_US * np.clip(np.cumsum(jumps), -0.4, 0.4)


def bursts(rng: np.random.Generator, count: int) -> np.ndarray:
    """A neighbour on the other core: stretches of about twenty samples at twice the time."""
    switches = rng.random(count) < 1 / 20
    busy = np.cumsum(switches) % 2 == 1
    return white(rng, count) + np.where(busy, STEP_US * rng.uniform(0.2, 1.0, count), 0.0)


NOISES = white, drift, heavy_tails, steps, bursts


def compared(samples: np.ndarray) -> tuple[float, float, float, float]:
    """(gain, lower and upper end of its interval, effect from its own scatter)."""
    differences = abba_differences(samples.reshape(-1, 4))
    gain = median(differences)
    return gain, *median_interval(differences), null_effect(differences - gain)


def alarms(noise, gain_us: float) -> int:
    """How many of 100 comparisons show a gain, when the candidate is `gain_us` faster."""
    rng = np.random.default_rng(1)
    calibration = abba_differences((STEP_US + noise(rng, 4 * BLOCKS)).reshape(-1, 4))
    effect = max(abs(median(calibration)), null_effect(calibration))
    found = 0
    for _ in range(COMPARISONS):
        samples = STEP_US + noise(rng, 4 * BLOCKS)
        samples[1::4] -= gain_us
        samples[2::4] -= gain_us
        gain, low, _, own = compared(samples)
        found += gain > max(effect, own) and low > 0
    return found


@pytest.mark.parametrize("noise", NOISES, ids=lambda n: n.__name__)
def test_equals_raise_no_alarm(noise):
    assert alarms(noise, gain_us=0.0) <= 1


@pytest.mark.parametrize("noise", NOISES, ids=lambda n: n.__name__)
def test_a_gain_of_a_tenth_is_seen(noise):
    """Bursts that double half of the samples hide it now and then."""
    assert alarms(noise, gain_us=0.1 * STEP_US) >= (0.7 if noise is bursts else 0.95) * COMPARISONS


def test_a_loss_never_counts_as_a_gain():
    assert alarms(white, gain_us=-0.1 * STEP_US) == 0


def test_linear_drift_cancels_in_a_block():
    times = 10.0 + 3.0 * np.arange(40).reshape(10, 4)
    np.testing.assert_array_equal(abba_differences(times), np.zeros(10))


def test_differences_are_base_minus_candidate():
    assert abba_differences([[10.0, 7.0, 8.0, 11.0]]).tolist() == [3.0]


def test_half_a_block_is_refused():
    with pytest.raises(ValueError, match="blocks of four, .n, 4., got shape .6,."):
        abba_differences([1.0] * 6)


def test_interval_holds_the_median_and_shrinks_with_more_samples():
    rng = np.random.default_rng(0)
    few, many = rng.normal(100, 5, 20), rng.normal(100, 5, 2000)
    for samples in (few, many):
        low, high = median_interval(samples)
        assert low <= median(samples) <= high
    few_low, few_high = median_interval(few)
    many_low, many_high = median_interval(many)
    assert many_high - many_low < (few_high - few_low) / 3


def test_interval_covers_the_true_median_about_95_times_in_100():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        low, high = median_interval(rng.normal(0, 1, 40))
        covered += low <= 0 <= high
    assert 180 <= covered <= 199


def test_the_same_samples_give_the_same_figures():
    samples = np.random.default_rng(0).normal(0, 1, 50)
    assert median_interval(samples) == median_interval(samples)
    assert null_effect(samples) == null_effect(samples)


def test_effect_shrinks_with_the_square_root_of_the_pairs():
    differences = np.random.default_rng(0).normal(0, 1, 4000)
    ratio = null_effect(differences, 100) / null_effect(differences, 1600)
    assert 3 < ratio < 5


def test_one_sample_is_its_own_interval():
    assert median_interval([7.0]) == (7.0, 7.0)
    assert null_effect([-3.0]) == 3.0


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [[1.0, 2.0]]], ids=str)
def test_unusable_samples_are_refused(samples):
    with pytest.raises(ValueError, match="one or more finite samples"):
        median_interval(samples)
