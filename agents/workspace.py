"""A worktree and a branch for each candidate, apart from the user's own checkout.

They belong to a repository in the run's folder, which borrows the objects of the user's and writes
nothing there. A candidate starts from the base commit, or from what was kept since, and may write
Python files of `optimized/` only, and of those none that the judge imports: oracle and judge are
the base commit's. What is kept becomes a commit on the candidate's branch; all else is removed.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from harness.certificate import imported
from harness.errors import UserError
from harness.git import Git
from optimized.plan_text import slug
from reports.pr_bundle import Bundle
from reports.pr_patch import wrapped
from reports.pr_record import Committed

WRITABLE = "optimized"
REPOSITORY = "repository"  # in a run's folder; `git fetch RUN/repository kept` has what it kept
KEPT = "kept"
CANDIDATES = "candidate/"
REGULAR = "100644"
GONE = "000000"


class Refused(Exception):
    """A candidate that changes what it may not change; the message names the path."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A checkout of `start` to write in; `locked` are files that belong to the judge."""

    git: Git
    branch: str
    start: str
    locked: frozenset[str]

    @property
    def path(self) -> Path:
        return self.git.root

    def check(self) -> list[str]:
        """The paths that differ from where the candidate started; Refused if one of them may not.

        Ignored files count, too. What Python compiled is left out: it is never committed.
        """
        raw = self.git.read("diff", "--raw", "-z", "--no-renames", self.start)
        changed = list(_changes(raw))
        others = self.git.read("ls-files", "--others", "-z").split("\0")
        new = [p for p in others if p and "__pycache__" not in Path(p).parts]
        for mode, path in [*changed, *((self._mode(path), path) for path in new)]:
            self._require(mode, path)
        return sorted({*(path for _, path in changed), *new})

    def commit(self, message: str) -> str:
        """Commit what was written; the commit's id. Refused as in `check`, UserError if nothing was
        written."""
        if not self.check():
            raise UserError(f"{self.branch} changes nothing, so there is nothing to keep")
        self.git.run("add", "--force", "--all", "--", f"{WRITABLE}/*.py")
        self.git.run("commit", "--quiet", "--message", message, fallback_identity=True)
        made = self.git.run("rev-parse", "HEAD")
        for mode, path in _changes(self.git.read("diff", "--raw", "-z", "--no-renames",
                                                 self.start, made)):  # fmt: skip
            self._require(mode, path)  # the commit itself decides, whatever was written meanwhile
        return made

    def _mode(self, path: str) -> str:
        file = self.path / path
        return REGULAR if file.is_file() and not file.is_symlink() else "other"

    def _require(self, mode: str, path: str) -> None:
        if not path.startswith(f"{WRITABLE}/"):
            raise Refused(f"{path} is not writable: a candidate may change {WRITABLE}/ only")
        if path in self.locked or Path(path).name == "__init__.py":
            raise Refused(f"{path} is not writable: the judge imports it")
        if mode not in (REGULAR, GONE) or Path(path).suffix != ".py":
            raise Refused(f"{path} is not writable: a candidate may write plain Python files only")


