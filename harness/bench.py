"""Timing steps: alone, against each other, and against themselves.

A step timed alone drifts with the machine, so a change is judged in interleaved pairs: base,
candidate, candidate, base, or the other way round. What pairs of the same step show (A/A) is what
no change may claim. Times are microseconds. Whole steps read more weights than an L2 holds and are
timed as they come; single regions are timed with a cold L2, as they would find it in a step.
"""

import secrets
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from harness.audit import Auditor
from harness.ceilings import floor_us
from harness.clock import Clock, both_clocks, empty_us, quiet
from harness.errors import SelfTestError
from harness.records import Ceilings, Paired, Timing
from harness.stats import abba_differences, detectable, median, median_interval, null_effect
from harness.step import Mode, Step, default_mode, device_of

__all__ = [
    "Step",
    "both_clocks",
    "compare",
    "default_mode",
    "empty_us",
    "floor_us",
    "require_possible",
    "smallest_effect",
    "time_call",
    "time_step",
]

WARM_SHARE = 0.2  # of a budget, at most, goes to warming up
BATCH_S = 0.05  # samples enqueued before the host waits for them
MIN_PAIRS = 5
# Builds of a step that A/A runs compare. Captured graphs of one step differ for good by where their
# buffers lie (0.6% on an H200, 2026-11-29); two trees of modules run the same code.
TWINS = {"graph": 3, "eager": 2}
MAX_SAMPLES = 2048
UNKNOWN_ROUNDS = 7  # at most, of base and candidate on inputs of their own; one gain is enough


class ImpossibleTimeError(SelfTestError):
    """A time that the machine's own ceilings rule out: work was skipped, or the clock is wrong."""


def time_step(
    step: Step, *, budget_s: float = 2.0, min_samples: int = 5, cold_l2: bool = False
) -> Timing:
    """The time of one run: samples until `budget_s` is used, at least `min_samples`."""
    return _timing(_sample(lambda _: [step], budget_s, min_samples, cold_l2))


def compare(
    base: Step,
    candidate: Step,
    mde_us: float,
    *,
    budget_s: float = 4.0,
    min_pairs: int = MIN_PAIRS,
    cold_l2: bool = False,
    auditor: Auditor | None = None,
    keep: Callable[[np.ndarray], None] | None = None,
) -> Paired:
    """Time `candidate` against `base` in interleaved pairs, at least `min_pairs`; `keep` gets the
    samples, us [pairs, 4] of base, candidate, candidate, base.

    `auditor`, one of `candidate`, gets its call among the pairs, before one of the first
    `min_pairs`, which is drawn from the system's entropy. That call is made as the timed ones are;
    its time does not count. Where it took longer than any of them, the gain has to show on other
    inputs that nobody knows, too.

    `mde_us` is what `smallest_effect` found for `base` under the same budget. Should these very
    pairs scatter more than the A/A pairs did (another process woke up), the record's `mde_us` is
    what their own scatter gives.
    """
    times = _pairs(base, candidate, budget_s, min_pairs, cold_l2, auditor)
    if keep is not None:
        keep(times)
    differences = abba_differences(times)
    gain = median(differences)
    base_times, candidate_times = times[:, [0, 3]].ravel(), times[:, 1:3].ravel()
    pair = Paired(
        base_us=median(base_times),
        base_interval_us=median_interval(base_times),
        candidate_us=median(candidate_times),
        candidate_interval_us=median_interval(candidate_times),
        gain_us=gain,
        gain_interval_us=median_interval(differences),
        mde_us=max(mde_us, null_effect(differences - gain)),
        pairs=len(differences),
    )
    if auditor is not None and auditor.time_us is not None and pair.gain_us > pair.mde_us:
        if auditor.time_us > candidate_times.max():
            auditor.remembers = _on_unknown_inputs(base, auditor, pair)
    return pair


