"""Replays a recorded conversation without a network or a key: the model's answers come from the
record, the tools run anew, and what they now say otherwise is reported."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agents.claude import secrets
from agents.claude.desk import Desk
from agents.claude.options import REPLAY
from agents.claude.spend import Spent
from agents.claude.talk import Answers, Talk
from agents.claude.trajectory import Call, Event, Trajectory, answers
from agents.proposers.claude import Claude

FIGURE = re.compile(r"-?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")
SAME, FIGURES, WORDS = "as recorded", "differ in figures only", "differ"


class Replay(Claude):
    name = "replay"

    def __init__(self, desk: Desk, file: str) -> None:
        super().__init__(desk, None)
        events = list(Trajectory(Path(file)).events())
        self.recorded = answers(Path(file))
        began = [e for e in events if e["kind"] == "began"]
        self.most = began[0].get("candidates", 1) if began else 1
        self.results = {e["id"]: e["text"] for e in events if e["kind"] == "result"}

    def connect(self) -> None:
        """Nobody is asked; what a model wrote gets no secret either."""
        self.desk.connect()
        secrets.take()
        secrets.hand_over()

    def answers(self) -> Answers:
        return self

    @property
    def candidates(self) -> int:
        """As in the run that the record is of."""
        return self.most

    def charge(self, files: Sequence[str | None], spent: Spent) -> None:
        """A replay costs nothing."""

    def ask(self, request: dict[str, Any], patience_s: float) -> dict[str, Any] | None:
        """The next recorded answer."""
        assert self.talk is not None
        number = self.talk.said.answers
        return self.recorded[number] if number < len(self.recorded) else None

    def replied(self, call: Call, event: Event) -> None:
        """Compare with the record, and keep what differs in this run's own."""
        super().replied(call, event)
        before, now = self.results.get(call.id), event["text"]
        how = SAME if before == now else compared(before, now)
        assert self.talk is not None
        self.talk.note("compared", id=call.id, how=how, recorded=None if how == SAME else before)
        if how == WORDS:
            first = next(iter((before or "no result").splitlines()), "")
            said = f"differs from the record: {call.brief}; recorded: {first[:160]}"
            self.desk.session.progress.done(said, "yellow")

    def finished(self, talk: Talk) -> None:
        super().finished(talk)
        found = [e["how"] for e in talk.record.events() if e["kind"] == "compared"]
        counts = ", ".join(f"{found.count(how)} {how}" for how in (SAME, FIGURES, WORDS))
        style = "yellow" if WORDS in found else ""
        self.desk.session.progress.done(f"replay of {len(found)} results: {counts}", style)


def compared(before: str | None, now: str) -> str:
    """Times are never the same twice; words are to be."""
    if before is None or FIGURE.sub("#", before) != FIGURE.sub("#", now):
        return WORDS
    return FIGURES


def file_of(proposer: str) -> str:
    return proposer.removeprefix(REPLAY)