class Workspace:
    """The candidates of one run: `git` is the run's own bare repository, `folder` has worktrees."""

    def __init__(self, git: Git, base: str, folder: Path) -> None:
        self.git, self.base, self.folder = git, base, folder

    @classmethod
    def open(cls, root: Path, run: Path, base: str = "HEAD") -> "Workspace":
        """Of the run in directory `run`, on commit `base` of the repository at `root`.

        Removes what an earlier session of the run left unfinished. UserError if git is missing, or
        `root` is no checkout, or has no such commit.
        """
        users = Git.open(root)
        if (commit := users.commit(base)) is None:
            raise UserError(f"{root} has no commit {base}; commit something, or fetch it")
        own = run.resolve() / REPOSITORY
        git = Git(own, own)
        if not (own / "HEAD").exists():
            borrow(users, own)
        workspace = cls(git, commit, run.resolve() / "worktrees")
        workspace.close()
        return workspace

    @property
    def tip(self) -> str:
        """The commit of what was kept last on this base, or the base."""
        kept = self.git.commit(f"refs/heads/{KEPT}")
        if kept is None or self.git.run("merge-base", kept, self.base, allowed=(0, 1)) != self.base:
            return self.base
        return kept

    @cached_property
    def locked(self) -> frozenset[str]:
        """Files of `optimized/` that the base commit's judge imports."""
        with self.checkout(self.base, "base") as tree:
            root = tree.root.resolve()
            files = {
                f for s in (root / "harness").glob("*.py") for f in imported(s, WRITABLE, root)
            }
            paths = {file.relative_to(root).as_posix() for file in files}
        return frozenset(path for path in paths if path.startswith(f"{WRITABLE}/"))

    @contextmanager
    def candidate(self, name: str) -> Iterator[Candidate]:
        """A candidate on what was kept so far; unless it is kept, its branch goes with it."""
        branch = CANDIDATES + slug(name)
        locked, start = self.locked, self.tip
        try:
            with self.checkout(start, slug(name)) as git:
                git.run("switch", "--quiet", "--force-create", branch)
                yield Candidate(git=git, branch=branch, start=start, locked=locked)
        finally:
            if self.git.commit(f"refs/heads/{branch}") != self.tip or self.tip == start:
                self._forget(branch)

    def keep(self, candidate: Candidate, message: str) -> str:
        """Commit the candidate; those after it start there. The commit's id."""
        made = candidate.commit(message)
        self.git.run("update-ref", f"refs/heads/{KEPT}", made)
        return made

    @contextmanager
    def judged(self, commit: str) -> Iterator[Path]:
        """A fresh checkout of a candidate's commit: its kernels with the base commit's oracle and
        judge, whatever became of the worktree that it was written in."""
        with self.checkout(commit, f"judged-{commit[:12]}") as tree:
            yield tree.root

    @contextmanager
    def checkout(self, commit: str, name: str) -> Iterator[Git]:
        """A worktree of `commit` without a branch, for a while."""
        path = self.folder / name
        self.git.run("worktree", "add", "--quiet", "--detach", path, commit)
        about = Git(path).run("rev-parse", "--absolute-git-dir")
        try:
            yield Git(path, Path(about))
        finally:
            self._remove(path)

    def clear(self) -> None:
        """Remove all worktrees."""
        for path in self.folder.glob("*"):
            self._remove(path)
        self.git.run("worktree", "prune", "--expire=now")

    def close(self) -> None:
        """Remove all worktrees, and the branches of candidates that were not kept."""
        self.clear()
        listed = self.git.run(
            "for-each-ref", "--format=%(refname:short)", f"refs/heads/{CANDIDATES}"
        )
        kept = self.git.run("rev-list", self.tip, f"^{self.base}").split()
        for branch in listed.splitlines():
            if self.git.commit(f"refs/heads/{branch}") not in kept:
                self._forget(branch)

    def _forget(self, branch: str) -> None:
        self.git.run("branch", "--quiet", "--delete", "--force", branch, allowed=(0, 1))

    def _remove(self, path: Path) -> None:
        """Also one whose file `.git` was written over."""
        shutil.rmtree(path, ignore_errors=True)
        self.git.run("worktree", "remove", "--force", path, allowed=(0, 128))
        with suppress(OSError):
            self.folder.rmdir()  # the last one's


def commit_files(root: Path, run: Path, bundle: Bundle) -> Committed:
    """Commit the files that a kept change brings, with device, before, after and interval."""
    ground = bundle.kept.ground
    assert ground.commit is not None and ground.files
    name = bundle.folder(run).name
    try:
        work = Workspace.open(root, run, ground.commit)
        with work.candidate(name) as candidate:
            for path, text in ground.files.items():
                file = candidate.path / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(text.encode())
            if not candidate.check():  # a killed session had come so far
                return Committed(index=ground.index, commit=work.tip, branch=KEPT, absent=None)
            made = work.keep(candidate, f"{bundle.subject}\n\n{wrapped(bundle.body)}")
    except (Refused, UserError, OSError) as error:
        why = " ".join(str(error).split())
        return Committed(index=ground.index, commit=None, branch=None, absent=why)
    return Committed(index=ground.index, commit=made, branch=candidate.branch, absent=None)


def borrow(users: Git, own: Path) -> None:
    """Make a bare repository at `own` that reads the objects of the user's."""
    kind = users.run("rev-parse", "--show-object-format")
    users.run("init", "--quiet", "--bare", "--template=", f"--object-format={kind}", own)
    for name, target in (
        ("objects", own / "objects/info/alternates"),
        ("shallow", own / "shallow"),
    ):
        there = users.root / users.run("rev-parse", "--git-path", name)
        if name == "objects":
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(f"{there.resolve()}\n")
        elif there.exists():  # a clone without its history: what it lacks, this one lacks, too
            shutil.copyfile(there, target)


def detached(users: Git, commit: str, folder: Path) -> Path:
    """A checkout of `commit` of the user's repository in `folder`, which has its own repository;
    in the user's nothing is written, and what is borrowed from this one is borrowed from there."""
    own, tree = folder / REPOSITORY, folder / "tree"
    borrow(users, own)
    there = users.root / users.run("rev-parse", "--git-path", "objects")
    shutil.rmtree(own / "objects")
    (own / "objects").symlink_to(there.resolve())
    Git(own, own).run("worktree", "add", "--quiet", "--detach", tree, commit)
    return tree


def _changes(raw: str) -> Iterator[tuple[str, str]]:
    """(mode, path) of each line of `git diff --raw -z --no-renames`: the new mode."""
    words = raw.split("\0")
    for about, path in zip(words[::2], words[1::2], strict=False):
        if about:
            yield about.split()[1], path
