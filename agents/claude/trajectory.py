"""The record of a conversation in the run's directory, and the conversation that it amounts to.

Each event is on the disk before anything is done about it, so that a killed run goes on without
paying twice. A conversation is nothing but its record, folded. Torch-free.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.claude.received import MALFORMED
from agents.claude.spend import Spent
from harness.errors import UserError

FOLDER, NAME = "agent", "trajectory.jsonl"
Event = dict[str, Any]
Message = dict[str, Any]


class Trajectory:
    """Append-only JSONL: `began`, `asked`, `retry`, `lost`, `failed`, `answer`, `result`,
    `submitted`, `round`, `nudge`, `compared`, `ended`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_run(cls, directory: Path) -> "Trajectory":
        folder = directory / FOLDER
        folder.mkdir(exist_ok=True)
        return cls(folder / NAME)

    def append(self, kind: str, **data: Any) -> Event:
        event = {"kind": kind, "time_s": round(time.time(), 3), **data}
        whole = self._whole()
        with self.path.open("a") as file:
            file.truncate(whole)  # what a kill left unfinished
            file.write(json.dumps(event) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return event

    def _whole(self) -> int:
        """Bytes up to the end of the last whole line."""
        return self.path.read_bytes().rfind(b"\n") + 1 if self.path.exists() else 0

    def events(self) -> Iterator[Event]:
        if not self.path.exists():
            return
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                return
            try:
                event = json.loads(line.decode())
                event["kind"]
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(
                    f"{self.path}:{number} is no line of a trajectory; "
                    "restore it, or give a run's agent/trajectory.jsonl"
                ) from error
            yield event


def answers(path: Path) -> list[Message]:
    """The model's answers in a record, in order; UserError for a file that has none, or broken
    ones."""
    found: list[Message] = [
        e.get("message", {}) for e in Trajectory(path).events() if e["kind"] == "answer"
    ]
    hint = "give a run's agent/trajectory.jsonl"
    if not found:
        raise UserError(f"{path} holds no answer of a model; {hint}")
    for number, message in enumerate(found, start=1):
        parts = message if isinstance(message, dict) else {}
        if not (isinstance(parts.get("usage"), dict) and isinstance(parts.get("content"), list)):
            raise UserError(f"{path}: answer {number} has no content or no usage; {hint}")
    return found


@dataclass(frozen=True)
class Call:
    """A tool call of the model; `malformed` is what it sent where that was no JSON."""

    id: str
    name: str
    input: dict[str, Any]
    malformed: str | None = None

    @property
    def brief(self) -> str:
        words = (f"{name}={repr(value)[:60]}" for name, value in self.input.items())
        return f"{self.name}({', '.join(w for w in words if not w.startswith('text='))})"


@dataclass
class Conversation:
    """What was said so far."""

    messages: list[Message] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)  # of the last answer
    results: dict[str, Event] = field(default_factory=dict)  # by call
    submitted: dict[str, Event] = field(default_factory=dict)  # by call
    pending: list[Event] = field(default_factory=list)  # submitted in the round that is open
    outcomes: dict[str, str] = field(default_factory=dict)  # of rounds, by the call that ended them
    summaries: list[str] = field(default_factory=list)  # one line for each call so far
    stop: str = ""  # why the last answer ended
    details: dict[str, Any] = field(default_factory=dict)
    ended: str | None = None
    asked: Event | None = None  # what is under way, with what it may cost, tokens
    spent: Spent = Spent()
    answers: int = 0
    since_submit: int = 0  # answers
    nudges: int = 0  # in a row
    quiet: bool = False  # the last answer called no tool, and was not replied to
    size: int = 0  # of the last prompt and its answer, tokens
    known: int = 0  # bytes of the messages that `size` covers

    def take(self, event: Event) -> None:
        """Go on by one event of the record."""
        match event["kind"]:
            case "began":
                self.messages = [{"role": "user", "content": event["prompt"]}]
                self.calls, self.results, self.size, self.known = [], {}, 0, 0
                self.quiet = False
            case "asked":
                self.asked = event
            case "answer":
                self.asked = None
                self._answer(event["message"])
            case "result":
                self._result(event)
            case "submitted":
                self.submitted[event["id"]] = event
                self.pending.append(event)
                self.since_submit = 0
            case "round":
                self.pending = []
                if event["call"] is not None:
                    self.outcomes[event["call"]] = event["outcome"]
                elif self.ended is None:  # a budget ended the round
                    self.messages.append({"role": "user", "content": event["outcome"]})
            case "nudge":
                self.messages.append({"role": "user", "content": event["text"]})
                self.nudges, self.quiet = self.nudges + 1, False
            case "retry" | "lost":
                self._lost(event)
            case "failed":
                self.asked = None if event["known"] else self.asked
            case "ended":
                self.ended = event["reason"]

    def _answer(self, message: dict[str, Any]) -> None:
        spent = Spent.of(message["usage"])
        self.spent += spent
        self.answers += 1
        self.since_submit += 1
        self.stop = str(message.get("stop_reason"))
        self.details = message.get("stop_details") or {}
        if message["content"]:
            self.messages.append({"role": "assistant", "content": message["content"]})
        bad = message.get(MALFORMED, {})
        found = [b for b in message["content"] if b["type"] == "tool_use"]
        found = [] if self.stop == "refusal" else found  # what it broke off is not done
        self.calls = [Call(b["id"], b["name"], b["input"], bad.get(b["id"])) for b in found]
        self.results = {}
        self.quiet = not self.calls
        self.nudges = self.nudges if self.quiet else 0
        self.size, self.known = spent.tokens, self.bytes()

    def _lost(self, event: Event) -> None:
        """An answer that broke off; what was refused costs nothing, and is sent again."""
        usage = event.get("usage") or {}
        if not usage and self.asked is not None and event.get("sent"):
            usage = {
                "input_tokens": self.asked["prompt"]
            }  # nothing came, but it may have been read
        self.spent += Spent.of(usage)
        self.asked = None if usage else self.asked

    def _result(self, event: Event) -> None:
        self.results[event["id"]] = event
        call = next(c for c in self.calls if c.id == event["id"])
        first = next(iter(event["text"].splitlines()), "")
        self.summaries.append(f"{call.brief}: {first[:200]}")
        if self.waiting is None:
            blocks = [self._block(self.results[c.id]) for c in self.calls]
            self.messages.append({"role": "user", "content": blocks})

    @staticmethod
    def _block(event: Event) -> dict[str, Any]:
        block = {"type": "tool_result", "tool_use_id": event["id"], "content": event["text"]}
        return {**block, "is_error": True} if event.get("error") else block

    @property
    def waiting(self) -> Call | None:
        """The first call of the last answer that has no result."""
        return next((c for c in self.calls if c.id not in self.results), None)

    def bytes(self) -> int:
        return len(json.dumps(self.messages).encode())

    def prompt_at_most(self, fixed: int) -> int:
        """Tokens that the next request has at most; `fixed` are the bytes of what precedes the
        messages."""
        if not self.size:
            return fixed + self.bytes()
        return self.size + self.bytes() - self.known
