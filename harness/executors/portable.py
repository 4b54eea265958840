"""Errors between processes: what kind they are, and their text. Torch-free."""

import traceback

from harness.errors import SelfTestError, UserError

MEMORY = "MemoryError", "OutOfMemoryError"  # torch's is told by its name

Packed = tuple[str, str]


def packed(error: Exception) -> Packed:
    if isinstance(error, (UserError, SelfTestError)):
        return type(error).__name__, str(error)
    if type(error).__name__ in MEMORY:
        return MEMORY[0], str(error).partition("\n")[0]
    return "", traceback.format_exc()


def unforeseen(value: Packed) -> bool:
    """Whether it is none that a user's input explains."""
    return value[0] not in (UserError.__name__, SelfTestError.__name__)


def error(value: Packed, doing: str) -> Exception:
    """What to raise for it here."""
    kind, text = value
    for known in (UserError, SelfTestError):
        if kind == known.__name__:
            return known(text)
    if kind == MEMORY[0]:
        return UserError(f"out of memory while a worker {doing}: {text}; use fewer workers")
    return RuntimeError(f"a worker failed while it {doing}:\n{text}")
