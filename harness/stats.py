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


def abba_differences(samples: Sequence[float]) -> np.ndarray:
    """Base minus candidate of each block, for times taken in the order base, candidate, candidate,
    base: [4 n] -> [n].

    Both are in the same mean place of their block, and each follows the other as often as itself,
    so that linear drift and what a switch between the two costs cancel.
    """
    if len(samples) % 4:
        raise ValueError(f"samples come in blocks of four, got {len(samples)}")
    first, second, third, fourth = np.asarray(samples, dtype=np.float64).reshape(-1, 4).T
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
