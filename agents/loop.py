"""The loop: profile, propose, check, measure, record. The ledger is its only memory."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from agents import controls
from agents.budget import BudgetSpent
from agents.calls import caller
from agents.claude.desk import Desk
from agents.claude.options import Options
from agents.faults import Renew, card_is_lost
from agents.given import Given
from agents.history import MAX_DEATHS, Started
from agents.measure import Steps, places
from agents.policy import Decision, decide
from agents.proposers.auto import agent_in, make_proposer
from agents.proposers.base import UNKNOWN, Context, Suggestion, Tried, suggest
from agents.sandboxed import Gate, give_up_rights
from agents.session import Session
from agents.tuner import tune
from harness import judge
from harness.domains import judge_with_domain
from harness.errors import SelfTestError, UserError
from harness.records import Attempt, Audit, Latency, Status, Verdict
from optimized.catalog import load_change
from optimized.change import Change, KnobValue, apply_change, limit, nodes, share
from optimized.inductor import region_source
from optimized.plan import Enabled, make_knobs

CONTROL_TRIES = 3


@dataclass(kw_only=True)
class Outcome:
    """What is known of a change so far."""

    knobs: dict[str, dict[str, KnobValue]] = field(default_factory=dict)
    region_verdict: Verdict | None = None
    model_verdict: Verdict | None = None
    latency: Latency | None = None
    audit: Audit | None = None
    generated: str | None = None  # what a compiler made of the region, up to its verdict
    failure: str | None = None
    model: nn.Module | None = None
    steps: Steps | None = None


class Loop:
    """Tries what `proposer` proposes until nothing is left, or a budget ends it."""

    def __init__(
        self,
        session: Session,
        proposer: str,
        max_changes: int | None,
        given: Sequence[str] = (),
        *,
        require_sandbox: bool = False,
        options: Options | None = None,
    ) -> None:
        """Change files `given` are tried first. Neither they nor what a model writes (`options`)
        nor, with `require_sandbox`, any candidate runs here before a worker's verdict."""
        self.session, self.require_sandbox = session, require_sandbox
        self.gate: Gate | None = None
        rest = make_proposer(proposer, Desk(session, self.open_gate), options)
        self.agent = agent_in(rest)
        self.proposer = Given(given, rest, self.look)
        self.max_changes = max_changes
        self.workload, self.ledger = session.workload, session.ledger
        self.history, self.progress = session.history, session.progress

    def run(self) -> str:
        """Work; returns why it ended: "done" or "budget"."""
        reason = "done"
        try:
            if self.agent is not None:
                self.agent.connect()
            if self.require_sandbox or self.agent is not None:  # before all else: may be refused
                self.open_gate()
                give_up_rights(self.ledger, self.progress.done)
            self.session.prepare()
            self.offer_controls()
            self.search()
        except BudgetSpent as spent:
            self.progress.done(f"budget: {spent}", "yellow")
            reason = "budget"
        finally:
            for opened in (self.agent, self.gate):
                if opened is not None:
                    opened.close()
        if self.history.changes_judged:
            self.session.finish()
        self.ledger.append("stopped", {"reason": reason})
        return reason

    def open_gate(self) -> Gate:
        if self.gate is None:
            given = self.session.reference, self.workload, self.ledger, self.progress.done
            self.gate = Gate(*given, required=self.require_sandbox, calls=caller(self.session))
        return self.gate

    def look(self, file: str) -> tuple[Change, str] | None:
        self.progress.stage(f"looking at {file} in the sandbox")
        return self.open_gate().look(file)

    def offer_controls(self) -> None:
        """The keep rule must refuse a change that does nothing and one that slows the step."""
        todo = [c for c in (controls.IDENTITY, controls.SLOWED) if c not in self.history.controls]
        if not todo:
            return
        session = self.session
        found = (o for o in session.opportunities if not o.contains)
        region = next((o for o in found if self.context().free(o.region)), None)
        if region is None:
            raise UserError(f"the trace of {self.workload.name} shows no region that runs a kernel")
        step_us = session.measure.target_us(session.base)
        for name in todo * CONTROL_TRIES:
            if name in self.history.controls:
                continue
            if name == controls.IDENTITY:
                change = controls.identity(region.region, self.workload.device.type)
            else:
                count = len(nodes(session.reference, region.region))
                change = controls.slowed(region.region, self.workload.device, step_us, count)
            attempt = self.attempt(suggest(region, change, "torch", change.summary), control=name)
            audited = attempt.audit is not None and attempt.audit.reason is None
            if attempt.status is not Status.REJECTED and attempt.latency is not None and audited:
                self.widen(attempt.latency)
        for name in todo:
            if name not in self.history.controls:
                last = [a for a in self.history.attempts if a.control == name][-1]
                raise SelfTestError(
                    f"the control {name!r} was not refused as it must be in {CONTROL_TRIES} tries, "
                    f"last: {last.reason}. Stop other work on this machine and start a new run"
                )

    def widen(self, latency: Latency) -> None:
        """What a control was seen to gain, no change may claim."""
        effects = self.history.effect_us()
        for kind, pair in (("decode", latency.decode), ("prefill", latency.prefill)):
            effects[kind] = max(effects[kind], *(abs(us) for us in pair.gain_interval_us))
        self.session.set_effects(effects)

    def search(self) -> None:
        while self.max_changes is None or self.history.changes_judged < self.max_changes:
            suggestions = self.proposer.propose(self.context())
            proposals = [s.proposal.to_json() for s in suggestions]
            self.ledger.append("proposals", {"proposals": proposals})
            if not suggestions:
                return
            self.attempt(suggestions[0])

    def context(self) -> Context:
        return Context(
            model=self.session.current,
            device_type=self.workload.device.type,
            opportunities=self.session.opportunities,
            tried=frozenset(
                Tried(a.region, a.name, a.backend) for a in self.history.attempts if not a.control
            ),
            effect_us=self.history.effect_us()[self.session.measure.kind],
            gained_us=self.history.gained_us(self.session.measure.kind),
        )

    def attempt(self, suggestion: Suggestion, control: str | None = None) -> Attempt:
        """Try one change, and record what came of it whatever that is."""
        self.session.budget.require(0.0 if control else self.history.change_s)
        name, backend = suggestion.proposal.change, suggestion.proposal.backend
        started = time.monotonic()
        index = len(self.history.attempts) + 1
        deaths = self.history.deaths(name, backend)
        begun = self.begun(suggestion, index, control)
        self.ledger.append("started", begun)
        self.progress.stage(f"change {index}: {name} ({backend})")
        outcome, lost = Outcome(), False
        weights = self.session.weights
        if deaths >= MAX_DEATHS:
            outcome.failure = f"the run died {deaths} times while this change was tried"
        else:
            try:
                self.try_change(suggestion, outcome, gated=control is None)
            except (UserError, BudgetSpent):
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it raises is a finding
                first = next(iter(str(error).strip().splitlines()), "")
                outcome.failure = f"{type(error).__name__}: {first}"
                lost = card_is_lost(error)
        spoilt = None if lost else weights.changed(self.session.reference)
        if spoilt is not None:
            outcome.failure = f"it changed the reference's weight {spoilt}"
        decision = self.decision(outcome)
        if control is not None and decision.status is Status.KEPT:
            decision = Decision(
                status=Status.FAILED, reason=f"the keep rule accepted it: {decision.reason}"
            )
        if control is not None and outcome.audit is not None and outcome.audit.reason is not None:
            decision = Decision(
                status=Status.FAILED,
                reason=f"its audit failed, though it is honest: {outcome.audit.reason}",
            )
        attempt = self.record(begun, outcome, decision, started)
        if outcome.model is not None:
            source = self.save_source(attempt, outcome.model)
            attempt = replace(attempt, generated_source=source)
        self.ledger.append("attempt", attempt)
        style = "green" if attempt.status is Status.KEPT else "dim"
        self.progress.done(f"{attempt.status}: {name} ({backend}): {attempt.reason}", style)
        if lost:
            raise Renew(f"{name} ({backend}) broke the card for this process")
        if spoilt is not None:
            raise Renew(
                f"{name} ({backend}) changed the reference's weight {spoilt}: no later verdict of "
                "this process can be trusted"
            )
        if attempt.status is Status.KEPT and outcome.model and outcome.steps and outcome.latency:
            self.session.adopt(outcome.model, outcome.steps, outcome.latency)
            self.session.certify(outcome.generated)
        elif outcome.steps is not None:
            outcome.steps.close()
        return attempt

    def begun(self, suggestion: Suggestion, index: int, control: str | None) -> Started:
        proposal, kept = suggestion.proposal, self.history.kept
        return Started(
            index=index,
            name=proposal.change,
            region=proposal.region,
            backend=proposal.backend,
            predicted_us=None if control else proposal.predicted_us,
            bound_us=None if control else proposal.bound_us,
            control=control,
            parent=kept[-1].id if kept else None,
        )

    def try_change(self, suggestion: Suggestion, outcome: Outcome, *, gated: bool) -> None:
        """Tune, apply, judge and time a change; what comes of it goes to `outcome`. The run's own
        controls are not `gated`."""
        session, measure = self.session, self.session.measure
        change, backend = suggestion.change, suggestion.proposal.backend
        name = suggestion.proposal.change
        foreign = suggestion.foreign
        if foreign or (self.require_sandbox and gated):
            self.progress.part("region verdict in the sandbox")
            seed = self.workload.seed + len(self.history.attempts)
            asked = None if backend == UNKNOWN else backend
            verdict = self.open_gate().verdict(name, asked, seed)
            if not verdict.passed:
                outcome.region_verdict = verdict
                return
        if foreign:
            change = load_change(name)
        if self.workload.device.type == "cuda":
            self.progress.part("tuning")
            outcome.knobs = tune(
                session.current,
                change,
                backend,
                measure.run_decode(session.current),
                study_path=session.directory / "optuna.journal",
                seconds=session.budget.share_s(0.03, at_most_s=5.0),
            )
        enabled = Enabled(name=change.name, backend=backend, knobs=outcome.knobs)
        outcome.model = share(session.current)
        where = places(outcome.model)
        self.progress.part("region verdict")
        apply_change(outcome.model, change, backend, make_knobs(change, enabled))
        if places(outcome.model) != where:
            session.rebase()  # packing moved weights that a captured graph still points to
        seed = self.workload.seed + len(self.history.attempts)
        outcome.region_verdict = judge_with_domain(
            session.reference,
            outcome.model,
            change,
            backend,
            self.workload,
            seed,
            targets=session.judged_targets,
        )
        if not outcome.region_verdict.passed:
            return
        outcome.generated = region_source(outcome.model, change.region)
        assert outcome.region_verdict.domain is not None  # it passed
        if session.guards:
            limit(outcome.model, change, outcome.region_verdict.domain)  # what is timed was judged
        self.progress.part("timing")
        outcome.steps = measure.steps(outcome.model)
        effects = self.history.effect_us()
        outcome.latency = measure.latency(session.base, outcome.steps, effects)
        gain = getattr(outcome.latency, measure.kind)
        undecided = 0 < gain.gain_interval_us[0] and gain.gain_us <= gain.mde_us
        if undecided and self.effect_is_old() and session.budget.has(2 * measure.effects_s):
            session.calibrate()  # a faster model may show smaller effects
            effects = self.history.effect_us()
            outcome.latency = measure.latency(session.base, outcome.steps, effects)
        self.progress.part("audit")
        outcome.audit = measure.audit(session.base, outcome.steps)
        if self.decision(outcome).status is Status.KEPT:
            self.progress.part("layers' verdict")
            outcome.model_verdict = judge.judge_model(
                session.reference,
                outcome.model,
                self.workload,
                seed,
                per_kind=session.layers_per_kind,
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

    def effect_is_old(self) -> bool:
        """Whether a change was kept since the smallest effect was measured."""
        kinds = [event.kind for event in self.ledger.events()]
        return "measured" in kinds[len(kinds) - kinds[::-1].index("effect") :]

    def decision(self, outcome: Outcome) -> Decision:
        if outcome.failure is not None:
            return Decision(status=Status.FAILED, reason=outcome.failure)
        return decide(
            target=self.session.measure.kind,
            region_verdict=outcome.region_verdict,
            model_verdict=outcome.model_verdict,
            latency=outcome.latency,
            floors_us=self.session.floors_us(),
            audit=outcome.audit,
        )

    def record(
        self, begun: Started, outcome: Outcome, decision: Decision, started: float
    ) -> Attempt:
        return begun.ended(
            decision.status,
            decision.reason,
            time.monotonic() - started,
            knobs=outcome.knobs,
            region_verdict=outcome.region_verdict,
            model_verdict=outcome.model_verdict,
            latency=outcome.latency,
            audit=outcome.audit,
        )
