"""What a run stands on: a plan's changes, on which its own are tried, and those that it kept."""

from dataclasses import dataclass
from typing import Any

from harness.certificate import ROOT, STANDS_ON, Applied
from harness.certify import enabled_of
from harness.command_peers import load_plan
from harness.environment import environment
from harness.errors import UserError
from harness.ledger import Ledger
from harness.records import Attempt, Status
from harness.workload import Workload
from optimized.plan import Enabled, Plan, make_knobs
from optimized.plan_text import AUTO, place

NOTHING = "none"


@dataclass(frozen=True)
class Begun:
    """A plan that a new run stands on, and its name."""

    name: str
    plan: Plan

    def describe(self) -> str:
        names = ", ".join(line.name for line in self.plan.changes)
        return f"stands on {self.name}: {names or 'nothing'}"

    def lines(self) -> list[dict[str, Any]]:
        """What the ledger's first event says of it under `STANDS_ON`."""
        return [applied(line).to_json() for line in self.plan.changes]


def plan_for(given: str, workload: Workload) -> Begun | None:
    """The plan `given`: a file, a run, "none", or "auto", which is the one that the repository
    keeps for this model and device, if there is one. UserError if it is none."""
    device = environment(workload.device).device_name
    kept = place(workload.name, device)
    if given == NOTHING or (given == AUTO and not (ROOT / kept).exists()):
        return None
    plan = load_plan(given, workload.name, device)
    assert plan is not None
    name = kept if given == AUTO else given
    try:
        for line in plan.changes:
            make_knobs(line.change(), line)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error
    return Begun(name, plan)


def stood_on(ledger: Ledger) -> list[Enabled]:
    """The plan's changes, in order."""
    lines = (ledger.last("run") or {}).get(STANDS_ON, [])
    return [enabled_of(Applied.from_json(line)) for line in lines]


def stack(ledger: Ledger) -> list[Enabled]:
    """The plan's changes and those that were kept, in the order in which they are applied."""
    attempts = ledger.all("attempt", Attempt)
    return stood_on(ledger) + [enabled(a) for a in attempts if a.status is Status.KEPT]


def enabled(attempt: Attempt) -> Enabled:
    """The line of a plan that a kept attempt stands for."""
    verdict = attempt.region_verdict
    return Enabled(
        name=attempt.name,
        backend=attempt.backend,
        knobs=attempt.knobs,
        domain=None if verdict is None else verdict.domain,
    )


def applied(line: Enabled) -> Applied:
    return Applied(name=line.name, backend=line.backend, knobs=line.knobs, domain=line.domain)
