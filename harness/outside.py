"""Times of a candidate in its worker, taken by the judge's own clock, and what was timed compared.

A burst is one order: run so many times. The time of one run is the wall time of 2 N runs less that
of N, over N, so what an order costs cancels. Each run of a burst gets arguments that it has not
seen. The last result of every burst is handed over: what was timed must be, bit for bit, what a
fresh process computes when it is called once at a time.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.bench import default_mode
from harness.handover import Layout, pack
from harness.observe import CandidateError
from harness.operators import LOW
from harness.records import Latency, Paired
from harness.remote import Candidate
from harness.sandbox import Sandbox
from harness.spent import spent
from harness.stats import abba_differences, detectable, median, median_interval, null_effect
from harness.step import Mode
from harness.trees import leaves, map_tensors, same_bits
from harness.workload import Workload
from optimized.domain import Domain

BLOCKS = 5  # of base, candidate, candidate, base
SLOPE_S = 0.1  # of a slope's larger burst
MOST_RUNS = 64  # of a burst, each with arguments of its own

Slot = tuple[Any, ...]


class Bursts:
    """Runs of one node of a candidate; `redraw` puts new values into the slots' tensors."""

    def __init__(
        self,
        candidate: Candidate,
        node: str,
        slots: Sequence[Slot],
        redraw: Callable[[], None],
        mode: Mode = "eager",
    ) -> None:
        self.candidate, self.node, self.slots = candidate, node, list(slots)
        self.redraw, self.mode = redraw, mode
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

    def burst(self, count: int) -> tuple[float, Any]:
        """Wall time, us, of `count` runs, and the last one's result."""
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
            changed = self.layout.changed(candidate.blocks["slots"].bytes)
        if changed:
            candidate.findings.setdefault(f"writes {changed} byte(s) outside its arguments")
        return took_us, value[0] if isinstance(value, list) and value else None

    def slope_us(self, count: int) -> float:
        """The time of one run, us, on values not seen before."""
        self.redraw()
        once, _ = self.burst(count)
        self.redraw()
        twice, _ = self.burst(2 * count)
        return (twice - once) / count

    def count(self) -> int:
        """N of a slope: as many runs as the time for it and the slots allow."""
        self.burst(1)
        each_us = min(self.burst(1)[0] for _ in range(2))
        most = MOST_RUNS // 2 if len(self.slots) == 1 else len(self.slots) // 2
        return max(1, min(most, math.ceil(SLOPE_S * 1e6 / each_us / 2)))


def audit(timed: Bursts, fresh: Candidate, count: int) -> str | None:
    """Whether a timed burst of `count` ends with what a fresh process computes, or what differs."""
    timed.redraw()
    args = map_tensors(torch.clone, timed.slots)
    _, ours = timed.burst(count)
    # Slots may share tensors, such as a cache: what one call writes, the next finds.
    shared: dict[int, Tensor] = {}
    originals = [t for _, t in leaves(timed.slots)]
    copies = [t for _, t in leaves(args)]
    by_copy = {id(c): shared.setdefault(id(o), c) for o, c in zip(originals, copies, strict=True)}
    args = map_tensors(lambda t: by_copy[id(t)], args)
    theirs: Any = None
    for run in timed.order(count):
        theirs = fresh.call(timed.node, args[run], {})[0]
    mine, expected = dict(leaves(ours)), dict(leaves(theirs))
    if mine.keys() != expected.keys():
        return "what was timed returns something else than an untimed call"
    for path, tensor in expected.items():
        if not same_bits(mine[path], tensor):
            return f"what was timed is not what an untimed call computes (out{path}, run {count})"
    return None


