"""What a run stands on: the checked reference, its baselines, the smallest effect, the traces.

Each stage is done once and written to the ledger; a continued run finds it there.
"""

from dataclasses import replace
from functools import cached_property
from pathlib import Path

from torch import nn

from agents import certificates
from agents.budget import Budget
from agents.controls import SLOWED_BY
from agents.drafts import Drafts
from agents.history import History
from agents.measure import KINDS, Measure, Steps
from agents.progress import Progress
from agents.stack import stack, stood_on
from agents.storage import Studies
from harness import baselines, judge, memcheck
from harness.ceilings import floor_us, measure_ceilings
from harness.environment import environment
from harness.errors import UserError
from harness.executors.base import Executor
from harness.floors import least_work
from harness.ledger import Ledger
from harness.records import Ceilings, Environment, Latency, Paired, Timing
from harness.weights import Weights
from harness.workload import TARGETS, Workload
from optimized.change import share
from optimized.plan import Enabled, Plan, apply_enabled
from traces.kernels import aggregate, kernel_rows
from traces.layers import layer_map
from traces.opportunities import Opportunity, opportunities

# A card can differ from run to run; these must not, or the figures would not compare.
SAME_MACHINE = "device", "device_name", "gpu_uuid", "torch", "triton"
LAYERS_PER_KIND = 2  # that judge one change at model level where there are many
CALIBRATIONS = 3
# Of the budget, for one baseline. A toy's changes compile in seconds each, so they get the most.
BASELINE_SHARE, TOY_BASELINE_SHARE, BASELINE_AT_MOST_S = 0.5, 0.2, 480.0


