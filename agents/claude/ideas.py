"""Change files that a model wrote: where they lie, and which were judged already.

A file is known by its content without comments, docstrings and layout, together with the changes
that the run has kept: the same file against the same model is the same idea. Torch-free.
"""

import ast
import hashlib
import re
from pathlib import Path

from agents.claude.tree import CANDIDATES
from agents.history import History
from harness.ledger import Ledger
from harness.records import Attempt

NAME = re.compile(r"[a-z][a-z0-9_]{0,39}\.py")
SUBMITTED = "submitted"
EVENT = "agent_verdict"
MOST_BYTES = 200_000
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


class Ideas:
    """The candidates of the run that `ledger` belongs to."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.history = ledger, History(ledger)
        self.folder = ledger.directory.resolve() / CANDIDATES

    def path(self, file: str) -> Path:
        """Of a change file by its bare name; ValueError for any other, or if nobody wrote it."""
        found = self.folder / self.checked(file)
        if not found.is_file():
            raise ValueError(f"there is no {file}; write it with write_change first")
        return found

    def checked(self, file: str) -> str:
        name = file.removeprefix(f"{CANDIDATES}/")
        if not NAME.fullmatch(name):
            raise ValueError(
                f"{file!r} is no name for a change file; allowed are small letters, digits and "
                "underscores, at most 40, then .py"
            )
        return name

    def write(self, file: str, text: str) -> str:
        name = self.checked(file)
        if len(text.encode()) > MOST_BYTES:
            raise ValueError(f"a change file may have {MOST_BYTES:,} bytes")
        self.folder.mkdir(exist_ok=True)
        (self.folder / name).write_text(text)
        try:
            ast.parse(text)
        except (SyntaxError, ValueError) as error:
            return f"written, but it is no Python: {error}"
        return f"written: {CANDIDATES}/{name}, {len(text.splitlines())} lines"

    def key(self, path: Path) -> str:
        text = normalised(path.read_text())
        kept = [attempt.name for attempt in self.history.kept]
        return hashlib.sha256(repr((text, kept)).encode()).hexdigest()[:12]

    def submit(self, path: Path) -> str:
        """A copy that stays as it is, named by its key; its absolute path."""
        folder = self.folder / SUBMITTED
        folder.mkdir(exist_ok=True)
        copy = folder / f"{path.stem}-{self.key(path)}.py"
        copy.write_bytes(path.read_bytes())
        return str(copy)

    def attempt(self, file: str) -> Attempt | None:
        """What came of a submitted file, by its path."""
        return next((a for a in self.history.attempts if a.name == file), None)

    def tried(self, path: Path) -> Attempt | None:
        """An attempt with the same idea."""
        end = f"-{self.key(path)}.py"
        return next((a for a in self.history.attempts if a.name.endswith(end)), None)

    def judged(self, path: Path) -> tuple[bool, str] | None:
        """Whether the same idea passed `verify`, and in what words, if it was judged."""
        key, found = self.key(path), None
        for event in self.ledger.events():
            if event.kind == EVENT and event.data["key"] == key:
                found = event.data["passed"], event.data["text"]
        return found

    def note(self, path: Path, passed: bool, text: str) -> None:
        data = {"key": self.key(path), "file": path.name, "passed": passed, "text": text}
        self.ledger.append(EVENT, data)


def normalised(text: str) -> str:
    """What a file does: its syntax tree without docstrings; of no Python, its letters."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return text
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, DOCUMENTED) and body and _is_text(body[0]):
            del body[0]
    return ast.dump(tree)


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def key_of(file: str) -> str:
    """The key of a submitted file, by its path."""
    return Path(file).stem.rpartition("-")[2]
