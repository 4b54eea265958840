"""What goes wrong because of what a user gave us, and the exit codes that every command shares."""

import traceback
from enum import IntEnum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class ExitCode(IntEnum):
    DONE = 0
    FOUND = 1  # a check found something: a regression, a surviving mutant, a difference
    BAD_INPUT = 2
    OUT_OF_BUDGET = 3  # a budget stopped the run before anything was judged
    SELF_TEST = 4  # the reference itself fails its self-test
    INTERRUPTED = 130


class UserError(Exception):
    """Bad usage or input: one line that names the thing, what is allowed, and what to do next."""


class SelfTestError(Exception):
    """The judge's replay does not reproduce the reference, so no verdict can be trusted."""


def raised_at(error: BaseException) -> str:
    """The innermost frame in this repository, as " (FILE:LINE)"; nothing where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts:
            return f" ({path.relative_to(ROOT)}:{frame.lineno})"
    return ""
