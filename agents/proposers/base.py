"""What a proposer is: it looks at where the time goes and names changes worth trying."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import nn

from harness.records import Proposal
from optimized.change import Change, nodes
from traces.opportunities import Opportunity


class Tried(NamedTuple):
    """A change that was decided in this run."""

    region: str
    change: str
    backend: str


@dataclass(frozen=True, kw_only=True)
class Context:
    """What proposers may know: the model as it stands, and what its trace offers."""

    model: nn.Module
    device_type: str
    opportunities: Sequence[Opportunity]
    tried: frozenset[Tried]
    effect_us: float  # the smallest gain that can be told from none

    def was_tried(self, region: str, backend: str, change: str | None = None) -> bool:
        """Whether the region was tried with this backend, by this change or by any."""
        return any(
            (t.region, t.backend) == (region, backend) and change in (None, t.change)
            for t in self.tried
        )

    def is_free(self, region: str) -> bool:
        """Whether no node of the region, nor anything in it or around it, was replaced."""
        taken = [n for n, m in self.model.named_modules() if getattr(m, "applied", None)]
        return not any(
            other == node or other.startswith(node + ".") or node.startswith(other + ".")
            for node in nodes(self.model, region)
            for other in taken
        )


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A proposal with the change that carries it out."""

    proposal: Proposal
    change: Change


class Proposer(Protocol):
    name: str

    def propose(self, context: Context) -> list[Suggestion]:
        """Changes worth trying now, best first; empty when there is nothing left."""
        ...


def suggest(opportunity: Opportunity, change: Change, backend: str, hypothesis: str) -> Suggestion:
    proposal = Proposal(
        change=change.name,
        region=change.region,
        backend=backend,
        hypothesis=hypothesis,
        launches_saved=opportunity.launches_saved,
        bytes_saved=opportunity.bytes_saved,
        predicted_us=opportunity.predicted_us,
        bound_us=opportunity.bound_us,
        node_count=opportunity.node_count,
    )
    return Suggestion(proposal=proposal, change=change)
