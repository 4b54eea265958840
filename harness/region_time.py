"""The time of one call of a region with a change and without it, each in a sandboxed worker."""

import math

import torch
from torch import nn

from harness.bench import default_mode
from harness.bench_jobs import Job
from harness.cases import storages
from harness.outside import SLOPE_S, Bursts, call_slots, paired
from harness.records import Paired
from harness.remote import Candidate
from harness.sandbox import Sandbox

# Calls of a burst, each on arguments of its own: enough of a small one that starting the burst does
# not drown it (with 32 of 80 us, a CPU told no gain below 260 us a call, 2026-11-30).
FEWEST, MOST, MOST_BYTES = 8, 512, 128 << 20


class Calls(Bursts):
    """Bursts of a region's call, as long as they must be by the time of a call alone."""

    def count(self) -> int:
        most = len(self.slots) // 2
        if most < 2:
            return super().count()
        self.burst(most)
        once, many = (min(self.burst(n)[0] for _ in range(2)) for n in (1, most))
        each_us = max(1.0, (many - once) / (most - 1))
        return max(1, min(most, math.ceil(SLOPE_S * 1e6 / each_us / 2)))


def region_time(
    sandbox: Sandbox, candidate: Candidate, job: Job, reference: nn.Module, seed: int
) -> Paired:
    """Of the first call of `job`, in interleaved pairs, on values not seen before."""
    mode = default_mode(sandbox.device)
    each = max(1, job.kept // len(job.calls))
    count = 1 if mode == "graph" else max(FEWEST, min(MOST, MOST_BYTES // each))
    slots, redraw = call_slots(job.calls[0], storages(reference), seed, count)
    base = sandbox.open(None)
    try:
        with torch.no_grad():
            before = Calls(base, job.names[0], slots, redraw, mode)
            after = Calls(candidate, job.names[0], slots, redraw, mode)
            return paired(before, after)
    finally:
        base.close()
