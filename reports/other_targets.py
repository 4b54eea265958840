"""What each kept change does at the run's other targets, as the ledger has it; torch-free."""

from dataclasses import dataclass, field
from typing import Any

from harness.records import Paired, Record

STEPS = "other_targets"  # event: which targets there are, and their steps in words
PAIRS = "other_pairs"  # event: one change at one of them
LEFT = "other_left"  # event: why the rest was not measured


@dataclass(frozen=True, kw_only=True)
class OtherPairs(Record):
    """The change that was tried `index`-th at one target that it was not decided on: the model
    before it and with it in interleaved pairs, or why there are none."""

    index: int
    target: str
    pairs: Paired | None
    absent: str | None = None
    calls: int = 0  # of the modules that it replaces, in one step
    declined: int = 0  # how many of them its guard left to the reference

    def __post_init__(self) -> None:
        if (self.pairs is None) != (self.absent is not None):
            raise ValueError(f"{self.target}: either pairs or a reason for their absence")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One change at one other target, for a report."""

    target: str
    step: str  # batch, tokens and context
    pairs: Paired | None
    absent: str | None
    calls: int
    declined: int

    @property
    def slower(self) -> bool:
        return self.pairs is not None and self.pairs.is_slower


@dataclass(kw_only=True)
class OtherTargets:
    """All of a run."""

    steps: dict[str, str] = field(default_factory=dict)  # by target
    found: dict[tuple[int, str], OtherPairs] = field(default_factory=dict)
    left: str | None = None  # why what is not found was not measured

    def rows(self, index: int) -> list[Row]:
        """Of the change that was tried `index`-th, in the targets' order; empty where the ledger
        does not say which targets there are."""
        return [self._row(index, target, step) for target, step in self.steps.items()]

    def _row(self, index: int, target: str, step: str) -> Row:
        known = self.found.get((index, target))
        if known is None:
            why = self.left or "the run has not come to it"
            return Row(target=target, step=step, pairs=None, absent=why, calls=0, declined=0)
        return Row(
            target=target,
            step=step,
            pairs=known.pairs,
            absent=known.absent,
            calls=known.calls,
            declined=known.declined,
        )

    def add(self, kind: str, data: dict[str, Any]) -> None:
        """Take in an event of one of the three kinds."""
        if kind == STEPS:
            self.steps, self.left = {str(n): str(s) for n, s in data["steps"].items()}, None
        elif kind == PAIRS:
            pairs = OtherPairs.from_json(data)
            self.found[pairs.index, pairs.target] = pairs
        else:
            self.left = str(data["why"])
