"""Writing reports: whole files or none, and errors that say what to do."""

import os
import tempfile
from pathlib import Path

from harness.errors import UserError


def make_folder(path: Path) -> None:
    """Make `path` where it is not there. UserError where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the folder {path}: {error.strerror}; name another with -o"
        ) from error


def write_text(path: Path, text: str) -> Path:
    """Write `text` as UTF-8 beside `path`, then rename: `path` is never half written."""
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's own mode would hide the report from other users
        os.replace(temporary, path)
        temporary = None
    except FileNotFoundError as error:
        raise UserError(
            f"cannot write {path}: there is no folder {path.parent}; make it, or name another file "
            "with -o"
        ) from error
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; free space, or name another file with -o"
        ) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
    return path
