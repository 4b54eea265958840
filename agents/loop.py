"""The loop: profile, propose, check, measure, record. The ledger is its only memory."""

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from agents import controls
from agents.budget import Budget, BudgetSpent
from agents.history import MAX_STARTS, History
from agents.measure import KINDS, Measure, Steps
from agents.policy import decide
from agents.progress import Progress
from agents.proposers.auto import PROPOSERS
from agents.proposers.base import Context, Suggestion, suggest
from agents.tuner import tune
from harness import baselines, judge
from harness.ceilings import measure_ceilings
from harness.environment import environment
from harness.errors import SelfTestError, UserError
from harness.ledger import Ledger
from harness.records import Attempt, Ceilings, Environment, Status
from harness.workload import Workload
from optimized.change import Change, apply_change, nodes, share
from optimized.plan import Enabled, Plan, apply_enabled, make_knobs
from traces.kernels import aggregate, kernel_rows
from traces.layers import layer_map
from traces.opportunities import Opportunity, opportunities


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked of the run."""

    target: str
    proposer: str
    max_changes: int | None


class Loop:
    """One run, new or continued, on `workload`; everything it learns goes to `ledger`."""

    def __init__(
        self,
        workload: Workload,
        ledger: Ledger,
        options: Options,
        budget: Budget,
        progress: Progress,
    ) -> None:
        self.workload, self.ledger, self.options = workload, ledger, options
        self.budget, self.progress = budget, progress
        self.history = History(ledger)
        self.measure = Measure(workload, options.target, budget)
        self.proposer = PROPOSERS[options.proposer]()

    @property
    def directory(self) -> Path:
        return self.ledger.directory

    def run(self) -> str:
        """Work until nothing is left to try, or the budget is spent; returns "done" or "budget"."""
        try:
            self.identify()
            self.check_reference()
            self.time_baselines()
            self.calibrate()
            self.profile("before")
            self.offer_controls()
            reason = self.search()
        except BudgetSpent as spent:
            self.progress.done(f"budget: {spent}", "yellow")
            reason = "budget"
        if self.history.changes_judged:
            self.finish()
        self.ledger.append("stopped", {"reason": reason})
        return reason

    # --- what the run stands on -------------------------------------------------------------

    def identify(self) -> None:
        here = environment(self.workload.device)
        first = self.ledger.last("environment")
        if first is None:
            self.ledger.append("environment", here)
            return
        there = Environment.from_json(first)
        for name in ("device", "device_name", "gpu_uuid", "torch", "triton"):
            if getattr(there, name) != getattr(here, name):
                raise UserError(
                    f"{self.directory} was measured with {name} {getattr(there, name)}, here it is "
                    f"{getattr(here, name)}: the figures would not compare; start a new run"
                )
        self.ledger.append("resumed", here)

    def check_reference(self) -> None:
        if self.ledger.last("self_test") is None:
            self.progress.stage("self-test: the judge replays the reference bit for bit")
            judge.self_test(self.reference, self.workload, self.workload.seed)
            self.ledger.append("self_test", {"passed": True})

    @cached_property
    def reference(self) -> nn.Module:
        self.progress.stage(f"building {self.workload.name} {self.workload.preset}")
        return self.workload.model

    @cached_property
    def ceilings(self) -> Ceilings:
        found = self.ledger.last("ceilings")
        if found is None:
            self.progress.stage("measuring what this machine can do at most")
            self.ledger.append("ceilings", measure_ceilings(self.workload.device))
            found = self.ledger.last("ceilings")
        assert found is not None
        return Ceilings.from_json(found)

    def time_baselines(self) -> None:
        """All baselines once; in a continued run the fastest to build again, as the anchor."""
        known = self.history.baselines
        inputs = {kind: self.measure.inputs(kind) for kind in KINDS}
        resumed = self.ledger.last("resumed") is not None
        for name in baselines.NAMES:
            if name in known:
                continue
            self.budget.require()
            self.progress.stage(f"baseline: {name}")
            for baseline in baselines.run_baselines(
                self.workload,
                inputs["decode"],
                inputs["prefill"],
                budget_s=self.budget.share_s(0.3, at_most_s=300.0),
                only=name,
            ):
                self.ledger.append("baseline", baseline)
                if baseline.decode and baseline.prefill:
                    self.progress.done(
                        f"baseline {name}: decode {baseline.decode.median_us:.0f} us, "
                        f"prefill {baseline.prefill.median_us:.0f} us"
                    )
                else:
                    self.progress.done(
                        f"baseline {name}: absent, {baseline.absent or baseline.note}"
                    )
        if resumed:
            self.progress.stage("the reference again, as this session's anchor")
            steps = self.measure.steps(self.reference)
            timings = self.measure.timings(steps)
            steps.close()
            self.ledger.append("anchor", {k: t.to_json() for k, t in timings.items()})

    @cached_property
    def current(self) -> nn.Module:
        """The model with everything that was kept."""
        model = share(self.reference)
        for attempt in self.history.kept:
            apply_enabled(model, _enabled(attempt))
        return model

    @cached_property
    def base(self) -> Steps:
        return self.measure.steps(self.current)

    def calibrate(self) -> None:
        """Find the smallest effect that this machine can tell from none."""
        if self.ledger.last("effect") is None:
            self.measure_effect()

    def measure_effect(self) -> None:
        self.budget.require()
        self.progress.stage("A/A runs: the smallest effect that can be told from none")
        effects = self.measure.effects(self.base)
        self.ledger.append("effect", {f"{kind}_us": effects[kind] for kind in KINDS})
        text = ", ".join(f"{kind} {effects[kind]:.1f} us" for kind in KINDS)
        self.progress.done(f"smallest detectable effect: {text}")

    def profile(self, when: str) -> None:
        """Trace one decode step and record its kernels, its layers and what they offer."""
        if when == "before" and self.ledger.last("opportunities") is not None:
            return
        self.progress.stage(f"tracing a decode step ({when})")
        folder = self.directory / "traces"
        folder.mkdir(exist_ok=True)
        trace = self.measure.trace(self.current, folder / f"decode-{when}.json.gz")
        rows = kernel_rows(trace, self.ceilings)
        self.ledger.append(
            "kernels",
            {
                "when": when,
                "rows": [r.to_json() for r in aggregate(rows, by="line")],
                **trace.summary(),
            },
        )
        maps = layer_map(rows, self.current)
        self.ledger.append("layers", {"when": when, "maps": [m.to_json() for m in maps]})
        if when == "before":
            found = opportunities(rows, self.ceilings, self.current)
            self.ledger.append("opportunities", {"opportunities": [o.to_json() for o in found]})

    @property
    def opportunities(self) -> list[Opportunity]:
        found = self.ledger.last("opportunities")
        assert found is not None
        return [Opportunity.from_json(o) for o in found["opportunities"]]

    # --- the search ---------------------------------------------------------------------------

    def context(self) -> Context:
        return Context(
            model=self.current,
            device_type=self.workload.device.type,
            opportunities=self.opportunities,
            tried=self.history.tried,
        )

    def offer_controls(self) -> None:
        """The keep rule must refuse a change that does nothing and one that slows the step."""
        todo = [c for c in (controls.IDENTITY, controls.SLOWED) if c not in self.history.controls]
        if not todo:
            return
        best = next((o for o in self.opportunities if nodes(self.reference, o.region)), None)
        if best is None:
            raise UserError(f"the trace of {self.workload.name} shows no region with a kernel")
        step_us = self.measure.timings(self.base)["decode"].median_us
        for name in todo:
            if name == controls.IDENTITY:
                change = controls.identity(best.region, self.workload.device.type)
            else:
                count = len(nodes(self.reference, best.region))
                change = controls.slowed(best.region, self.workload.device, step_us, count)
            suggestion = suggest(best, change, "torch", change.summary)
            if self.attempt(suggestion, control=name).status is Status.KEPT:
                raise SelfTestError(
                    f"the keep rule accepted the control {name!r}: this machine is too noisy for "
                    "the measured smallest effect; stop other work on it and start a new run"
                )

    def search(self) -> str:
        limit = self.options.max_changes
        while limit is None or self.history.changes_judged < limit:
            suggestions = self.proposer.propose(self.context())
            proposals = [s.proposal.to_json() for s in suggestions]
            self.ledger.append("proposals", {"proposals": proposals})
            if not suggestions:
                return "done"
            self.attempt(suggestions[0])
        return "done"

    def attempt(self, suggestion: Suggestion, control: str | None = None) -> Attempt:
        """Try one change, and record what came of it whatever that is."""
        self.budget.require()
        change, backend = suggestion.change, suggestion.proposal.backend
        started = time.monotonic()
        index = len(self.history.attempts) + 1
        starts = self.history.starts(change.name, backend)
        self.ledger.append("started", {"index": index, "name": change.name, "backend": backend})
        self.progress.stage(f"change {index}: {change.name} ({backend})")
        outcome: dict[str, Any] = {}
        if starts >= MAX_STARTS:
            outcome["failure"] = f"the run died {starts} times while this change was tried"
        else:
            try:
                self.try_change(change, backend, outcome)
            except (UserError, BudgetSpent):
                raise
            except Exception as error:  # noqa: BLE001 - whatever a candidate raises is a finding
                first = next(iter(str(error).strip().splitlines()), "")
                outcome["failure"] = f"{type(error).__name__}: {first}"
        attempt = self.decided(suggestion, outcome, index, control, time.monotonic() - started)
        self.ledger.append("attempt", attempt)
        style = "green" if attempt.status is Status.KEPT else "" if control else "dim"
        self.progress.done(f"{attempt.status}: {attempt.name} ({backend}): {attempt.reason}", style)
        if attempt.status is Status.KEPT and control is None:
            self.keep(outcome)
        elif "steps" in outcome:
            outcome["steps"].close()
        return attempt

    def try_change(self, change: Change, backend: str, outcome: dict[str, Any]) -> None:
        """Apply, tune, judge and time; what is known so far stands in `outcome`."""
        enabled = Enabled(name=change.name, backend=backend, knobs=self.tuned(change, backend))
        outcome["knobs"] = enabled.knobs
        candidate = share(self.current)
        apply_change(candidate, change, backend, make_knobs(change, enabled))
        seed = self.workload.seed + len(self.history.attempts)
        verdict = judge.judge_region(
            self.reference, candidate, change, backend, self.workload, seed
        )
        outcome["region_verdict"] = verdict
        if not verdict.passed:
            return
        outcome["model"] = candidate
        steps = outcome["steps"] = self.measure.steps(candidate)
        outcome["latency"] = self.measure.latency(self.base, steps, self.history.effect_us())
        if decide(target=self.measure.kind, **self._facts(outcome)).status is Status.KEPT:
            outcome["model_verdict"] = judge.judge_model(
                self.reference, candidate, self.workload, seed
            )

    def tuned(self, change: Change, backend: str) -> dict[str, Any]:
        if self.workload.device.type != "cuda":
            return {}
        return tune(
            self.current,
            change,
            backend,
            self.measure.run_decode(self.current),
            study_path=self.directory / "optuna.journal",
            seconds=self.budget.share_s(0.03, at_most_s=15.0),
        )

    def _facts(self, outcome: dict[str, Any]) -> dict[str, Any]:
        return {
            "region_verdict": outcome.get("region_verdict"),
            "model_verdict": outcome.get("model_verdict"),
            "latency": outcome.get("latency"),
            "floors_us": self.floors_us(),
        }

    def floors_us(self) -> dict[str, float | None]:
        """The shortest a decode step can take: the bytes that any implementation must read.

        Only where the weights cannot stay in a cache, so not for a toy model.
        """
        kernels = self.ledger.last("kernels") or {}
        compulsory = kernels.get("compulsory_bytes")
        if self.workload.toy or compulsory is None:
            return {"decode": None, "prefill": None}
        return {"decode": compulsory / self.ceilings.read_gb_per_s / 1e3, "prefill": None}

    def decided(
        self,
        suggestion: Suggestion,
        outcome: dict[str, Any],
        index: int,
        control: str | None,
        seconds: float,
    ) -> Attempt:
        proposal = suggestion.proposal
        if "failure" in outcome:
            status, reason = Status.FAILED, outcome["failure"]
        else:
            decision = decide(target=self.measure.kind, **self._facts(outcome))
            status, reason = decision.status, decision.reason
        kept = self.history.kept
        attempt = Attempt(
            index=index,
            name=proposal.change,
            region=proposal.region,
            backend=proposal.backend,
            status=status,
            reason=reason,
            predicted_us=None if control else proposal.predicted_us,
            bound_us=None if control else proposal.bound_us,
            knobs=outcome.get("knobs", {}),
            region_verdict=outcome.get("region_verdict"),
            model_verdict=outcome.get("model_verdict"),
            latency=outcome.get("latency"),
            control=control,
            parent=kept[-1].id if kept else None,
            seconds=round(seconds, 1),
        )
        return attempt

    def keep(self, outcome: dict[str, Any]) -> None:
        """The candidate becomes the model as it stands."""
        self.base.close()
        self.current, self.base = outcome["model"], outcome["steps"]
        timings = self.measure.timings(self.base)
        self.ledger.append("measured", {k: t.to_json() for k, t in timings.items()})
        self.save_plan()

    def save_plan(self) -> None:
        device = Environment.from_json(self.ledger.last("environment") or {}).device_name
        changes = tuple(_enabled(a) for a in self.history.kept)
        plan = Plan(model=self.workload.name, device=device, changes=changes)
        plan.save(self.directory / "plan.toml")

    def finish(self) -> None:
        """The closing trace and times of the model as it stands."""
        self.profile("after")
        self.progress.stage("closing measurements")
        timings = self.measure.timings(self.base)
        self.ledger.append("final", {k: t.to_json() for k, t in timings.items()})


def _enabled(attempt: Attempt) -> Enabled:
    return Enabled(name=attempt.name, backend=attempt.backend, knobs=attempt.knobs)