def smallest_effect(
    step: Step, *, budget_s: float = 4.0, min_pairs: int = MIN_PAIRS, cold_l2: bool = False
) -> float:
    """The smallest gain, in us, that `compare` under the same budget can tell from none.

    A/A: `step` is compared with several twins of itself (`Step.twin`), one after the other.
    `harness.stats.detectable` says what their differences add up to; nothing below the clock's own
    resolution counts.
    """
    by_twin = []
    twins = TWINS[step.mode]
    for _ in range(twins):
        with step.twin() as twin:
            pairs = _pairs(step, twin, budget_s / twins, -(-min_pairs // twins), cold_l2)
        by_twin.append(abba_differences(pairs))
    return max(detectable(by_twin), Clock(step.device).resolution_us)


def time_call(
    function: Callable[..., Any], *args: Any, budget_s: float = 0.2, cold_l2: bool = True
) -> float:
    """The median us of `function(*args)`: on CUDA captured in a graph, with a cold L2."""
    mode: Mode = default_mode(device_of(function, args))
    with Step(function, args, mode) as step:
        return time_step(step, budget_s=budget_s, cold_l2=cold_l2).median_us


def require_possible(
    what: str, time_us: float, *, nbytes: int, flops: int, ceilings: Ceilings
) -> None:
    """Raise ImpossibleTimeError if `time_us` is less than `nbytes` or `flops` (BF16) take.

    Only for work whose data cannot stay in a cache from one run to the next.
    """
    least = floor_us(nbytes, flops, ceilings)
    if time_us < least:
        raise ImpossibleTimeError(
            f"{what} took {time_us:.1f} us, but its {nbytes / 1e9:.3g} GB and "
            f"{flops / 1e12:.3g} TFLOP need {least:.1f} us on {ceilings.device_name}"
        )


def _pairs(
    base: Step,
    candidate: Step,
    budget_s: float,
    min_pairs: int,
    cold_l2: bool,
    auditor: Auditor | None = None,
) -> np.ndarray:
    """Times [pairs, 4] of base, candidate, candidate, base.

    In every other block, by the Thue-Morse sequence, the two change places, so that no place in a
    block favours either (seen: 0.5% of an 8 us step, on a CPU).
    """

    def block(index: int) -> list[Step]:
        a, b = (candidate, base) if _is_exchanged(index) else (base, candidate)
        return [a, b, b, a]

    samples = _sample(block, budget_s, min_pairs, cold_l2, auditor)
    times = np.array(samples).reshape(-1, 4)
    exchanged = [_is_exchanged(index) for index in range(len(times))]
    times[exchanged] = times[exchanged][:, [1, 0, 3, 2]]
    return times


def _is_exchanged(index: int) -> bool:
    return index.bit_count() % 2 == 1


def _sample(
    round_: Callable[[int], list[Step]],
    budget_s: float,
    min_rounds: int,
    cold_l2: bool,
    auditor: Auditor | None = None,
) -> list[float]:
    """Times of the steps of round 0, round 1, ... in order, after a warm-up with round 0."""
    first = round_(0)
    audited = None if auditor is None else secrets.randbelow(max(1, min_rounds))
    clock = Clock(first[0].device, cold_l2=cold_l2)
    started = time.perf_counter()
    with quiet():
        round_us = clock.warm_up(first, limit_s=WARM_SHARE * budget_s)
        at_once = max(1, int(BATCH_S * 1e6 / max(round_us, 1.0)))
        at_most = MAX_SAMPLES // len(first)
        samples: list[float] = []
        while (done := len(samples) // len(first)) < at_most:
            if done >= min_rounds and time.perf_counter() - started > budget_s:
                break
            if done == audited and auditor is not None:
                _audit(auditor, clock, round_(done)[0])
                audited = None
            upto = min(done + at_once, at_most)
            if audited is not None:
                upto = min(upto, audited)
            samples += clock.take([step for index in range(done, upto) for step in round_(index)])
    return samples


def _audit(auditor: Auditor, clock: Clock, next_step: Step) -> None:
    """An audit's call, made as if it were timed; the step that comes next runs once untimed, so
    that it does not find what the audit left in the caches."""
    clock.last = auditor.step  # one run, no more: a second would see what the first wrote
    taken: list[float] = []
    auditor.call(lambda: taken.extend(clock.take([auditor.step])))
    auditor.time_us = taken[0]
    clock.take([next_step])


def _on_unknown_inputs(base: Step, auditor: Auditor, pair: Paired) -> str | None:
    """Why the gain of `pair` does not hold for inputs that nobody ran before, or None.

    A result that is remembered by the values of its inputs is right, and costs nothing the second
    time.
    """
    least = min(pair.gain_interval_us[0], pair.mde_us)
    clock = Clock(base.device)
    gains: list[float] = []
    with quiet():
        while len(gains) < UNKNOWN_ROUNDS:
            steps = [base, auditor.step] if len(gains) % 2 else [auditor.step, base]
            times = {}
            with auditor.unknown():
                for step in steps:
                    clock.last = step  # run once: the second run would know them
                    times[step] = clock.take([step])[0]
            gains.append(times[base] - times[auditor.step])
            if gains[-1] >= least:
                return None
    return (
        f"on inputs that it had not seen it gained {median(gains):.1f} us, not "
        f"{pair.gain_us:.1f}: it remembers results"
    )


def _timing(samples: list[float]) -> Timing:
    return Timing(
        median_us=median(samples), interval_us=median_interval(samples), samples=len(samples)
    )
