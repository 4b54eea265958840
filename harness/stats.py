"""Statistics of timings, torch-free: medians with bootstrap intervals, and what noise alone does.

Timings are in microseconds, in the order in which they were taken; noise is drifting, stepping and
heavy-tailed, so nothing here assumes a normal distribution or independent samples of one level.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

LEVEL = 0.95  # of every interval
RESAMPLES = 2000
# Two-sided: with it, one A/A comparison in a thousand would show a gain that is not there.
NULL_QUANTILE = 0.998
NULL_SIGMAS = 3.09  # the same quantile of a normal distribution
TINY = np.finfo(np.float64).tiny
ROWS_AT_ONCE = 1 << 20  # elements of one batch of resamples: 8 MiB of indices


def median(samples: ArrayLike) -> float:
    return float(np.median(np.asarray(samples, dtype=np.float64)))


def median_interval(samples: ArrayLike, *, seed: int = 0) -> tuple[float, float]:
    """The 95% percentile-bootstrap interval of the median; the same for the same samples."""
    values = _checked(samples)
    rng = np.random.default_rng(seed)
    medians = _resampled_medians(values, len(values), rng)
    low, high = np.quantile(medians, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def abba_differences(times: ArrayLike) -> np.ndarray:
    """Base minus candidate [n] of blocks timed as base, candidate, candidate, base [n, 4].

    Both have the same mean place in their block, and each follows the other as often as itself, so
    linear drift cancels, and so does what a switch between the two costs.
    """
    blocks = np.asarray(times, dtype=np.float64)
    if blocks.ndim != 2 or blocks.shape[1] != 4:
        raise ValueError(f"times come in blocks of four, [n, 4], got shape {blocks.shape}")
    first, second, third, fourth = blocks.T
    return (first + fourth - second - third) / 2


def null_effect(differences: ArrayLike, count: int | None = None, *, seed: int = 0) -> float:
    """The largest |median of `count` paired differences| that noise alone would show.

    `differences` come from pairs of equals, or from a comparison less its median, in the order in
    which they were taken. Under "no effect" each may as well have had the other sign: runs of
    consecutive differences (neighbours share bursts of noise) are redrawn with random signs, and
    the high quantile of the median's size is returned.
    """
    values = _checked(differences)
    count = len(values) if count is None else count
    run = max(1, round(len(values) ** (1 / 3)))  # the usual length of a moving-block bootstrap
    runs = -(-count // run)
    rng = np.random.default_rng(seed)
    sizes = []
    batch = max(1, ROWS_AT_ONCE // (runs * run))
    for first in range(0, RESAMPLES, batch):
        rows = min(batch, RESAMPLES - first)
        starts = rng.integers(len(values) - run + 1, size=(rows, runs, 1))
        signs = rng.choice((-1.0, 1.0), size=(rows, runs, 1))
        drawn = values[starts + np.arange(run)] * signs
        sizes.append(np.abs(np.median(drawn.reshape(rows, -1)[:, :count], axis=1)))
    return float(np.quantile(np.concatenate(sizes), NULL_QUANTILE))


def detectable(by_twin: Sequence[np.ndarray]) -> float:
    """The smallest effect that all pairs together could tell from none, from A/A differences of a
    step and several builds of itself, one array a build.

    It is what noise alone shows in as many pairs, and no less than any build showed. Builds of one
    step can also differ for good, by where their code and data happen to lie. Where theirs differ
    more than noise explains, the next build may well differ twice as much as the worst of so few.
    """
    everything = np.concatenate(by_twin)
    offsets = np.array([median(differences) for differences in by_twin])
    noise = np.array([null_effect(everything, len(differences)) for differences in by_twin])
    chi_square = float(np.sum((NULL_SIGMAS * offsets / np.maximum(noise, TINY)) ** 2))
    worst = float(np.abs(offsets).max())
    if chi_square > _chi_square_99(len(by_twin)):
        worst *= 2
    return max(null_effect(everything), worst)


def _chi_square_99(degrees: int) -> float:
    """The 99% quantile of the chi-square distribution, by Wilson and Hilferty's formula."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 2.326 * spread**0.5) ** 3


def _resampled_medians(values: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    medians = []
    batch = max(1, ROWS_AT_ONCE // count)
    for first in range(0, RESAMPLES, batch):
        rows = min(batch, RESAMPLES - first)
        indices = rng.integers(len(values), size=(rows, count))
        medians.append(np.median(values[indices], axis=1))
    return np.concatenate(medians)


def _checked(samples: ArrayLike) -> np.ndarray:
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError(f"need one or more finite samples, got shape {values.shape}: {values}")
    return values
