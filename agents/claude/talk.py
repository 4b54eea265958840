"""The conversation: ask the model, do what it calls for, until it submits a change or ends."""

import json
from collections.abc import Callable
from typing import Any, Protocol

from agents.budget import Budget, BudgetSpent
from agents.claude.line import PATIENCE_S, AskAgain
from agents.claude.spend import MOST_OUTPUT, Purse
from agents.claude.tools import TOOLS, complaint
from agents.claude.trajectory import Call, Conversation, Event, Trajectory

MOST_ANSWERS = 60  # without a submission: the model goes round in circles
MOST_NUDGES = 2  # in a row, to a model that calls no tool
MOST_CONTEXT = 120_000  # tokens of a prompt; then the conversation begins anew, with summaries
UNSEEN = 1_000  # tokens that the service adds where there are tools, at most
NUDGE = "Go on with a tool call; end with submit or give_up."
CUT = "Your answer was cut off at its limit of tokens. Go on, in smaller steps."
REFUSED = "the model refused"


class Answers(Protocol):
    """Where answers come from: the service, or a record."""

    def ask(self, request: dict[str, Any], patience_s: float) -> dict[str, Any] | None:
        """An answer; None where there are no more, AskAgain where one broke off."""
        ...


class Bench(Protocol):
    """Where tools are used."""

    def prompt(self) -> str: ...
    def do(self, call: Call) -> tuple[str, bool]: ...
    def take(self, call: Call) -> tuple[str | None, str]: ...
    def outcome(self, file: str) -> str | None: ...


class Talk:
    """One conversation about one run; all that it knows is in `record`."""

    def __init__(
        self,
        answers: Answers,
        bench: Bench,
        record: Trajectory,
        system: str,
        settings: dict[str, Any],
        *,
        purse: Purse | None,
        budget: Budget,
        replied: Callable[[Call, Event], None] = lambda call, event: None,
        most_context: int = MOST_CONTEXT,
    ) -> None:
        """`settings` are the request's model and effort. `replied` sees each tool's result. Without
        a `purse` answers cost nothing. A prompt beyond `most_context` tokens is summarised."""
        self.answers, self.bench, self.record = answers, bench, record
        self.system, self.settings = system, settings
        self.purse, self.budget, self.replied = purse, budget, replied
        self.most_context = most_context
        self.said = Conversation()
        for event in record.events():
            self.said.take(event)

    def next(self) -> tuple[str, str] | None:
        """The next change file to try, with its hypothesis; None when there will be none.

        It comes again until its outcome is known, which is the result of its call. BudgetSpent
        when time, tokens or dollars are used up; the conversation can go on later.
        """
        while self.said.ended is None:
            call = self.said.waiting
            if call is None:
                self.ask()
            elif (wrong := complaint(call)) is not None:
                self.reply(call, wrong, error=True)
            elif (handed := self.said.submitted.get(call.id)) is not None:
                outcome = self.bench.outcome(handed["file"])
                if outcome is None:
                    return handed["file"], handed["hypothesis"]
                self.reply(call, outcome)
            elif call.name == "submit":
                file, words = self.bench.take(call)
                if file is None:
                    self.reply(call, words, error=True)
                else:
                    self.note("submitted", id=call.id, file=file, hypothesis=words)
            elif call.name == "give_up":
                self.note("ended", reason=f"the model gave up: {call.input['reason']}")
            else:
                self.reply(call, *self.bench.do(call))
        return None

    def ask(self) -> None:
        """One answer, unless a limit was reached."""
        said = self.said
        if not said.messages:
            self.note("began", prompt=self.bench.prompt())
        elif (reason := self.at_its_end()) is not None:
            self.note("ended", reason=reason)
            return
        elif said.stop == "model_context_window_exceeded" or self.prompt > self.most_context:
            self.begin_anew()
        elif said.quiet:
            self.note("nudge", text=CUT if said.stop == "max_tokens" else NUDGE)
        self.budget.require()
        try:
            message = self.answers.ask(self.request(self.afford()), PATIENCE_S)
        except AskAgain:
            return  # what was lost is noted, and counts when the next request is reckoned
        if message is None:
            self.note("ended", reason="the record has no more answers")
        else:
            self.note("answer", message=message)

    def at_its_end(self) -> str | None:
        """Why nothing more is asked, or None."""
        said = self.said
        if said.stop == "refusal":
            category = said.details.get("category")
            return REFUSED + (f" ({category})" if category else "")
        if said.since_submit >= MOST_ANSWERS:
            return f"{MOST_ANSWERS} answers without a submission"
        if said.nudges >= MOST_NUDGES and said.quiet:
            return "the model calls no tool"
        return None

    def begin_anew(self) -> None:
        """A new conversation in the place of one that got long: the prompt, a line for each call so
        far, and the last results. Old answers are not sent again, for a model's thoughts are bound
        to the conversation that they were part of."""
        lines = "\n".join(f"- {line}" for line in self.said.summaries)
        last = "\n\n".join(f"{c.brief}\n{self.said.results[c.id]['text']}" for c in self.said.calls)
        prompt = f"{self.bench.prompt()}\n\n## What you did so far\n\n{lines}\n"
        self.note("began", prompt=f"{prompt}\n## The last results\n\n{last}" if last else prompt)

    @property
    def prompt(self) -> int:
        """Tokens of the next prompt, at most."""
        fixed = len(self.system.encode()) + len(json.dumps(TOOLS)) + UNSEEN
        return self.said.prompt_at_most(fixed)

    def afford(self) -> int:
        """The longest answer that may be asked for, tokens."""
        if self.purse is None:
            return MOST_OUTPUT
        self.purse.spent = self.said.spent
        left = self.purse.output_left(self.prompt)
        if not left:
            raise BudgetSpent(
                f"the next answer may cost more than is left of {self.purse.limits()}; "
                f"used: {self.purse.describe()}"
            )
        return left

    def request(self, most: int) -> dict[str, Any]:
        """System prompt and tools are cached, and so is the conversation as far as it went."""
        cached = {"type": "ephemeral"}
        return {
            **self.settings,
            "max_tokens": most,
            "system": [{"type": "text", "text": self.system, "cache_control": cached}],
            "tools": TOOLS,
            "messages": self.said.messages,
            "cache_control": cached,
        }

    def reply(self, call: Call, text: str, error: bool = False) -> None:
        event = self.note("result", id=call.id, name=call.name, text=text, error=error)
        self.replied(call, event)

    def note(self, kind: str, **data: Any) -> Event:
        event = self.record.append(kind, **data)
        self.said.take(event)
        return event
