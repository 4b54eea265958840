"""Writing reports: whole files or none, and errors that say what to do."""

import os
import tempfile
from pathlib import Path

from harness.errors import UserError


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
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; free space, or name another file with -o"
        ) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
    return path
