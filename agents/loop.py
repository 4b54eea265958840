"""The loop: profile, propose, check, measure, record. The ledger is its only memory."""

import time
from collections.abc import Sequence
from dataclasses import replace

from agents import controls, other_targets
from agents.ahead import Ahead
from agents.budget import BudgetSpent
from agents.calls import caller
from agents.claude.desk import Desk
from agents.claude.options import Options
from agents.closing import finish
from agents.drafts import Drafts
from agents.faults import Renew, card_is_lost
from agents.given import Given
from agents.history import MAX_DEATHS, Started
from agents.policy import Decision
from agents.proposers.auto import agent_in, make_proposer
from agents.proposers.base import Context, Suggestion, Tried, realised, suggest
from agents.sandboxed import Gate, give_up_rights
from agents.search import Limits, Stop, ending
from agents.session import Session
from agents.trial import Outcome, Trial
from harness.errors import SelfTestError, UserError, raised_at
from harness.records import Attempt, Latency, Status
from harness.spent import collecting
from optimized.change import Change, applied, nodes

CONTROL_TRIES = 3


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
        limits: Limits | None = None,
        others: str = other_targets.AUTO,
    ) -> None:
        """Change files `given` are tried first. Neither they nor what a model writes (`options`)
        nor, with `require_sandbox`, any candidate runs here before a worker's verdict. `limits` say
        when the search ends by itself, `others` whether kept changes are timed at the targets that
        they were not decided on, or nothing else is done."""
        self.session, self.require_sandbox = session, require_sandbox
        self.gate: Gate | None = None
        rest = make_proposer(proposer, Desk(session, self.open_gate), options)
        self.agent = agent_in(rest)
        self.proposer = Given(given, rest, self.look)
        self.max_changes, self.limits, self.others = max_changes, limits or Limits(), others
        self.workload, self.ledger = session.workload, session.ledger
        self.history, self.progress = session.history, session.progress
        self.trial = Trial(session, self.open_gate)
        self.ahead = Ahead(session, self.open_gate, require_sandbox)

    def run(self) -> str:
        """Work; returns why it ended: "done", "budget", "plateau" or "floor"."""
        reason, why = "done", None
        only = self.others == other_targets.ONLY
        try:
            if self.agent is not None and not only:
                self.agent.connect()
            if self.require_sandbox or self.agent is not None:  # before all else: may be refused
                self.open_gate()
                give_up_rights(self.ledger, self.progress.done, self.workload.name)
            ended = self.ledger.last("stopped") or {"reason": "interrupted"}
            self.session.prepare()
            if only:
                reason, why = ended["reason"], ended.get("why")
            else:
                self.offer_controls()
                if (stop := self.search()) is not None:
                    reason, why = stop.reason, stop.why
                    self.progress.done(f"{reason}: {why}", "yellow")
        except BudgetSpent as spent:
            reason, why = "budget", str(spent)
            self.progress.done(f"budget: {why}", "yellow")
        finally:
            for opened in (self.agent, self.gate, self.session.drafts):
                if opened is not None:
                    opened.close()
        if self.history.changes_judged:
            finish(self.session, self.others)
        self.ledger.append("stopped", {"reason": reason, "why": why})
        return reason

    def open_gate(self) -> Gate:
        if self.gate is None:
            root = None
            if self.agent is not None:
                self.session.drafts = Drafts.open(self.ledger, self.progress.done)
                root = self.session.drafts.root
            given = self.session.reference, self.workload, self.ledger, self.progress.done
            self.gate = Gate(
                *given,
                required=self.require_sandbox,
                calls=caller(self.session),
                root=root,
                executor=self.session.executor,
            )
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

    def search(self) -> Stop | None:
        """Try what is proposed; why the search ended by itself, if something was left."""
        while self.max_changes is None or self.history.changes_judged < self.max_changes:
            if (stop := self.ending()) is not None:
                return stop
            suggestions = self.ahead.of(self.proposer.propose(self.context()))
            proposals = [s.proposal.to_json() for s in suggestions]
            self.ledger.append("proposals", {"proposals": proposals})
            if not suggestions:
                return None
            self.attempt(suggestions[0])
        return None

    def ending(self) -> Stop | None:
        kind = self.session.measure.kind
        floor_us = self.session.floors_us()[kind]
        step_us = self.history.step_us(kind, self.workload.device.type)
        return ending(self.history, self.limits, floor_us, step_us)

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
            realised=realised(self.history.attempts, self.session.measure.kind),
            kept=frozenset(applied(self.session.current)) - self.session.begun,
        )

    def attempt(self, suggestion: Suggestion, control: str | None = None) -> Attempt:
        """Try one change, and record what came of it whatever that is."""
        instant = control is not None or suggestion.settled
        self.session.budget.require(0.0 if instant else self.history.change_s)
        name, backend = suggestion.proposal.change, suggestion.proposal.backend
        known = suggestion.beforehand
        started = time.monotonic() - (0.0 if known is None else known.seconds)
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
                gated = self.require_sandbox and control is None
                with collecting() as outcome.spent_s:
                    self.trial.run(suggestion, outcome, gated=gated)
            except (UserError, BudgetSpent):
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it raises is a finding
                first = next(iter(str(error).strip().splitlines()), "")
                first = first.partition("  See documentation")[0]  # PyTorch's, with an address
                outcome.failure = f"{type(error).__name__}: {first}{raised_at(error)}"
                lost = card_is_lost(error)
        spoilt = None if lost else weights.changed(self.session.reference)
        if spoilt is not None:
            outcome.failure = f"it changed the reference's weight {spoilt}"
        decision = self.trial.decision(outcome)
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
            source = self.trial.save_source(attempt, outcome.model)
            attempt = replace(attempt, generated_source=source)
        if outcome.steps is not None and outcome.latency is not None:
            taken = {kind: us.round(2).tolist() for kind, us in outcome.steps.samples.items()}
            self.ledger.append("samples", {"index": index, "us": taken})
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
            spent_s={n: round(s, 1) for n, s in outcome.spent_s.items() if ": " not in n},
        )
