"""The conversation: ask the model, do what it calls for, until a round of changes is submitted or
it ends."""

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from agents.budget import Budget, BudgetSpent
from agents.claude.ideas import key_of
from agents.claude.line import PATIENCE_S, AskAgain, NoAnswer
from agents.claude.spend import MOST_OUTPUT, Purse
from agents.claude.tools import END_ROUND, TOOLS, complaint
from agents.claude.trajectory import Call, Conversation, Event, Trajectory
from agents.claude.tree import cut

MOST_ANSWERS = 60  # without a submission: the model goes round in circles
MOST_NUDGES = 2  # in a row, to a model that calls no tool
MOST_CONTEXT = 120_000  # tokens of a prompt; then the conversation begins anew, with summaries
SHARE = 4  # one part in so many of that is for the summaries, another for the last results
UNSEEN = 1_000  # tokens that the service adds where there are tools, at most
NUDGE = "Go on with a tool call; end with submit or give_up."
CUT = "Your answer was cut off at its limit of tokens. Go on, in smaller steps."
REFUSED = "the model refused"
ROUNDS = """

## Rounds

A round takes up to {most} candidates: submit one after the other, and call end_round if you have
fewer. Then all are judged and timed at region level. The best goes on to the whole model, the next
best if that is refused. You are told what came of each, with all the judge's words on the best and
on the most instructive failure. Let the candidates of a round differ in what they try."""


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
    def decided(self, files: Sequence[str]) -> str | None: ...


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
        candidates: int = 1,
    ) -> None:
        """`settings` are the request's model and effort. `replied` sees each tool's result. Without
        a `purse` answers cost nothing. A prompt beyond `most_context` tokens is summarised. A round
        takes up to so many `candidates`."""
        self.answers, self.bench, self.record = answers, bench, record
        self.system, self.settings = system, settings
        self.purse, self.budget, self.replied = purse, budget, replied
        self.most_context, self.candidates = most_context, candidates
        self.tools = TOOLS if candidates == 1 else [*TOOLS, END_ROUND]
        self.spent: BudgetSpent | None = None  # no further answer can be afforded
        self.said = Conversation()
        for event in record.events():
            self.said.take(event)
        if (asked := self.said.asked) is not None:  # a process ended while it was answered
            usage = {"input_tokens": asked["prompt"], "output_tokens": asked["most"]}
            self.note("lost", usage=usage)

    def next(self) -> list[tuple[str, str]] | None:
        """The next round of change files to try, with their hypotheses; None when there will be
        none.

        It comes again until the outcome of all is known, which is the result of the call that ended
        the round. BudgetSpent when time, tokens or dollars are used up and what was submitted is
        decided; the conversation can go on later.
        """
        while True:
            call, pending = self.said.waiting, self.said.pending
            if self.is_over(call):
                files = [event["file"] for event in pending]
                outcome = self.bench.decided(files)
                if outcome is None:
                    return [(event["file"], event["hypothesis"]) for event in pending]
                ends = None if call is None else call.id
                self.note("round", files=files, call=ends, outcome=outcome)
            elif self.said.ended is not None:
                return None
            elif self.spent is not None:
                raise self.spent
            elif call is None:
                self.ask_or_end()
            elif (outcome := self.said.outcomes.get(call.id)) is not None:
                self.reply(call, outcome)
            elif call.id in self.said.submitted:
                self.reply(call, self.counted())
            elif (wrong := complaint(call)) is not None:
                self.reply(call, wrong, error=True)
            elif call.name == "submit":
                self.submit(call)
            elif call.name == END_ROUND["name"]:
                self.reply(call, "nothing was submitted in this round", error=True)
            elif call.name == "give_up":
                self.note("ended", reason=f"the model gave up: {call.input['reason']}")
            else:
                self.reply(call, *self.bench.do(call))

    def is_over(self, call: Call | None) -> bool:
        """Whether the round that is open takes no further candidate."""
        if not self.said.pending:
            return False
        asked = call is not None and call.name == END_ROUND["name"] and complaint(call) is None
        full = len(self.said.pending) >= self.candidates
        return full or asked or self.said.ended is not None or self.spent is not None

    def submit(self, call: Call) -> None:
        file, words = self.bench.take(call)
        if file is None:
            self.reply(call, words, error=True)
        elif key_of(file) in [key_of(event["file"]) for event in self.said.pending]:
            self.reply(call, "this round has the same idea already; submit another", error=True)
        else:
            spent = self.said.spent.to_json()
            self.note("submitted", id=call.id, file=file, hypothesis=words, spent=spent)

    def counted(self) -> str:
        count = len(self.said.pending)
        return (
            f"candidate {count} of at most {self.candidates} in this round; submit another that "
            "differs, or call end_round"
        )

    def ask_or_end(self) -> None:
        """One answer; where none can be afforded the open round is decided before that ends it."""
        try:
            self.ask()
        except BudgetSpent as error:
            self.spent = error

    def ask(self) -> None:
        """One answer, unless a limit was reached."""
        said = self.said
        if not said.messages:
            self.begin(self.opening())
        elif (reason := self.at_its_end()) is not None:
            self.note("ended", reason=reason)
            return
        elif said.stop == "model_context_window_exceeded" or self.prompt > self.most_context:
            self.begin_anew()
        elif said.quiet:
            self.note("nudge", text=CUT if said.stop == "max_tokens" else NUDGE)
        self.budget.require()
        most = self.afford()
        if self.purse is not None:
            self.note("asked", prompt=self.prompt, most=most)
        try:
            message = self.answers.ask(self.request(most), PATIENCE_S)
        except AskAgain:
            return  # what was lost is noted, and counts when the next request is reckoned
        except NoAnswer as error:
            self.note("failed", reason=str(error), known=error.known)
            raise
        if message is None:
            self.note("ended", reason="the record has no more answers")
        else:
            self.note("answer", message=message)

    def opening(self) -> str:
        """The first prompt."""
        rounds = ROUNDS.format(most=self.candidates) if self.candidates > 1 else ""
        return self.bench.prompt() + rounds

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

    def begin(self, prompt: str) -> None:
        self.note(
            "began",
            prompt=prompt,
            candidates=self.candidates,
            system=self.system,
            settings=self.settings,
        )

    def begin_anew(self) -> None:
        """A new conversation in the place of one that got long: the prompt, a line for each call so
        far, and the last results, as far as there is room. Old answers are not sent again, for a
        model's thoughts are bound to the conversation that they were part of."""
        room, calls = self.most_context // SHARE, self.said.calls
        lines = "\n".join(newest([f"- {line}" for line in self.said.summaries], room))
        texts = ((c.brief, self.said.results[c.id]["text"]) for c in calls)
        last = "\n\n".join(f"{brief}\n{cut(text, room // len(calls))}" for brief, text in texts)
        prompt = f"{self.opening()}\n\n## What you did so far\n\n{lines}\n"
        self.begin(f"{prompt}\n## The last results\n\n{last}" if last else prompt)

    @property
    def prompt(self) -> int:
        """Tokens of the next prompt, at most."""
        fixed = len(self.system.encode()) + len(json.dumps(self.tools)) + UNSEEN
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
            "tools": self.tools,
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


def newest(lines: Sequence[str], most: int) -> list[str]:
    """The last of `lines` that have at most so many letters; how many are left out."""
    kept: list[str] = []
    for line in reversed(lines):
        most -= len(line) + 1
        if most < 0:
            return [f"- {len(lines) - len(kept)} earlier calls are left out", *reversed(kept)]
        kept.append(line)
    return list(lines)
