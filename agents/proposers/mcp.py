"""Proposes what a coding agent writes that is connected over MCP. Its tool calls are recorded and
done as a model's are (`agents.claude.talk`); what it submits is tried as any foreign change."""

from collections.abc import Sequence
from typing import Any

from agents.claude import secrets
from agents.claude.desk import Desk
from agents.claude.spend import Spent
from agents.claude.talk import Answers, Talk
from agents.claude.trajectory import Call, Event, Trajectory
from agents.mcp_link import MCP, Link
from agents.proposers.claude import Claude

WAITING = "waiting for the coding agent's next call"


class Calls(Talk):
    """The calls of a client, one after the other: nothing is asked of it, and nothing summed up."""

    def ask(self) -> None:
        if not self.said.messages:
            self.note("began", prompt=self.opening(), candidates=self.candidates)
        self.budget.require()
        message = self.answers.ask({}, 0.0)
        if message is None:
            self.note("ended", reason="the coding agent has disconnected")
        else:
            self.note("answer", message=message)

    def last_decision(self) -> None:
        """Tell what came of the last submission, where the run ended before it went on."""
        call, files = self.said.waiting, [event["file"] for event in self.said.pending]
        outcome = self.bench.decided(files) if files else None
        if call is not None and outcome is not None:
            self.note("round", files=files, call=call.id, outcome=outcome)
            self.reply(call, outcome)


class Mcp(Claude):
    name = MCP

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk, None)
        self.link: Link | None = None
        self.calls: Calls | None = None

    def connect(self) -> None:
        """Greet the MCP server that started this process; what an agent wrote gets no secret."""
        self.link = Link.inherited()
        self.link.greet(directory=str(self.desk.session.directory.resolve()))
        self.desk.connect()
        secrets.take()
        secrets.hand_over()

    def answers(self) -> Answers:
        return self

    def begin(self) -> Talk:
        assert self.link is not None  # connect() opened it
        self.link.tell(task=self.desk.prompt())
        session = self.desk.session
        self.calls = Calls(
            self.answers(),
            self.desk,
            Trajectory.of_run(session.directory),
            system="",
            settings={},
            purse=None,
            budget=session.budget,
            replied=self.replied,
        )
        self.calls.said.ended = None  # a client may go on where another gave up
        return self.calls

    def ask(self, request: dict[str, Any], patience_s: float) -> dict[str, Any] | None:
        """The client's next call as a model's answer; None once it has disconnected. BudgetSpent
        when the time is used up before one comes."""
        assert self.link is not None
        call = self.link.ask(self.meanwhile)
        if call is None:
            return None
        block = {"type": "tool_use", **{name: call[name] for name in ("id", "name", "input")}}
        return {"content": [block], "stop_reason": "tool_use", "usage": {}}

    def meanwhile(self) -> None:
        self.desk.session.progress.part(WAITING)
        self.desk.session.budget.require()

    def replied(self, call: Call, event: Event) -> None:
        first = next(iter(event["text"].splitlines()), "")
        self.desk.session.progress.done(f"agent: {call.brief}: {first[:160]}", "dim")
        assert self.link is not None
        self.link.tell(result=call.id, text=event["text"], error=event["error"])

    def charge(self, files: Sequence[str | None], spent: Spent) -> None:
        """What an agent costs is not known here."""

    def close(self) -> None:
        if self.calls is not None:
            self.calls.last_decision()
        if self.link is not None:
            self.link.close()
        self.desk.close()
