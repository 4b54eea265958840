"""Taking times: of steps one by one from inside the stream, and of many from outside.

On CUDA a time lies between two events around a step; on a CPU it is `time.perf_counter_ns`. All
times are in microseconds.
"""

import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from harness.records import Clocks
from harness.stats import median, null_effect
from harness.step import Step

EVENT_RESOLUTION_US = 0.5  # of CUDA's event timer, as its documentation of elapsed time says
CYCLES_PER_US = 2000  # no SM clocks faster than about 2 GHz, so a cover lasts at least as long
COVER = 1.5  # times what the host needs to launch a graph, the stream is kept busy before it
FLUSH_FACTOR = 2  # a buffer of twice the L2 leaves nothing of the step's data in it
SETTLED = 0.02  # warm-up ends when the medians of two windows in a row are this close
WINDOW = 5  # samples of a warm-up window
WARM_RUNS = 3  # before a slope, to learn how many runs fit
SLOPES = 5  # repetitions of the N and 2 N measurement
RUNS_PER_SLOPE = 6  # N and 2 N, twice on CUDA
CONFIRMED = 3  # times in a row that two clocks must disagree: noise does so in 1 of 40


class Clock:
    """Times steps on one device, with a cold L2 on request (a CPU's caches stay as they are)."""

    def __init__(self, device: torch.device, *, cold_l2: bool = False) -> None:
        self.device = device
        self.last: Step | None = None
        self.buffer: torch.Tensor | None = None
        if cold_l2 and device.type == "cuda":
            size = FLUSH_FACTOR * torch.cuda.get_device_properties(device).L2_cache_size
            self.buffer = torch.empty(size, dtype=torch.int8, device=device)

    @property
    def resolution_us(self) -> float:
        """What the clock cannot resolve: between two readings of it nothing happens, and yet time
        passes. Less than that is where code happens to lie (seen: 0.03 us between equals)."""
        if self.device.type == "cuda":
            return EVENT_RESOLUTION_US
        readings = [time.perf_counter_ns() for _ in range(101)]
        return median([(b - a) / 1e3 for a, b in itertools.pairwise(readings)])

    def take(self, steps: Sequence[Step]) -> list[float]:
        """Run `steps` in order and return how long each took, in us."""
        if self.device.type == "cuda":
            return self._take_cuda(steps)
        times = []
        for step in steps:
            start = time.perf_counter_ns()
            step()
            times.append((time.perf_counter_ns() - start) / 1e3)
        return times

    def _take_cuda(self, steps: Sequence[Step]) -> list[float]:
        """Enqueue all, then wait once. Before a graph the stream is kept busy for as long as the
        host needs to launch it, so that the events enclose the replay alone; an eager step's launch
        time is part of what it takes. A graph that follows another one first runs untimed: sending
        it to the card again cost up to 2 ms of a 21 ms step of 7836 kernels (H200, 2026-11-29), in
        some places of a block and not in others."""
        pairs = []
        with torch.cuda.device(self.device):
            for step in steps:
                if step.mode == "graph" and step is not self.last:
                    step()
                self.last = step
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                if self.buffer is not None:
                    self.buffer.zero_()
                if step.mode == "graph":
                    torch.cuda._sleep(int(COVER * step.launch_us * CYCLES_PER_US))
                start.record()
                step()
                end.record()
                pairs.append((start, end))
            torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in pairs]

    def warm_up(self, steps: Sequence[Step], limit_s: float) -> float:
        """Run each of `steps` until their times settle, at most `limit_s`, at least once; returns
        the last us of one round of `steps`."""
        deadline = time.perf_counter() + limit_s
        before = float("inf")
        each = list(dict.fromkeys(steps))  # a step that is there twice warms up once
        while True:
            rounds = []
            for _ in range(WINDOW):
                times = dict(zip(each, self.take(each), strict=True))
                rounds.append(sum(times[step] for step in steps))
                if time.perf_counter() > deadline:
                    break
            now = median(rounds)
            if abs(now - before) <= SETTLED * now or time.perf_counter() > deadline:
                return now
            before = now


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection while timing."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def both_clocks(step: Step, *, gap_us: float, budget_s: float = 0.4) -> Clocks:
    """Time `step` from inside and from outside: each by what 2 N runs take more than N.

    What a run costs only once (waiting, starting the first) cancels, and nothing that a candidate
    could patch inside the stream is used outside. A replay may start up to `gap_us` (`empty_us`)
    later when it is timed alone than in a row. The two contradict each other if all repetitions
    say so, by more than that and than their scatter explains, `CONFIRMED` times in a row.
    """
    found = _clocks(step, gap_us, budget_s)
    for _ in range(CONFIRMED - 1):
        if found.reason is None:
            break
        found = _clocks(step, gap_us, budget_s)
    return found


def _clocks(step: Step, gap_us: float, budget_s: float) -> Clocks:
    clock = Clock(step.device)
    inside, outside = [], []
    with quiet():
        once = median([_wall_us(step, 1) for _ in range(WARM_RUNS)])
        count = max(1, int(budget_s * 1e6 / (RUNS_PER_SLOPE * SLOPES * max(once, 1.0))))
        for _ in range(SLOPES):
            less, more = _totals_us(step, clock, count), _totals_us(step, clock, 2 * count)
            slopes = [(m - n) / count for n, m in zip(less, more, strict=True)]
            inside.append(slopes[0])
            outside.append(slopes[1])
    differences = [b - a for a, b in zip(inside, outside, strict=True)]
    difference = median(differences)
    spread = null_effect([d - difference for d in differences])
    all_beyond = min(differences) > gap_us or max(differences) < -gap_us
    reason = None
    if all_beyond and abs(difference) > gap_us + spread:
        word = "slower" if difference > 0 else "faster"
        reason = (
            f"two clocks disagree: {median(inside):.1f} us from inside, {median(outside):.1f} us "
            f"from outside, {abs(difference):.1f} us {word}, where {gap_us + spread:.1f} us can be "
            "explained: work is hidden from one of them"
        )
    return Clocks(
        inside_us=median(inside),
        outside_us=median(outside),
        difference_us=difference,
        spread_us=spread,
        gap_us=gap_us,
        reason=reason,
    )


def _totals_us(step: Step, clock: Clock, count: int) -> tuple[float, float]:
    """What `count` runs took from inside and from outside.

    On a CPU both watch the same runs, so that what else the machine does hits both alike. On CUDA
    the runs timed from inside have pauses between them, so others are timed from outside.
    """
    if step.device.type == "cuda":
        return sum(clock.take([step] * count)), _wall_us(step, count)
    start = time.monotonic_ns()
    inside = sum(clock.take([step] * count))
    return inside, (time.monotonic_ns() - start) / 1e3


def _wall_us(step: Step, count: int) -> float:
    """`count` runs by another clock than the one that takes single times."""
    _wait(step.device)
    start = time.monotonic_ns()
    for _ in range(count):
        step()
    _wait(step.device)
    return (time.monotonic_ns() - start) / 1e3


def empty_us(device: torch.device, *, samples: int = 50) -> float:
    """What the clock shows for a step that does next to nothing: one element incremented."""
    mode = "graph" if device.type == "cuda" else "eager"
    with Step(torch.Tensor.add_, (torch.zeros(1, device=device), 1), mode) as step, quiet():
        clock = Clock(device)
        clock.warm_up([step], limit_s=0.1)
        return median(clock.take([step] * samples))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
