"""The two measurements every change gets, one decode step and one prefill, and the trace."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from torch import nn

from agents.budget import Budget
from harness.audit import AFTER, AMONG, Auditor, audit, drawn
from harness.bench import (
    Step,
    both_clocks,
    compare,
    default_mode,
    empty_us,
    smallest_effect,
    time_step,
)
from harness.errors import UserError
from harness.records import Audit, AuditedCall, Latency, Timing
from harness.workload import TARGETS, StepInputs, Target, Workload, free_bytes, give_back
from traces.capture import Trace, capture

DECODE, PREFILL = "decode", "prefill"
KINDS = DECODE, PREFILL
DEFAULTS = {DECODE: "decode-bs1", PREFILL: "prefill-8x2048"}
# What share of the budget one measurement of each kind may take, and at most how many seconds.
SHARES = {DECODE: (0.02, 2.0), PREFILL: (0.006, 3.0)}
# A prefill that is the target gets this many times as much: at its power limit a card's clock makes
# two runs of 0.42 s differ by 1% (an H200), and three pairs told nothing below 2%.
TARGET_PREFILL = 2.5
AA_FACTOR = 3.0  # A/A runs get this many times the seconds of one measurement
IN_SHORT_S = 0.15
MIN_PAIRS = {DECODE: 5, PREFILL: 3}  # rounds of base, candidate, candidate, base


@dataclass
class Steps:
    """A model ready to be timed: its decode step and its prefill, what audits' calls among its
    timed ones found, and the samples of its last pairs by kind, us [pairs, 4]."""

    decode: Step
    prefill: Step
    audited: list[AuditedCall] = field(default_factory=list)
    samples: dict[str, np.ndarray] = field(default_factory=dict)

    def __getitem__(self, kind: str) -> Step:
        return self.decode if kind == DECODE else self.prefill

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


@dataclass
class Measure:
    """Times models on one workload. `target` is the run's; the other kind uses its default."""

    workload: Workload
    target: str
    budget: Budget
    _inputs: dict[str, StepInputs] = field(default_factory=dict)

    @cached_property
    def targets(self) -> dict[str, Target]:
        chosen = self.workload.target(self.target)
        targets = {kind: self.workload.target(DEFAULTS[kind]) for kind in KINDS}
        return {**targets, chosen.kind: chosen}

    @property
    def kind(self) -> str:
        """Which of the two the run's target is."""
        return self.workload.target(self.target).kind

    def inputs(self, kind: str) -> StepInputs:
        if kind not in self._inputs:
            self._inputs[kind] = self.workload.inputs(self.targets[kind], seed=self.workload.seed)
        return self._inputs[kind]

    def steps(self, model: nn.Module) -> Steps:
        """Warm and, on a GPU, captured: a decode replays one CUDA graph. A prefill, which is bound
        by its arithmetic, runs eagerly: a graph of it would hold gigabytes of activations."""
        decode = Step(model, self.inputs(DECODE), default_mode(self.workload.device))
        return Steps(decode, Step(model, self.inputs(PREFILL), "eager"))

    def seconds(self, kind: str, factor: float = 1.0) -> float:
        fraction, at_most = SHARES[kind]
        if kind == self.kind == PREFILL:
            factor *= TARGET_PREFILL
        return factor * self.budget.share_s(fraction, at_most_s=at_most)

    def timings(self, steps: Steps) -> dict[str, Timing]:
        return {kind: time_step(steps[kind], budget_s=self.seconds(kind)) for kind in KINDS}

    def target_us(self, steps: Steps) -> float:
        """The target's time in short, to set something against."""
        return time_step(steps[self.kind], budget_s=self.seconds(self.kind, factor=0.25)).median_us

    @property
    def effects_s(self) -> float:
        """The seconds that A/A runs take at least."""
        return sum(self.seconds(kind, AA_FACTOR) for kind in KINDS)

    def effects(self, steps: Steps) -> dict[str, float]:
        """The smallest detectable effect of each kind, from A/A runs of `steps` against itself."""
        return {
            kind: smallest_effect(
                steps[kind],
                budget_s=self.seconds(kind, AA_FACTOR),
                min_pairs=MIN_PAIRS[kind],
            )
            for kind in KINDS
        }

    def latency(self, base: Steps, candidate: Steps, effects: dict[str, float]) -> Latency:
        """Both kinds, in interleaved pairs; an audit's call falls among those of each kind, and
        `audit` says what came of it."""
        pairs = {}
        for kind in KINDS:
            auditor = self._auditor(kind, base, candidate, AMONG)
            pairs[kind] = compare(
                base[kind],
                candidate[kind],
                effects[kind],
                budget_s=self.seconds(kind, factor=2.0),
                min_pairs=MIN_PAIRS[kind],
                auditor=auditor,
                keep=partial(candidate.samples.__setitem__, kind),
            )
            candidate.audited.append(auditor.check())
        return Latency(decode=pairs[DECODE], prefill=pairs[PREFILL])

    def audit(self, base: Steps, candidate: Steps) -> Audit:
        """Whether what `latency` just timed is the candidate's module, and whether the time from
        outside agrees (of a decode: a prefill takes too long to be run so often)."""
        calls = list(candidate.audited)
        for kind in KINDS:
            auditor = self._auditor(kind, base, candidate, AFTER)
            auditor.call()
            calls.append(auditor.check())
        return Audit(calls=tuple(calls), clocks=both_clocks(candidate.decode, gap_us=self.gap_us))

    @cached_property
    def gap_us(self) -> float:
        """What starting a run may cost in one way of timing and not in another."""
        return empty_us(self.workload.device)

    def _auditor(self, kind: str, base: Steps, candidate: Steps, when: str) -> Auditor:
        def fresh(seed: int) -> StepInputs:
            return drawn(self.workload, self.targets[kind], seed)

        def unchanged_passes() -> bool:
            step, trusted = base[kind], self.workload.model
            return audit(step, step.model, fresh, name=kind, trusted=trusted).reason is None

        step, trusted = candidate[kind], self.workload.model
        return Auditor(
            step, step.model, fresh, kind, when, trusted=trusted, control=unchanged_passes
        )

    def trace(self, model: nn.Module, path: Path | None) -> Trace:
        """One step of the target's kind of `model`, attributed; a decode on a GPU is the replay of
        its graph."""
        mode = default_mode(self.workload.device) if self.kind == DECODE else "eager"
        return capture(model, self.inputs(self.kind), path=path, mode=mode)

    def forget(self) -> None:
        """Give up the inputs of both steps, whose KV caches take gigabytes, until they are needed
        again."""
        self._inputs.clear()
        give_back(self.workload.device)

    @property
    def others(self) -> dict[str, Target]:
        """The targets that are neither of the run's two, by name."""
        measured = {target.name for target in self.targets.values()}
        return {name: self.workload.target(name) for name in TARGETS if name not in measured}

    def other_inputs(self, name: str) -> StepInputs:
        """Of a target that is neither of the run's two; UserError if its KV cache does not fit."""
        give_back(self.workload.device)
        target = self.workload.target(name)
        needed, free = self.workload.cache_bytes(target), free_bytes(self.workload.device)
        if needed > free:
            raise UserError(
                f"its KV cache needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
            )
        return self.workload.inputs(target, seed=self.workload.seed)

    def other_step(self, name: str, model: nn.Module, inputs: StepInputs) -> Step:
        """`model` ready to be timed on it, as `steps` has it; UserError if its graph does not
        fit."""
        decode = self.workload.target(name).kind == DECODE
        return Step(model, inputs, default_mode(self.workload.device) if decode else "eager")

    def other_target(self, name: str, model: nn.Module) -> Timing:
        """`model` on a target that is neither of the run's two; UserError if it does not fit."""
        kind = self.workload.target(name).kind
        with self.other_step(name, model, self.other_inputs(name)) as step:
            return time_step(step, budget_s=self.seconds(kind, factor=0.5))

    def run(self, kind: str, model: nn.Module) -> Callable[[], object]:
        return lambda: model(*self.inputs(kind).args)

    def in_short_us(self, model: nn.Module, kind: str) -> float:
        """One step's time, to tell launch knobs apart."""
        mode = default_mode(self.workload.device) if kind == DECODE else "eager"
        with Step(model, self.inputs(kind), mode) as step:
            return time_step(step, budget_s=IN_SHORT_S).median_us


def places(model: nn.Module) -> list[int]:
    """Where each parameter lies."""
    return [p.data_ptr() for p in model.parameters()]
