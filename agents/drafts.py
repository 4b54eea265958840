"""A model's candidates as commits: each is written in a worktree and on a branch of its own, and
judged as it was committed there, by the oracle and the judge of the base commit.

Worktrees belong to the run's repository (`agents.workspace`); the user's checkout is never touched.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agents.workspace import WRITABLE, Workspace
from harness.certificate import ROOT, place_of
from harness.confine import PACKAGES
from harness.errors import UserError
from harness.git import blob_id
from harness.ledger import Ledger

EVENT = "workspace"  # the ledger's
ORIGIN = "KERNELWRIGHT_ORIGIN"  # of the environment: the user's checkout (`agents.base`)
CHECKOUTS = "checkouts"  # in a run's folder, beside the candidates' worktrees
SHOWN = 3


@dataclass
class Drafts:
    """Of one run. `root` is a checkout of the base commit that workers run from: that of this
    process (`agents.base`), or else one of their own. It is None where the files of oracle and
    judge are not as in that commit, or there is no commit."""

    work: Workspace | None
    root: Path | None
    opened: contextlib.ExitStack

    @classmethod
    def open(cls, ledger: Ledger, say: Callable[[str], None], root: Path = ROOT) -> "Drafts":
        """On the commit of the checkout at `root`, in the run's folder; says and records what
        candidates are judged by."""
        stack = contextlib.ExitStack()
        try:
            work = Workspace.open(root, ledger.directory)
            others = differing(work, origin() or root)
        except UserError as error:
            say(f"candidates have no worktrees: {error}")
            ledger.append(
                EVENT, {"commit": None, "others": [], "judging": [], "absent": str(error)}
            )
            return cls(None, None, stack)
        judging = [path for path in others if path in work.locked or not inside(path)]
        judging = judging if origin() is None else []
        told = {"commit": work.base, "others": others, "judging": judging, "absent": None}
        ledger.append(EVENT, told)
        if judging:
            say(
                "candidates are judged by the files as they are; not as in commit "
                f"{work.base[:12]}: {named(judging)}"
            )
            return cls(work, None, stack)
        without = f", without what was edited: {named(others)}" if others else ""
        say(f"candidates are judged by a checkout of commit {work.base[:12]}{without}")
        if origin() is not None:
            return cls(work, root, stack)
        own = Workspace(work.git, work.base, ledger.directory.resolve() / CHECKOUTS)
        own.clear()
        tree = stack.enter_context(own.checkout(work.base, "base"))
        return cls(work, tree.root, stack)

    @contextlib.contextmanager
    def draft(self, file: str, hypothesis: str) -> Iterator[str]:
        """Where a submitted file stands in a fresh checkout of its candidate's commit, for a while;
        the file itself where there are no worktrees. Refused for a change elsewhere."""
        if self.work is None:
            yield file
            return
        path, text = place_of(file), Path(file).read_bytes()
        with self.work.candidate(Path(file).stem) as candidate:
            place = candidate.path / path
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(text)
            made = candidate.commit(f"candidate: {Path(file).stem}\n\n{hypothesis}")
            with self.work.judged(made) as tree:
                yield str(tree / path)

    def close(self) -> None:
        self.opened.close()


def origin() -> Path | None:
    """The user's checkout, if this process runs from one of the base commit."""
    found = os.environ.get(ORIGIN)
    return None if found is None else Path(found)


def inside(path: str) -> bool:
    """Whether a candidate may write there."""
    return path.startswith(f"{WRITABLE}/")


def named(paths: Sequence[str]) -> str:
    return ", ".join(paths[:SHOWN]) + (" and others" if len(paths) > SHOWN else "")


def differing(work: Workspace, root: Path) -> list[str]:
    """Files of oracle, judge and catalogue that are not as in the base commit."""
    blobs = {
        path: blob
        for path, blob in work.git.blobs(work.base).items()
        if path.partition("/")[0] in PACKAGES and path.endswith(".py")
    }
    here = {
        file.relative_to(root).as_posix(): file
        for package in PACKAGES
        for file in (root / package).rglob("*.py")
    }
    return sorted(
        path
        for path in {*blobs, *here}
        if path not in here or blobs.get(path) != blob_id(here[path].read_bytes())
    )
