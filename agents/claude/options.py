"""What a run's model may use up and how it is asked: flags, environment, and the ledger's record of
them. Torch-free."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.claude import trajectory
from agents.claude.line import require_key
from agents.claude.spend import Purse
from harness.arguments import count, positive
from harness.errors import UserError
from harness.records import Record

AUTO, CLAUDE, REPLAY = "auto", "claude", "replay:"
MODEL = "claude-opus-5-5"
EFFORTS = "low", "medium", "high", "xhigh", "max"
FLAGS = "llm_model", "effort", "candidates", "budget_usd", "budget_tokens"
FIXED = "llm_model", "effort", "candidates"  # for a whole run
CANDIDATES = 3
TO_ASK = "give --proposer claude, or auto with --budget-usd"


@dataclass(frozen=True, kw_only=True)
class Options(Record):
    model: str
    effort: str | None
    budget_usd: float | None
    budget_tokens: int | None
    candidates: int = CANDIDATES  # of a round, at most

    @property
    def settings(self) -> dict[str, Any]:
        """Of each request."""
        found: dict[str, Any] = {"model": self.model}
        if self.effort is not None:
            found["output_config"] = {"effort": self.effort}
        return found

    def purse(self) -> Purse:
        return Purse(model=self.model, most_usd=self.budget_usd, most_tokens=self.budget_tokens)


def add(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("a language model (--proposer claude, or auto with a budget)")
    group.add_argument(
        "--llm-model", help=f"by default ANTHROPIC_MODEL of the environment, or {MODEL}"
    )
    group.add_argument(
        "--effort", choices=EFFORTS, help="by default ANTHROPIC_EFFORT, or the model's own"
    )
    group.add_argument(
        "--candidates",
        type=count,
        metavar="N",
        help=f"how many changes it may submit in a round; default {CANDIDATES}",
    )
    group.add_argument("--budget-usd", type=positive, help="stop before more than this is spent")
    group.add_argument("--budget-tokens", type=count, help="stop before more tokens are used")


def check(a: argparse.Namespace) -> None:
    """UserError for what cannot work."""
    proposer = a.proposer or ""
    replayed = proposer.startswith(REPLAY)
    for name in FLAGS:
        read = asks(a) or replayed and name == "candidates"  # of a record, refused below
        if getattr(a, name) is not None and a.resume is None and not read:
            said = name.replace("_", "-")
            raise UserError(f"--{said} is of a model's rounds; {TO_ASK}, or leave it out")
    if replayed:
        if a.candidates is not None:
            raise UserError("a record says how many candidates a round has; leave --candidates out")
        file = Path(proposer.removeprefix(REPLAY))
        if not file.is_file():
            raise UserError(f"no trajectory at {file}; a run with a model leaves one in its agent/")
        trajectory.answers(file)
        a.proposer = f"{REPLAY}{file.resolve()}"


def writes_code(a: argparse.Namespace) -> bool:
    """Whether what is tried comes from a model."""
    return asks(a) or a.proposer.startswith(REPLAY)


def asks(a: argparse.Namespace) -> bool:
    """Whether a model is asked: as the proposer, or as the last part of `auto` given a budget."""
    limited = a.budget_usd is not None or a.budget_tokens is not None
    return a.proposer == CLAUDE or (a.proposer == AUTO and limited)


def of(a: argparse.Namespace) -> Options | None:
    """For the proposers that need them; None for the others. UserError without key or budget."""
    if not asks(a):
        return None
    effort = a.effort or os.environ.get("ANTHROPIC_EFFORT") or None
    if effort not in (None, *EFFORTS):
        raise UserError(f"ANTHROPIC_EFFORT is {effort!r}; choose one of {', '.join(EFFORTS)}")
    options = Options(
        model=a.llm_model or os.environ.get("ANTHROPIC_MODEL") or MODEL,
        effort=effort,
        budget_usd=a.budget_usd,
        budget_tokens=a.budget_tokens,
        candidates=a.candidates or CANDIDATES,
    )
    options.purse()  # which says what is missing
    require_key()
    return options


def recorded(a: argparse.Namespace) -> dict[str, Any]:
    """For the ledger: what a continued run goes on with."""
    options = of(a)
    if options is None:
        return {}
    return {
        "llm_model": options.model,
        "effort": options.effort,
        "budget_usd": options.budget_usd,
        "budget_tokens": options.budget_tokens,
        "candidates": options.candidates,
    }


def recall(a: argparse.Namespace, options: dict[str, Any]) -> None:
    """Budgets may be given anew; the rest is what the run began with."""
    for name in FLAGS:
        known, given = options.get(name), getattr(a, name)
        if name in FIXED and known is not None and given not in (None, known):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"this run was begun with {flag} {known}; leave {flag} out")
        if given is None:
            setattr(a, name, known)
