"""One change tried in the whole model: tuned, applied, judged, timed, audited."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from agents.measure import DECODE, KINDS, Steps, places
from agents.policy import Decision, decide
from agents.proposers.base import UNKNOWN, Suggestion
from agents.sandboxed import Gate
from agents.session import Session
from agents.tuner import Knobs, tune
from harness import judge, memcheck, seeds
from harness.domains import UNJUDGED, judge_with_domain
from harness.records import Attempt, Audit, Latency, Status, Verdict
from harness.spent import Seconds, spent
from optimized.catalog import load_change
from optimized.change import Change, apply_change, limit, share
from optimized.inductor import region_source
from optimized.plan import Enabled, make_knobs

TUNING_S = 8.0  # a change's knobs for the calls of the target's kind, at most


@dataclass(kw_only=True)
class Outcome:
    """What is known of a change so far."""

    knobs: Knobs = field(default_factory=dict)
    region_verdict: Verdict | None = None
    model_verdict: Verdict | None = None
    latency: Latency | None = None
    audit: Audit | None = None
    generated: str | None = None  # what a compiler made of the region, up to its verdict
    failure: str | None = None
    refused: str | None = None  # why it goes no further than its region
    spent_s: Seconds = field(default_factory=dict)  # by part
    model: nn.Module | None = None
    steps: Steps | None = None


class Trial:
    """Tries changes on `session`; `gate` opens the sandbox when it is first needed."""

    def __init__(self, session: Session, gate: Callable[[], Gate]) -> None:
        self.session, self.gate = session, gate
        self.history, self.progress = session.history, session.progress

    def run(self, suggestion: Suggestion, outcome: Outcome, *, gated: bool) -> None:
        """Tune, apply, judge and time a change; what comes of it goes to `outcome`. A `gated` one
        is judged in the sandbox before its code runs here, as foreign ones are."""
        if not self.passes_the_gate(suggestion, outcome, gated=gated):
            return
        session, workload = self.session, self.session.workload
        change, backend = suggestion.change, suggestion.proposal.backend
        if suggestion.foreign:
            change = load_change(suggestion.proposal.change)
        self.progress.part("applying it")
        outcome.model = self.applied(change, backend, {})
        if workload.device.type == "cuda":
            self.progress.part("tuning")
            with spent("tuning"):
                outcome.knobs = self.tuned(change, backend, outcome.model)
            if outcome.knobs:
                outcome.model = self.applied(change, backend, outcome.knobs)
        self.progress.part("region verdict")
        outcome.region_verdict = judge_with_domain(
            session.reference,
            outcome.model,
            change,
            backend,
            workload,
            seeds.draw(),
            targets=session.judged_targets,
        )
        if not outcome.region_verdict.passed:
            return
        for note in outcome.region_verdict.notes:
            if UNJUDGED in note:
                self.progress.done(f"{change.name}: {note}", "yellow")
        outcome.generated = region_source(outcome.model, change.region)
        assert outcome.region_verdict.domain is not None  # it passed
        if session.guards:
            limit(outcome.model, change, outcome.region_verdict.domain)  # what is timed was judged
        self.time(outcome)
        if self.decision(outcome).status is Status.KEPT:
            self.progress.part("layers' verdict")
            outcome.model_verdict = judge.judge_model(
                session.reference,
                outcome.model,
                workload,
                seeds.draw(),
                per_kind=session.layers_per_kind,
            )
            if outcome.model_verdict.passed and suggestion.foreign:  # others: when the run ends
                self.progress.part("compute-sanitizer")
                asked = memcheck.Asked(
                    change=suggestion.proposal.change,
                    region=change.region,
                    backend=backend,
                    seed=outcome.model_verdict.seed,
                    knobs=outcome.knobs,
                )
                checked = memcheck.check(workload, asked, limit_s=session.checking_s)
                outcome.model_verdict = checked.joined(outcome.model_verdict)

    def applied(self, change: Change, backend: str, knobs: Knobs) -> nn.Module:
        """The model as it stands with the change, too."""
        model = share(self.session.current)
        where = places(model)
        enabled = Enabled(name=change.name, backend=backend, knobs=knobs)
        apply_change(model, change, backend, make_knobs(change, enabled))
        if places(model) != where:
            self.session.rebase()  # packing moved weights that a captured graph still points to
        return model

    def tuned(self, change: Change, backend: str, model: nn.Module) -> Knobs:
        """Launch knobs for the calls of the target's kind, then of the other kind."""
        session, measure = self.session, self.session.measure
        knobs: Knobs = {}
        for kind in sorted(KINDS, key=lambda kind: kind != measure.kind):

            def step_us(knobs: Knobs, kind: str = kind) -> float:
                return measure.in_short_us(self.applied(change, backend, knobs), kind)

            most_s = TUNING_S if kind == measure.kind else TUNING_S / 2
            found = tune(
                model,
                change,
                backend,
                measure.run(kind, model),
                studies=session.studies,
                seconds=session.budget.share_s(0.01, at_most_s=most_s),
                # A prefill's calls are long: what is fastest alone is so among its neighbours.
                step_us=step_us if kind == DECODE else None,
            )
            knobs = {**found, **knobs}
        return knobs

    def passes_the_gate(self, suggestion: Suggestion, outcome: Outcome, *, gated: bool) -> bool:
        """Whether the change may run in this process."""
        if (known := suggestion.beforehand) is not None:
            verdict, outcome.refused = known.verdict, known.refused
        elif suggestion.foreign or gated:
            self.progress.part("region verdict in the sandbox")
            backend = suggestion.proposal.backend
            asked = None if backend == UNKNOWN else backend
            with spent("sandbox"):
                verdict = self.gate().verdict(suggestion.proposal.change, asked, seeds.draw())
        else:
            return True
        if verdict.passed and outcome.refused is None:
            return True
        outcome.region_verdict = verdict
        return False

    def time(self, outcome: Outcome) -> None:
        """Decode and prefill in pairs with the model as it stands, and the audit of both."""
        session, measure = self.session, self.session.measure
        assert outcome.model is not None
        self.progress.part("timing")
        with spent("timing"):
            outcome.steps = measure.steps(outcome.model)
            outcome.latency = self.pairs(outcome.steps)
        self.progress.part("audit")
        with spent("audit"):
            outcome.audit = measure.audit(session.base, outcome.steps)

    def pairs(self, steps: Steps) -> Latency:
        session, measure = self.session, self.session.measure
        latency = measure.latency(session.base, steps, self.history.effect_us())
        gain = getattr(latency, measure.kind)
        undecided = 0 < gain.gain_interval_us[0] and gain.gain_us <= gain.mde_us
        if undecided and self.effect_is_old() and session.budget.has(2 * measure.effects_s):
            session.calibrate()  # a faster model may show smaller effects
            return measure.latency(session.base, steps, self.history.effect_us())
        return latency

    def effect_is_old(self) -> bool:
        """Whether a change was kept since the smallest effect was measured."""
        kinds = [event.kind for event in self.session.ledger.events()]
        return "measured" in kinds[len(kinds) - kinds[::-1].index("effect") :]

    def decision(self, outcome: Outcome) -> Decision:
        if outcome.failure is not None:
            return Decision(status=Status.FAILED, reason=outcome.failure)
        if outcome.refused is not None:
            return Decision(status=Status.REJECTED, reason=outcome.refused)
        return decide(
            target=self.session.measure.kind,
            region_verdict=outcome.region_verdict,
            model_verdict=outcome.model_verdict,
            latency=outcome.latency,
            floors_us=self.session.floors_us(),
            audit=outcome.audit,
        )

    def save_source(self, attempt: Attempt, model: nn.Module) -> str | None:
        """Leave what a compiler generated for the change in the run's directory, for review."""
        source = region_source(model, attempt.region)
        if source is None:
            return None
        folder = self.session.directory / "generated"
        folder.mkdir(exist_ok=True)
        path = folder / f"{attempt.index:02d}-{attempt.name.replace(':', '-')}.py"
        path.write_text(source)
        return f"{folder.name}/{path.name}"
