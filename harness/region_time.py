"""The time of one call of a region with a change and without it, each in a sandboxed worker."""

import torch
from torch import nn

from harness.bench import default_mode
from harness.bench_jobs import Job
from harness.burst_audit import call_draws
from harness.call_floors import CallFloors
from harness.cases import storages
from harness.outside import Bursts, paired, runs_of
from harness.records import AuditedCall, Paired
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
        return runs_of(each_us, most)


def region_time(
    sandbox: Sandbox, candidate: Candidate, fresh: Candidate, job: Job, reference: nn.Module
) -> tuple[Paired, AuditedCall]:
    """Of the first call of `job`, in interleaved pairs, on values not seen before; one of the
    candidate's bursts is compared with what `fresh`, a second worker, computes.
    ImpossibleTimeError for a time below what bytes and operations take, which on a CPU is unknown:
    its caches stay as they are."""
    mode = default_mode(sandbox.device)
    each = max(1, job.kept // len(job.calls))
    count = 1 if mode == "graph" else max(FEWEST, min(MOST, MOST_BYTES // each))
    draws = call_draws(job.calls[0], storages(reference), count)
    base = sandbox.open(None)
    try:
        with torch.no_grad():
            before, after = (
                Calls(worker, job.names[0], draws, mode) for worker in (base, candidate)
            )
            pair, audited = paired(before, after, fresh, job.label)
            node, what = reference.get_submodule(job.names[0]), f"one call of {job.label}"
            CallFloors(sandbox.device).require(node, job, what, pair.candidate_us)
            return pair, audited
    finally:
        base.close()
