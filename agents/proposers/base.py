"""What a proposer is: it looks at where the time goes and names changes worth trying."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple, Protocol, runtime_checkable

from torch import nn

from harness.records import Attempt, Proposal, Verdict
from optimized.catalog import changes
from optimized.change import Change, Contract, nodes, reached
from traces.opportunities import Opportunity

# Of what a kernel could gain at most before any was timed in a run: the median of 16 changes of two
# models' decodes on H200s, which gained 0.72 to 1.03 of it (2026-11-30).
FIRST_SHARE = 0.9


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
    gained_us: Mapping[str, float] = field(default_factory=dict)  # by region, of what was kept
    kept: frozenset[str] = frozenset()  # changes kept since the trace, which shows none of them
    # Of what changes could gain at most, what those tried so far did: of parts, and around parts.
    realised: Mapping[bool, float] = field(default_factory=dict)

    def was_tried(self, region: str, backend: str, change: str | None = None) -> bool:
        """Whether the region was tried with this backend, by this change or by any."""
        return any(
            (t.region, t.backend) == (region, backend) and change in (None, t.change)
            for t in self.tried
        )

    def free(self, region: str) -> float:
        """The share of the region's nodes that a change can still replace: not those inside a
        replaced node that calls no parts, and none if a node, or anything in it, was replaced
        itself."""
        names = nodes(self.model, region)
        open_names = reached(self.model, names, self.kept)
        for node in open_names:
            if any(getattr(m, "applied", None) for m in self.model.get_submodule(node).modules()):
                return 0.0
        return len(open_names) / len(names) if names else 0.0

    def around(self, region: str) -> float:
        """The share of the region's nodes that a change around their parts can still replace: not
        those inside a replaced node that calls no parts, and none if a node was replaced itself."""
        names = nodes(self.model, region)
        open_names = reached(self.model, names, self.kept)
        if any(getattr(self.model.get_submodule(n), "applied", None) for n in open_names):
            return 0.0
        return len(open_names) / len(names) if names else 0.0

    def expected(self, opportunity: Opportunity, *, around: bool = False) -> Opportunity:
        """The opportunity with a prediction that has learnt from what was measured. The trace's own
        counts launches and bytes alone; how close to its floor a region comes depends on how well
        kernels do on this machine, which differs less between them than launches and bytes do."""
        share = self.realised.get(around, None if around else FIRST_SHARE)
        if share is None or self.device_type == "cpu":  # there a call's cost on the host decides
            return opportunity
        return replace(opportunity, predicted_us=share * opportunity.bound_us)

    def left(self, opportunity: Opportunity) -> Opportunity:
        """The opportunity without what was gained inside its region: as much of the prediction is
        left as of the distance to the floor. What was gained may be more than launches and bytes
        had promised for all of it, as by a prefill's attention in a layer."""
        gained = sum(self.gained_us.get(region, 0.0) for region in opportunity.contains)
        bound = max(0.0, opportunity.bound_us - gained)
        share = bound / opportunity.bound_us if opportunity.bound_us else 0.0
        return replace(opportunity, predicted_us=share * opportunity.predicted_us, bound_us=bound)


def realised(attempts: Iterable[Attempt], kind: str) -> dict[bool, float]:
    """The median share of what a timed change could gain at most that it gained, of 0 to 1: of
    changes of parts (False), and of those around parts (True); without those of which none was
    timed."""
    known = changes()
    shares: dict[bool, list[float]] = {}
    for attempt in attempts:
        if attempt.control is None and attempt.latency is not None and attempt.bound_us:
            around = attempt.name in known and known[attempt.name].around
            share = getattr(attempt.latency, kind).gain_us / attempt.bound_us
            shares.setdefault(around, []).append(min(1.0, max(0.0, share)))
    return {around: median(found) for around, found in shares.items()}


@dataclass(frozen=True, kw_only=True)
class Beforehand:
    """What was found out about a suggestion in the sandbox before it is tried."""

    verdict: Verdict  # of its region
    seconds: float
    refused: str | None = None  # why it goes no further, although its verdict passed


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A proposal with the change that carries it out; the code of a `foreign` one must not run here
    before a sandboxed verdict, and is loaded from the file that it is named by."""

    proposal: Proposal
    change: Change
    foreign: bool = False
    beforehand: Beforehand | None = None

    @property
    def settled(self) -> bool:
        """Whether it is refused already, so that it takes no time to decide."""
        known = self.beforehand
        return known is not None and (not known.verdict.passed or known.refused is not None)


class Proposer(Protocol):
    name: str

    def propose(self, context: Context) -> list[Suggestion]:
        """Changes worth trying now, best first; empty when there is nothing left."""
        ...


@runtime_checkable
class Agent(Protocol):
    """A proposer of changes that somebody writes while the run goes on."""

    def connect(self) -> None:
        """Before this process gives up the network."""
        ...

    def close(self) -> None: ...


UNKNOWN = "unknown"  # region and backend of a file that tells neither
NOTHING = Change(
    name="", region=UNKNOWN, summary="", contract=Contract(numerics="exact"), implementations=()
)


def suggest_file(
    file: str, seen: tuple[Change, str] | None, context: Context, hypothesis: str = ""
) -> Suggestion:
    """A change file, of which a worker of the sandbox told `seen`: under its path as its name, by
    which plans and certificates find it again."""
    change, backend = (NOTHING, UNKNOWN) if seen is None else seen
    change = replace(change, name=file)
    hypothesis = hypothesis or change.summary
    for opportunity in context.opportunities:
        if opportunity.region == change.region:
            share = context.free(change.region)
            found = suggest(opportunity, change, backend, hypothesis, share)
            return replace(found, foreign=True)
    proposal = Proposal(
        change=file,
        region=change.region,
        backend=backend,
        hypothesis=hypothesis,
        launches_saved=0,
        bytes_saved=0,
        predicted_us=0.0,
        bound_us=0.0,
        node_count=0,
    )
    return Suggestion(proposal=proposal, change=change, foreign=True)


def suggest(
    opportunity: Opportunity, change: Change, backend: str, hypothesis: str, share: float = 1.0
) -> Suggestion:
    """`share` of the region's nodes are there to be replaced, so that much of it can be gained."""
    proposal = Proposal(
        change=change.name,
        region=change.region,
        backend=backend,
        hypothesis=hypothesis,
        launches_saved=round(share * opportunity.launches_saved),
        bytes_saved=round(share * opportunity.bytes_saved),
        predicted_us=share * opportunity.predicted_us,
        bound_us=share * opportunity.bound_us,
        node_count=round(share * opportunity.node_count),
    )
    return Suggestion(proposal=proposal, change=change)
