"""What words of a command line may say: numbers in their range, files and folders that can be
written. Each is checked before anything that takes long. Torch-free."""

import argparse
import contextlib
import math
import os
import tempfile
from pathlib import Path

from harness.errors import UserError

MOST_SEED = 2**31 - 1  # noise replays multiply it, and NumPy and Optuna take 32 bits


def whole(text: str) -> int:
    """A whole number, at least 0."""
    return _integer(text, 0, None)


def count(text: str) -> int:
    """A whole number, at least 1."""
    return _integer(text, 1, None)


def counts(text: str) -> list[int]:
    """Counts with commas between them."""
    return [count(part) for part in text.split(",")]


def seed(text: str) -> int:
    return _integer(text, 0, MOST_SEED)


def positive(text: str) -> float:
    """A finite number above 0."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return value


def share(text: str) -> float:
    """A number above 0, at most 1."""
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0, at most 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan  # which is in no range


def _integer(text: str, least: int, most: int | None) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least or (most is not None and value > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {allowed}")
    return value


def require_folder(folder: Path | None, flag: str = "--out") -> None:
    """UserError unless files can be written into `folder`, which need not be there yet, and is not
    made: bad input elsewhere leaves nothing behind."""
    if folder is None:
        return
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{flag} {folder}: {error.strerror}; name a folder to write into") from (
            error
        )
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()


def require_file(file: Path | None, flag: str = "-o") -> None:
    """UserError unless `file` can be written; it is not touched."""
    if file is None:
        return
    if file.is_dir():
        raise UserError(f"{flag} {file} is a folder; name a file")
    if not file.parent.is_dir():
        raise UserError(
            f"{flag} {file}: there is no folder {file.parent}; make it, or name another file"
        )
    try:
        if not file.exists():
            with tempfile.TemporaryFile(dir=file.parent):
                pass
        elif not os.access(file, os.W_OK):
            raise UserError(f"{flag} {file} is not to be written to; name another file")
    except OSError as error:
        raise UserError(f"{flag} {file}: {error.strerror}; name another file") from error
