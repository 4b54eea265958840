"""Proposes what a language model writes. It works through tools (`agents.claude.desk`) until it has
submitted a round of change files, which are tried as any foreign ones: after sandboxed verdicts."""

import itertools
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from agents.claude.desk import Desk
from agents.claude.line import Line, NoAnswer
from agents.claude.options import CLAUDE, Options
from agents.claude.spend import Spent
from agents.claude.talk import Answers, Talk
from agents.claude.trajectory import Call, Event, Trajectory
from agents.proposers.base import Context, Suggestion
from agents.rounds import Rounds
from harness.errors import UserError

SYSTEM = (Path(__file__).parents[1] / "claude" / "system.md").read_text()
SPENT = "agent_spent"  # the ledger's event


class Claude:
    name = CLAUDE

    def __init__(self, desk: Desk, options: Options | None) -> None:
        self.desk, self.options = desk, options
        self.rounds = Rounds(desk)
        self.line: Line | None = None
        self.talk: Talk | None = None
        self.purse = None if options is None else options.purse()

    def connect(self) -> None:
        """Open the line, which takes the key and every other secret out of this process."""
        self.desk.connect()
        self.line = Line(self.hear)
        model = self.options.model if self.options else ""
        self.desk.session.progress.done(
            f"the model: {model} at {self.line.address}; this process has forgotten "
            f"{', '.join(self.line.forgotten)}"
        )

    def answers(self) -> Answers:
        assert self.line is not None  # connect() opened it
        return self.line

    def begin(self) -> Talk:
        session = self.desk.session
        return Talk(
            self.answers(),
            self.desk,
            Trajectory.of_run(session.directory),
            SYSTEM,
            self.options.settings if self.options else {},
            purse=self.purse,
            budget=session.budget,
            replied=self.replied,
            candidates=self.candidates,
        )

    @property
    def candidates(self) -> int:
        """Of a round, at most."""
        return 1 if self.options is None else self.options.candidates

    def hear(self, told: dict[str, Any]) -> None:
        """From the line, while an answer is awaited."""
        progress = self.desk.session.progress
        if "retry" not in told:
            progress.part(told["alive"])
            return
        again = "" if told["wait_s"] is None else f"; again in {told['wait_s']:g} s"
        progress.done(f"{told['retry']}{again}", "yellow")
        assert self.talk is not None
        self.talk.note("retry", **told)

    def replied(self, call: Call, event: Event) -> None:
        first = next(iter(event["text"].splitlines()), "")
        self.desk.session.progress.done(f"model: {call.brief}: {first[:160]}", "dim")

    def propose(self, context: Context) -> list[Suggestion]:
        """What is left of the round that the model submitted last, or nothing when it came to its
        end."""
        self.desk.context = context
        self.talk = self.talk or self.begin()
        self.desk.session.progress.stage("the model works on a round of changes")
        try:
            found = self.talk.next()
        except NoAnswer as error:
            again = f"--resume {self.desk.session.directory}"
            raise UserError(f"{error}; continue with {again}") from error
        finally:
            self.account(self.talk)
        if found is None:
            self.finished(self.talk)
            return []
        for spent, events in itertools.groupby(self.talk.said.pending, itemgetter("spent")):
            self.charge([event["file"] for event in events], Spent.from_json(spent))
        return self.rounds.suggestions(found, context)

    def account(self, talk: Talk) -> None:
        if self.purse is not None:
            self.purse.spent = talk.said.spent
            said = self.purse.describe()
            self.desk.session.progress.done(
                f"the model so far: {talk.said.answers} answers, {said}"
            )

    def finished(self, talk: Talk) -> None:
        self.desk.session.progress.done(f"the model's work ended: {talk.said.ended}")

    def charge(self, files: Sequence[str | None], spent: Spent) -> None:
        """Record what attempts cost that one answer submitted, once, each with its share of what
        was spent until then; None: what was spent since the last."""
        ledger, before, known = self.desk.ledger, Spent(), set()
        for event in ledger.events():
            if event.kind == SPENT:
                before = Spent.from_json(event.data["total"])
                known.add(event.data["file"])
        left = [file for file in files if file is None or file not in known]
        price = None if self.purse is None else self.purse.price
        for file, own in zip(left, (spent - before).shares(len(left)), strict=True):
            if file is None and not own.tokens:
                continue
            before += own
            usd = None if price is None else round(own.usd(price), 6)
            data = {"file": file, "spent": own.to_json(), "usd": usd, "total": before.to_json()}
            ledger.append(SPENT, data)

    def close(self) -> None:
        if self.talk is not None:
            self.charge([None], self.talk.said.spent)
        self.desk.close()
        if self.line is not None:
            self.line.close()
