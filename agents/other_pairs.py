"""Times what `agents.other_targets` found due: one kept change at one target after the other."""

import time
from dataclasses import dataclass, field

import torch
from torch import nn

from agents.budget import BudgetSpent
from agents.faults import Renew, card_is_lost
from agents.history import MAX_DEATHS
from agents.measure import MIN_PAIRS
from agents.session import Session
from agents.stack import enabled, stood_on
from harness.bench import Step, compare, smallest_effect
from harness.errors import UserError
from harness.records import Attempt, Paired
from harness.workload import StepInputs
from optimized.change import share
from reports.other_targets import PAIRS, OtherPairs

BEGUN, EFFECT = "other_begun", "other_effect"  # the ledger's events, beside those of the reports
# Runs of a step that one measurement takes at least: made ready, warmed up, rounds of four; and
# that the first at a target takes, with A/A runs. They tell what still fits into the budget.
RUNS, FIRST_RUNS = 40, 120


@dataclass
class Rig:
    """One target, ready: its inputs, and the models' steps by how many changes they have."""

    name: str
    inputs: StepInputs
    steps: dict[int, Step] = field(default_factory=dict)
    effect_us: float | None = None
    takes_s: float = 0.0  # one measurement, about

    def close(self, but: int | None = None) -> None:
        for count in [c for c in self.steps if c != but]:
            self.steps.pop(count).close()


class Timer:
    """Works through `due`, as `waiting` gives it."""

    def __init__(self, session: Session, due: dict[str, list[int]]) -> None:
        self.session, self.due = session, due
        self.measure, self.ledger = session.measure, session.ledger
        self.kept = session.history.kept
        self.left = sum(map(len, due.values()))
        session.rebase()  # a card's memory is needed for larger caches now
        self.measure.forget()

    def run(self) -> None:
        """BudgetSpent where something is left."""
        self.stacks = stacks(self.session, self.kept)
        for name, places in self.due.items():
            self.require(self.step_s(name) * FIRST_RUNS)
            self.session.progress.stage(f"each kept change at {name}")
            try:
                rig = Rig(name, self.measure.other_inputs(name))
            except (UserError, torch.OutOfMemoryError) as error:
                for place in places:
                    self.record(name, place, absent=words(error))
                continue
            rig.takes_s = self.step_s(name) * RUNS
            try:
                for place in places:
                    self.require(rig.takes_s)
                    self.one(rig, place)
            finally:
                rig.close()
            del rig  # with its cache, before the next one is made

    def require(self, seconds: float) -> None:
        if self.session.budget.left_s < seconds or self.session.budget.left_s <= 0:
            raise BudgetSpent(f"the budget of {self.session.budget.minutes:g} minutes was used up")

    def step_s(self, name: str) -> float:
        """Of the unchanged model, if it is known."""
        final = self.ledger.last("final") or {}
        timed = (final.get("other_targets") or {}).get(f"{name}, reference")
        return timed["median_us"] / 1e6 if isinstance(timed, dict) else 0.0

    def one(self, rig: Rig, place: int) -> None:
        """One change at one target, whatever comes of it."""
        attempt, lost = self.kept[place], False
        begun = {"index": attempt.index, "target": rig.name}
        deaths = sum(e.kind == BEGUN and e.data == begun for e in self.ledger.events())
        if deaths >= MAX_DEATHS:
            self.record(rig.name, place, absent=f"the run died {deaths} times while it was timed")
            return
        self.ledger.append(BEGUN, begun)
        self.session.progress.part(f"{attempt.name} at {rig.name}")
        started = time.monotonic()
        try:
            found = self.timed(rig, place)
        except (UserError, torch.OutOfMemoryError) as error:
            self.record(rig.name, place, absent=words(error))
        except Exception as error:  # noqa: BLE001 - whatever it raises is a finding
            lost = card_is_lost(error)
            self.record(rig.name, place, absent=f"{type(error).__name__}: {words(error)}")
        else:
            self.record(rig.name, place, **found)
            taken_s = time.monotonic() - started
            rig.takes_s = min(taken_s, rig.takes_s or taken_s)  # the first takes more than the rest
        if lost:
            rig.steps.clear()  # which cannot be closed any more
            raise Renew(f"{attempt.name} at {rig.name} broke the card for this process")

    def timed(self, rig: Rig, place: int) -> dict:
        """The fields of `OtherPairs`."""
        rig.close(but=place)
        model, names = self.stacks[place + 1]
        calls, declined = guarded_calls(model, names, rig.inputs)
        found = {"calls": calls, "declined": declined}
        if calls and calls == declined:
            return {**found, "absent": f"its guard leaves all {calls} calls to the reference"}
        base, candidate = self.step(rig, place), self.step(rig, place + 1)
        kind = self.session.workload.target(rig.name).kind
        if rig.effect_us is None:
            rig.effect_us = self.effect(rig.name, kind, base)
        pairs = compare(
            base,
            candidate,
            rig.effect_us,
            budget_s=self.seconds(kind),
            min_pairs=MIN_PAIRS[kind],
        )
        return {**found, "pairs": pairs}

    def step(self, rig: Rig, count: int) -> Step:
        """The model with the first `count` kept changes, ready."""
        if count not in rig.steps:
            model = self.stacks[count][0]
            rig.steps[count] = self.measure.other_step(rig.name, model, rig.inputs)
        return rig.steps[count]

    def effect(self, name: str, kind: str, base: Step) -> float:
        """The smallest detectable effect at this target, found once on one card."""
        known = [e.data for e in self.ledger.events() if e.kind == EFFECT]
        earlier = [data["us"] for data in known if data["target"] == name]
        if earlier and not self.session.moved:
            return earlier[-1]
        us = smallest_effect(base, budget_s=self.seconds(kind), min_pairs=MIN_PAIRS[kind])
        self.ledger.append(EFFECT, {"target": name, "us": us})
        return us

    def seconds(self, kind: str) -> float:
        """For one measurement: its share of what is left."""
        share_s = max(0.0, self.session.budget.left_s) / (2 * self.left)
        return min(self.measure.seconds(kind), share_s)

    def record(
        self,
        name: str,
        place: int,
        *,
        pairs: Paired | None = None,
        absent: str | None = None,
        calls: int = 0,
        declined: int = 0,
    ) -> None:
        attempt = self.kept[place]
        self.left -= 1
        self.ledger.append(
            PAIRS,
            OtherPairs(
                index=attempt.index,
                target=name,
                pairs=pairs,
                absent=absent,
                calls=calls,
                declined=declined,
            ),
        )
        if pairs is not None and pairs.is_slower:
            self.session.progress.done(
                f"{attempt.name} is slower at {name}: {-pairs.gain_us:.1f} us of "
                f"{pairs.base_us:.1f} (smallest detectable effect {pairs.mde_us:.1f} us)",
                "red",
            )


