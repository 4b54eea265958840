"""Change files that a run is given: kept in its directory, tried before all else, each once.

None of them is imported here before a sandboxed worker's verdict: what is known of it until then
comes from a worker as data.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from agents.proposers.base import Context, Proposer, Suggestion, suggest_file
from harness.errors import UserError
from harness.ledger import Ledger
from optimized.change import Change

FOLDER = "changes"
EVENT = "given"

# A change file's change, without code, and the backend for this device; None if it broke.
Look = Callable[[str], tuple[Change, str] | None]


def take(files: Sequence[Path], ledger: Ledger) -> list[str]:
    """Copy `files` into the run's directory; the absolute paths of all it was given so far."""
    given = given_to(ledger)
    folder = ledger.directory.resolve() / FOLDER
    new = []
    for file in files:
        copy, text = folder / file.name, file.read_bytes()
        if copy.exists() and copy.read_bytes() != text:
            raise UserError(f"{copy} is another change file of this run; rename {file}")
        folder.mkdir(exist_ok=True)
        copy.write_bytes(text)
        if str(copy) not in given:
            new.append(str(copy))
    if new:
        ledger.append(EVENT, {"files": new})
    return given + new


def given_to(ledger: Ledger) -> list[str]:
    return [file for e in ledger.events() if e.kind == EVENT for file in e.data["files"]]


class Given:
    """Proposes `files`, each until it was tried, in order; then what `rest` proposes."""

    name = "given"

    def __init__(self, files: Sequence[str], rest: Proposer, look: Look) -> None:
        self.files, self.rest, self.look = files, rest, look
        self.looks: dict[str, tuple[Change, str] | None] = {}

    def propose(self, context: Context) -> list[Suggestion]:
        tried = {t.change for t in context.tried}
        left = [file for file in self.files if file not in tried]
        if left:
            return [suggest_file(file, self.seen(file), context) for file in left]
        return self.rest.propose(context)

    def seen(self, file: str) -> tuple[Change, str] | None:
        """Looked at once."""
        if file not in self.looks:
            self.looks[file] = self.look(file)
        return self.looks[file]
