"""Times of a candidate in its worker, taken by the judge's own clock, and what was timed compared.

A burst is one order: run so many times. The time of one run is the wall time of 2 N runs less that
of N, over N, so what an order costs cancels. Each burst runs on values, in a decode at positions
and over caches, that nobody saw before, with poison where its results go. The last result of every
burst is handed over, so that any of them may be the one that is audited (`harness.burst_audit`).
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from harness.bench import default_mode
from harness.burst_audit import BurstAudit, Draws, step_draws
from harness.floors import Floors
from harness.handover import Layout, pack, place
from harness.observe import CandidateError
from harness.records import Audit, AuditedCall, Latency, Paired
from harness.remote import Candidate
from harness.sandbox import Sandbox
from harness.spent import spent
from harness.stats import abba_differences, detectable, median, median_interval, null_effect
from harness.step import Mode
from harness.trees import leaves
from harness.workload import Workload
from optimized.domain import Domain

BLOCKS = 5  # of base, candidate, candidate, base
BURSTS = 4  # of the candidate in each: two slopes
SLOPE_S = 0.1  # of a slope's larger burst
MOST_RUNS = 64  # of a burst, each with arguments of its own


class Bursts:
    """Runs of one node of a candidate on what `draws` makes; with an `audit`, one of those that are
    timed is audited."""

    def __init__(self, candidate: Candidate, node: str, draws: Draws, mode: Mode = "eager") -> None:
        self.candidate, self.node, self.draws, self.mode = candidate, node, draws, mode
        self.slots = draws.slots
        self.audit: BurstAudit | None = None
        self.held: list[Tensor] = []  # what the arguments hold after a burst that was to hold them
        self.layout = Layout()
        blob = pack(self.slots, self.layout, candidate.sandbox.known)
        candidate.grow("slots", self.layout.end)
        self._write()
        message = {"op": "prepare", "node": node, "spots": self.layout.spots, "mode": mode}
        self.ask(message, blob, candidate.limits.load_s)

    def ask(self, message: dict[str, Any], blob: bytes, seconds: float) -> dict[str, Any]:
        told = self.candidate.process.ask(message, blob, seconds=seconds)
        self.candidate.hear(told)
        if "error" in told:
            raise CandidateError(str(told["error"]))
        return told

    def refresh(self) -> None:
        """Let the worker see the slots' values."""
        self._write()
        if self.candidate.sandbox.device.type == "cuda" and not self.candidate.sandbox.ipc:
            self.ask({"op": "refresh"}, b"", self.candidate.limits.call_s)

    def _write(self) -> None:
        self.layout.write(self.candidate.blocks["slots"].bytes)
        self.candidate.synchronize()

    def order(self, count: int) -> list[int]:
        return [run % len(self.slots) for run in range(count)]

    def burst(self, count: int, *, hold: bool = False) -> tuple[float, Any]:
        """Wall time, us, of `count` runs, and the last one's result; with `hold`, `held` becomes
        what all arguments hold afterwards, each tensor once."""
        candidate = self.candidate
        self.refresh()
        message = {
            "op": "run",
            "order": self.order(count),
            "keep": [count - 1],
        }
        start = time.perf_counter_ns()
        told = candidate.process.ask(message, seconds=candidate.limits.call_s)
        took_us = (time.perf_counter_ns() - start) / 1e3
        told = candidate.complete(told)
        with candidate.stopped():
            value = candidate.collect(told)
            block = candidate.blocks["slots"].bytes
            changed = self.layout.changed(block)
            if hold:
                distinct = {id(t): t for _, t in leaves(self.slots)}
                at = (self.layout.spots[self.layout.by_id[key]] for key in distinct)
                self.held = [place(block, spot).clone() for spot in at]
        if changed:
            candidate.findings.setdefault(f"writes {changed} byte(s) outside its arguments")
        return took_us, value[0] if isinstance(value, list) and value else None

    def slope_us(self, count: int) -> float:
        """The time of one run, us, on values not seen before."""
        once = self.timed(count)
        return (self.timed(2 * count) - once) / count

    def timed(self, count: int) -> float:
        """Wall time, us, of a burst on new values."""
        if self.audit is not None:
            return self.audit.burst(count)
        self.draws.values()
        return self.burst(count)[0]

    def count(self) -> int:
        """N of a slope: as many runs as the time for it and the slots allow."""
        self.burst(1)
        each_us = min(self.burst(1)[0] for _ in range(2))
        most = MOST_RUNS // 2 if len(self.slots) == 1 else len(self.slots) // 2
        return runs_of(each_us, most)