def stacks(session: Session, kept: list[Attempt]) -> list[tuple[nn.Module, list[str]]]:
    """The model as the run found it, then with each kept change more, with the nodes that this one
    replaces. All at once: what packs weights moves them, and captured graphs would read the old
    ones."""
    model = share(session.reference)
    for line in stood_on(session.ledger):
        session.enable(model, line)
    found: list[tuple[nn.Module, list[str]]] = [(model, [])]
    for attempt in kept:
        model = share(model)
        found.append((model, session.enable(model, enabled(attempt))))
    return found


def guarded_calls(model: nn.Module, names: list[str], inputs: StepInputs) -> tuple[int, int]:
    """How often one step calls the nodes `names` of `model`, and how many of these calls their
    guards leave to the reference."""
    found = [model.get_submodule(name) for name in names]
    told: list[bool] = []

    def before(node: nn.Module, args: tuple) -> None:
        told.append(is_declined(node, args))

    hooks = [node.register_forward_pre_hook(before) for node in found]
    try:
        with torch.no_grad():
            model(*inputs.args)
    finally:
        for hook in hooks:
            hook.remove()
    return len(told), sum(told)


def is_declined(node: nn.Module, args: tuple) -> bool:
    """Whether the guards of a replaced node leave this call to the reference."""
    declines = getattr(node, "declines", None)
    guard = getattr(node.forward, "guard", None)
    own = declines is not None and declines(*args) is not None
    return own or (guard is not None and guard.outside(args) is not None)


def words(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