class Session:
    """One run, new or continued, on `workload`; everything it learns goes to `ledger`."""

    def __init__(
        self,
        workload: Workload,
        ledger: Ledger,
        target: str,
        budget: Budget,
        progress: Progress,
        *,
        other_card: bool = False,
        executor: Executor | None = None,
        studies: Studies | None = None,
    ) -> None:
        """`other_card` lets a run go on with another GPU of the same kind. Candidates are judged at
        region level on `executor`, by default in this process; trials of launch knobs are kept in
        `studies`, by default in the run's directory."""
        self.workload, self.ledger = workload, ledger
        self.budget, self.progress = budget, progress
        self.other_card, self.resumed, self.moved = other_card, False, False
        self.executor, self.studies = executor, studies or Studies.of(ledger)
        self.drafts: Drafts | None = None  # of a model's candidates, once the sandbox is open
        self.history = History(ledger)
        self.measure = Measure(workload, target, budget)

    @property
    def directory(self) -> Path:
        return self.ledger.directory

    def prepare(self) -> None:
        """All stages before the first change, as far as they are not done yet."""
        self.identify()
        self.check_reference()
        self.time_baselines()
        if self.moved or self.ledger.last("effect") is None:
            self.calibrate()
        if self.ledger.last("opportunities") is None:
            self.profile("before")
        if self.resumed:
            given = self.workload, self.timed_targets, self.layers_per_kind
            if (without := certificates.restore(self.ledger, *given)) is not None:
                self.progress.done(without)

    def identify(self) -> None:
        here = environment(self.workload.device)
        first = self.ledger.last("environment")
        if first is None:
            self.ledger.append("environment", here)
            return
        there = Environment.from_json(first)
        for name in SAME_MACHINE:
            if name == "gpu_uuid" and self.other_card:
                continue
            if getattr(there, name) != getattr(here, name):
                raise UserError(
                    f"{self.directory} was measured with {name} {getattr(there, name)}, here it is "
                    f"{getattr(here, name)}: the figures would not compare; start a new run"
                    + (", or accept it with --other-card" if name == "gpu_uuid" else "")
                )
        self.ledger.append("resumed", here)
        self.resumed, self.moved = True, there.gpu_uuid != here.gpu_uuid

    @property
    def checking_s(self) -> float:
        """What one of compute-sanitizer's tools may take."""
        return self.budget.share_s(0.05, at_most_s=memcheck.LIMIT_S)

    @cached_property
    def reference(self) -> nn.Module:
        self.progress.stage(f"building {self.workload.name} {self.workload.preset}")
        return self.workload.model

    @cached_property
    def weights(self) -> Weights:
        """Checksums of the reference's weights, taken when first asked for: before any change."""
        return Weights(self.reference)

    def check_reference(self) -> None:
        if self.ledger.last("self_test") is None:
            reference = self.reference
            self.progress.stage("self-test: the judge's replay reproduces the reference")
            judge.self_test(reference, self.workload, self.workload.seed)
            self.ledger.append("self_test", {"passed": True})

    @property
    def timed_targets(self) -> dict[str, str]:
        return {kind: target.name for kind, target in self.measure.targets.items()}

    @property
    def judged_targets(self) -> tuple[str, ...]:
        """The steps of which a region is judged, too: those that are timed for every change, and
        all others where they are small."""
        return tuple(TARGETS if self.workload.toy else self.timed_targets.values())

    @property
    def guards(self) -> bool:
        """Whether changes are timed with the guards of their tested domain. A captured graph has
        run them; in a CPU step they cost about 20 us a call, what a fused region gains."""
        return self.workload.device.type == "cuda"

    @property
    def layers_per_kind(self) -> int | None:
        """How many layers of each kind judge one change; None: all."""
        return None if self.workload.toy else LAYERS_PER_KIND

    def certify(self, generated: str | None) -> None:
        """Leave a certificate of the change that was kept last."""
        certificates.certify(
            self.ledger,
            self.workload,
            self.timed_targets,
            self.layers_per_kind,
            generated=generated,
        )

    @cached_property
    def ceilings(self) -> Ceilings:
        found = self.ledger.last("ceilings")
        if found is not None:
            return Ceilings.from_json(found)
        self.progress.stage("measuring what this machine can do at most")
        ceilings = measure_ceilings(self.workload.device)
        self.ledger.append("ceilings", ceilings)
        return ceilings

    def time_baselines(self) -> None:
        """All baselines once; a continued run times the reference again, as its anchor."""
        known = self.history.baselines
        for name in baselines.NAMES:
            if name not in known:
                self.time_baseline(name)
        if self.resumed:
            self.progress.stage("the reference again, as this session's anchor")
            steps = self.measure.steps(self.reference)
            timings = self.measure.timings(steps)
            steps.close()
            self.ledger.append("anchor", {k: t.to_json() for k, t in timings.items()})

    def time_baseline(self, name: str) -> None:
        self.budget.require()
        inputs = {kind: self.measure.inputs(kind) for kind in KINDS}
        self.progress.stage(f"baseline: {name}")
        share = TOY_BASELINE_SHARE if self.workload.toy else BASELINE_SHARE
        seconds = self.budget.share_s(share, at_most_s=BASELINE_AT_MOST_S)
        for baseline in baselines.run_baselines(
            self.workload, inputs["decode"], inputs["prefill"], budget_s=seconds, only=name
        ):
            self.ledger.append("baseline", baseline)
            times = {"decode": baseline.decode, "prefill": baseline.prefill}
            said = [f"{kind} {t.median_us:.0f} us" for kind, t in times.items() if t is not None]
            self.progress.done(f"baseline {name}: {', '.join(said) or baseline.absent}")

    @cached_property
    def current(self) -> nn.Module:
        """The model with all that the run stands on and that was kept."""
        model = share(self.reference)
        for line in stack(self.ledger):
            self.enable(model, line)
        return model

    @cached_property
    def begun(self) -> frozenset[str]:
        """The changes that the run began with, by the names that they are applied under."""
        return frozenset(line.change().name for line in stood_on(self.ledger))

    def enable(self, model: nn.Module, line: Enabled) -> list[str]:
        """Apply a line of a plan to `model` as changes are timed; the replaced nodes' names."""
        return apply_enabled(model, line if self.guards else replace(line, domain=None))

    @cached_property
    def base(self) -> Steps:
        """`current`, ready to be timed."""
        return self.measure.steps(self.current)

    def rebase(self) -> None:
        """Make `base` ready again when it is next needed: its weights were moved, or its memory is
        needed for something else."""
        if "base" in vars(self):
            self.base.close()
            del self.base

    def calibrate(self) -> None:
        """Find the smallest effect that this machine can tell from none, on `base`.

        A burst of other work can swamp A/A runs; where they cannot tell the slowed control from
        none they are repeated, and the quietest counts. Noise while a change is timed counts
        through the scatter of its own pairs.
        """
        effects: dict[str, float] = {}
        for _ in range(CALIBRATIONS):
            self.budget.require()
            self.progress.stage("A/A runs: the smallest effect that can be told from none")
            found = self.measure.effects(self.base)
            effects = {kind: min(us, effects.get(kind, us)) for kind, us in found.items()}
            if effects[self.measure.kind] < SLOWED_BY * self.measure.target_us(self.base):
                break
        before = self.history.effect_us() if self.ledger.last("effect") and not self.moved else {}
        for kind in KINDS:
            if kind != self.measure.kind and kind in before:  # a burst must not hide a slowdown
                effects[kind] = min(effects[kind], before[kind])
        self.set_effects(effects)

    def set_effects(self, effects: dict[str, float]) -> None:
        """From now on, no gain of less than this counts."""
        self.ledger.append("effect", {f"{kind}_us": effects[kind] for kind in KINDS})
        text = ", ".join(f"{kind} {effects[kind]:.1f} us" for kind in KINDS)
        self.progress.done(f"smallest detectable effect: {text}")

    def profile(self, when: str) -> None:
        """Trace one step of the target and record its kernels, its layers and, before any change,
        what they offer."""
        ceilings, kind = self.ceilings, self.measure.kind
        self.progress.stage(f"tracing a {kind} step, {when} the changes")
        folder = self.directory / "traces"
        folder.mkdir(exist_ok=True)
        trace = self.measure.trace(self.current, folder / f"{kind}-{when}.json.gz")
        rows = kernel_rows(trace, ceilings)
        by_line = [row.to_json() for row in aggregate(rows, by="line")]
        self.ledger.append("kernels", {"when": when, "rows": by_line, **rows.summary()})
        maps = [layer.to_json() for layer in layer_map(rows, self.current)]
        self.ledger.append("layers", {"when": when, "maps": maps})
        if when == "before":
            found = opportunities(rows, ceilings, self.current)
            self.ledger.append("opportunities", {"opportunities": [o.to_json() for o in found]})

    @property
    def opportunities(self) -> list[Opportunity]:
        found = self.ledger.last("opportunities")
        assert found is not None  # prepare() wrote it
        return [Opportunity.from_json(o) for o in found["opportunities"]]

    def floors_us(self) -> dict[str, float | None]:
        """The shortest that a decode and a prefill can take: a decode by the bytes that the model
        must read as the run found it, whatever a candidate is traced to read, and where none was
        traced by the reference's weights and cache; a prefill by the reference's weights and the
        operations of its matrix products. Only where the weights cannot stay in a cache, so not
        for a toy model."""
        traces = (e.data for e in self.ledger.events() if e.kind == "kernels")
        compulsory = next(traces, {}).get("compulsory_bytes")
        if self.workload.toy or compulsory is None:
            return dict.fromkeys(KINDS)
        traced = compulsory / self.ceilings.read_gb_per_s / 1e3
        decode = traced if self.measure.kind == "decode" else self.decode_floor_us
        return {"decode": decode, "prefill": self.prefill_floor_us}

    @cached_property
    def decode_floor_us(self) -> float:
        measure = self.measure
        nbytes, _ = least_work(self.reference, measure.inputs("decode").args)
        nbytes += self.workload.cache_bytes(measure.targets["decode"])
        return floor_us(nbytes, 0, self.ceilings)

    @cached_property
    def prefill_floor_us(self) -> float:
        nbytes, flops = least_work(self.reference, self.measure.inputs("prefill").args)
        return floor_us(nbytes, flops, self.ceilings)

    def adopt(self, model: nn.Module, steps: Steps, latency: Latency) -> None:
        """A kept candidate becomes the model as it stands."""
        self.base.close()
        self.current, self.base = model, steps
        pairs = {"decode": latency.decode, "prefill": latency.prefill}
        measured = {kind: candidate_timing(pair).to_json() for kind, pair in pairs.items()}
        self.ledger.append("measured", measured)
        device = Environment.from_json(self.ledger.last("environment") or {}).device_name
        changes = tuple(stack(self.ledger))
        plan = Plan(model=self.workload.name, device=device, changes=changes)
        plan.save(self.directory / "plan.toml")


def candidate_timing(pair: Paired) -> Timing:
    """What the interleaved pairs say of the candidate alone."""
    return Timing(
        median_us=pair.candidate_us,
        interval_us=pair.candidate_interval_us,
        samples=2 * pair.pairs,
    )