def runs_of(each_us: float, most: int) -> int:
    """N of a slope over runs of `each_us`: 1 to `most`, so that 2 N last for `SLOPE_S`."""
    return max(1, min(most, math.ceil(SLOPE_S * 1e6 / each_us / 2)))


def memoises(timed: Bursts) -> str | None:
    """Whether the candidate does less on values that it has just seen than on new ones: it runs
    fewer operators and kernels then, both times of two. None if not.

    Times are taken on new values, so a candidate that hides this gains nothing by it either.
    """
    timed.draws.values()
    timed.refresh()
    message = {"op": "count", "order": [0, 1, 1, 2, 2]}
    told = timed.ask(message, b"", timed.candidate.limits.load_s)
    counts = told["counts"]
    if not isinstance(counts, list) or any(type(n) is not int for n in counts) or len(counts) != 5:
        raise CandidateError("handed over counts that are none")
    if counts[2] >= counts[1] or counts[4] >= counts[3]:
        return None
    return f"remembers results: {counts[1]} operators on new values, {counts[2]} on the same again"


def paired(
    base: Bursts, candidate: Bursts, fresh: Candidate, step: str
) -> tuple[Paired, AuditedCall]:
    """The candidate against the base, which has the same draws, in interleaved slopes, and the base
    against itself; and the audit of one of the candidate's bursts by a `fresh` worker. `step` names
    what was timed."""
    count = base.count()

    def blocks(other: Bursts) -> np.ndarray:
        times = []
        for _ in range(BLOCKS):
            base.draws.positions()  # the same for all that are compared
            times.append([b.slope_us(count) for b in (base, other, other, base)])
        return np.array(times)

    own = abba_differences(blocks(base))
    candidate.audit = BurstAudit(candidate, fresh, BURSTS * BLOCKS, step)
    times = blocks(candidate)
    audited, candidate.audit = candidate.audit.check(), None
    differences = abba_differences(times)
    gain = median(differences)
    pair = Paired(
        base_us=median(times[:, [0, 3]].ravel()),
        base_interval_us=median_interval(times[:, [0, 3]].ravel()),
        candidate_us=median(times[:, 1:3].ravel()),
        candidate_interval_us=median_interval(times[:, 1:3].ravel()),
        gain_us=gain,
        gain_interval_us=median_interval(differences),
        mde_us=max(detectable([own]), null_effect(differences - gain)),
        pairs=len(differences),
    )
    return pair, audited


@spent("timing")
def latency(
    sandbox: Sandbox, candidate: Candidate, change: str, backend: str | None, workload: Workload,
    targets: Sequence[str], domain: Domain | None = None,
) -> tuple[Latency, Audit]:  # fmt: skip
    """The model with the change against the model without it, each in a worker of its own, and the
    audit of what was timed; what differs becomes a finding of the candidate, too.
    ImpossibleTimeError where work must have been skipped."""
    pairs: list[Paired] = []
    calls: list[AuditedCall] = []
    floors = Floors(workload)
    base = sandbox.open(None)
    fresh = sandbox.open(change, backend)
    try:
        if domain is not None:  # as `candidate` is
            fresh.limit(domain)
        for name in targets:
            target = workload.target(name)
            mode: Mode = default_mode(workload.device) if target.kind == "decode" else "eager"
            count = 1 if mode == "graph" else min(MOST_RUNS, max(2, MOST_RUNS // target.tokens))
            draws = step_draws(workload, target, count)
            before, after = (Bursts(worker, "", draws, mode) for worker in (base, candidate))
            pair, call = paired(before, after, fresh, target.kind)
            pairs.append(pair)
            calls.append(call)
            if call.reason is not None:
                candidate.findings.setdefault(f"{call.step}, {call.when}: {call.reason}")
            floors.require(
                target, workload.inputs(target), f"{target.describe()}, in the sandbox,",
                pair.candidate_us,
            )  # fmt: skip
    finally:
        base.close()
        fresh.close()
    return Latency(decode=pairs[0], prefill=pairs[1]), Audit(calls=tuple(calls))