def memoises(timed: Bursts) -> str | None:
    """Whether the candidate does less on values that it has just seen than on new ones: it runs
    fewer operators and kernels then, both times of two. None if not.

    Times are taken on new values, so a candidate that hides this gains nothing by it either.
    """
    timed.redraw()
    timed.refresh()
    message = {"op": "count", "order": [0, 1, 1, 2, 2]}
    told = timed.ask(message, b"", timed.candidate.limits.load_s)
    counts = told["counts"]
    if not isinstance(counts, list) or any(type(n) is not int for n in counts) or len(counts) != 5:
        raise CandidateError("handed over counts that are none")
    if counts[2] >= counts[1] or counts[4] >= counts[3]:
        return None
    return f"remembers results: {counts[1]} operators on new values, {counts[2]} on the same again"


def paired(base: Bursts, candidate: Bursts) -> Paired:
    """The candidate against the base in interleaved slopes, and the base against itself."""
    count = base.count()

    def blocks(other: Bursts) -> np.ndarray:
        rounds = [[base, other, other, base] for _ in range(BLOCKS)]
        return np.array([[b.slope_us(count) for b in row] for row in rounds])

    own = abba_differences(blocks(base))
    times = blocks(candidate)
    differences = abba_differences(times)
    gain = median(differences)
    return Paired(
        base_us=median(times[:, [0, 3]].ravel()),
        base_interval_us=median_interval(times[:, [0, 3]].ravel()),
        candidate_us=median(times[:, 1:3].ravel()),
        candidate_interval_us=median_interval(times[:, 1:3].ravel()),
        gain_us=gain,
        gain_interval_us=median_interval(differences),
        mde_us=max(detectable([own]), null_effect(differences - gain)),
        pairs=len(differences),
    )


def step_slots(workload: Workload, name: str, mode: Mode) -> tuple[list[Slot], Callable[[], None]]:
    """Arguments of one target's step that share all but their token ids, and what redraws those."""
    target = workload.target(name)
    first = workload.inputs(target, seed=workload.seed)
    count = 1 if mode == "graph" else min(MOST_RUNS, max(2, MOST_RUNS // target.tokens))
    slots = [(first.ids.clone(), first.positions, first.cache) for _ in range(count)]
    generator = torch.Generator(workload.device).manual_seed(workload.seed)

    def redraw() -> None:
        for ids, _, _ in slots:
            ids.random_(workload.vocabulary, generator=generator)

    return slots, redraw


def call_slots(
    args: Slot, fixed: set[int], seed: int, count: int = MOST_RUNS
) -> tuple[list[Slot], Callable[[], None]]:
    """Copies of one call's arguments whose activations differ in their signs, redrawn at will."""

    def own(tensor: Tensor) -> Tensor:
        return tensor if tensor.untyped_storage()._cdata in fixed else tensor.clone()

    slots = [map_tensors(own, args) for _ in range(count)]
    drawn = [
        t for _, t in leaves(slots) if t.dtype in LOW and t.untyped_storage()._cdata not in fixed
    ]
    generator = torch.Generator().manual_seed(seed)

    def redraw() -> None:
        for tensor in drawn:
            signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
            tensor.mul_(signs.to(tensor.device, tensor.dtype))

    return slots, redraw


@spent("timing")
def latency(
    sandbox: Sandbox, candidate: Candidate, change: str, backend: str | None, workload: Workload,
    targets: Sequence[str], domain: Domain | None = None,
) -> Latency:  # fmt: skip
    """The model with the change against the model without it, each in a worker of its own; what
    differs between timed and untimed results becomes a finding of the candidate."""
    pairs: list[Paired] = []
    base = sandbox.open(None)
    fresh = sandbox.open(change, backend)
    try:
        if domain is not None:  # as `candidate` is
            fresh.limit(domain)
        for name in targets:
            kind = workload.target(name).kind
            mode: Mode = default_mode(workload.device) if kind == "decode" else "eager"
            slots, redraw = step_slots(workload, name, mode)
            before = Bursts(base, "", slots, redraw, mode)
            after = Bursts(candidate, "", slots, redraw, mode)
            pairs.append(paired(before, after))
            if (told := audit(after, fresh, 2)) is not None:
                candidate.findings.setdefault(told)
    finally:
        base.close()
        fresh.close()
    return Latency(decode=pairs[0], prefill=pairs[1])
