"""Verdicts on several proposals at once, where a run has workers for them, before the first of them
is tried in the whole model."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from agents.proposers.base import UNKNOWN, Beforehand, Suggestion, Tried
from agents.sandboxed import Gate
from agents.session import Session
from harness import seeds


class Ahead:
    """Of one run. `gate` opens the sandbox when it is first needed; with `all_gated`, any change is
    judged there first, else those from files."""

    def __init__(self, session: Session, gate: Callable[[], Gate], all_gated: bool) -> None:
        self.session, self.gate, self.all_gated = session, gate, all_gated
        self.known: dict[Tried, Beforehand] = {}

    def of(self, suggestions: list[Suggestion]) -> list[Suggestion]:
        """The same, with what is known of them by now; the first is, if it has to be judged in the
        sandbox and there are workers."""
        executor = self.session.executor
        if executor is None:
            return suggestions
        gated = [s for s in suggestions if self.waits(s)]
        if gated and gated[0] is suggestions[0] and key(gated[0]) not in self.known:
            left = [s for s in gated if key(s) not in self.known]
            self.judge(left[: len(executor.workers)])
        return [
            replace(s, beforehand=self.known[key(s)])
            if self.waits(s) and key(s) in self.known
            else s
            for s in suggestions
        ]

    def waits(self, suggestion: Suggestion) -> bool:
        return suggestion.beforehand is None and (suggestion.foreign or self.all_gated)

    def judge(self, suggestions: Sequence[Suggestion]) -> None:
        session = self.session
        session.budget.require()
        session.progress.stage(f"{len(suggestions)} change(s): region verdicts on workers")
        backends = [s.proposal.backend for s in suggestions]
        asked = [
            (s.proposal.change, None if backend == UNKNOWN else backend, seeds.draw())
            for s, backend in zip(suggestions, backends, strict=True)
        ]
        found = self.gate().verdicts(asked, session.progress.part)
        for suggestion, (verdict, seconds) in zip(suggestions, found, strict=True):
            self.known[key(suggestion)] = Beforehand(verdict=verdict, seconds=seconds)


def key(suggestion: Suggestion) -> Tried:
    proposal = suggestion.proposal
    return Tried(proposal.region, proposal.change, proposal.backend)
