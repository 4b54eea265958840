"""Git as a program, torch-free: one repository, errors as one line, the user's settings left out.

Nothing here touches a checkout, its index or its HEAD: whoever writes does so in a worktree.
"""

import hashlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UserError

# Hooks and signing keys are the user's, and meant for the user's own commits.
SETTINGS = (
    "core.hooksPath=/dev/null",
    "commit.gpgSign=false",
    "core.autocrlf=false",
    "apply.whitespace=nowarn",
    "gc.auto=0",
)
WHO = "kernelwright"
WHERE = f"{WHO}@localhost"
# Set by hooks and aliases for the repository that called them.
CALLERS = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_NAMESPACE",
    "GIT_PREFIX",
)


@dataclass(frozen=True)
class Git:
    """The repository that `root` is a checkout or a worktree of."""

    root: Path
    # Where git keeps what it knows of the checkout (`root` itself if that is a bare repository);
    # None: git finds it, by a file that whoever writes there can change.
    git_dir: Path | None = None

    @classmethod
    def open(cls, root: Path) -> "Git":
        """UserError if git is missing, or `root` is not the top of a git checkout."""
        git = cls(root)
        top = git.run("rev-parse", "--show-toplevel", allowed=(0, 128))
        if not top or Path(top).resolve() != root.resolve():
            raise UserError(f"{root} is not a git checkout; clone the project with git")
        return git

    def run(
        self, *words: str | Path, allowed: tuple[int, ...] = (0,), fallback_identity: bool = False
    ) -> str:
        """What a git command prints, without the last line's end; UserError with git's own words
        if its exit code is not `allowed`."""
        return self.read(*words, allowed=allowed, fallback_identity=fallback_identity).rstrip("\n")

    def read(
        self, *words: str | Path, allowed: tuple[int, ...] = (0,), fallback_identity: bool = False
    ) -> str:
        """As `run`, but all of it, as it is."""
        settings = [word for setting in SETTINGS for word in ("-c", setting)]
        if fallback_identity:
            settings += self._identity()
        if self.git_dir is not None:
            settings.append(f"--git-dir={self.git_dir}")
        if self.git_dir not in (None, self.root):  # not bare
            settings.append(f"--work-tree={self.root}")
        command = ["git", *settings, *map(str, words)]
        try:
            done = subprocess.run(
                command, cwd=self.root, env=_environment(), stdin=subprocess.DEVNULL,
                capture_output=True,
            )  # fmt: skip
        except (FileNotFoundError, NotADirectoryError) as error:
            what = "git is not on PATH; install it" if self.root.is_dir() else f"no {self.root}"
            raise UserError(what) from error
        if done.returncode not in allowed:
            said = done.stderr.decode(errors="replace") or done.stdout.decode(errors="replace")
            lines = [line for line in said.splitlines() if not line.startswith("hint:")]
            raise UserError(f"git {words[0]} failed: {' '.join(' '.join(lines).split())}")
        return done.stdout.decode(errors="surrogateescape")

    def commit(self, name: str) -> str | None:
        """The full id of the commit called `name`; None if there is none."""
        found = self.run(
            "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", allowed=(0, 1, 128)
        )
        return found or None

    def file(self, commit: str, path: str) -> bytes | None:
        """A file as it is in `commit`; None if it is not there."""
        listed = self.run("ls-tree", commit, "--", path)
        if not listed:
            return None
        return self.read("cat-file", "blob", listed.split()[2]).encode(errors="surrogateescape")

    def blobs(self, commit: str) -> dict[str, str]:
        """The id of every file of `commit`, as `blob_id` gives it, by path."""
        listed = self.read("ls-tree", "-r", "-z", commit).split("\0")
        rows = [line.partition("\t") for line in listed if line]
        return {path: about.split()[2] for about, _, path in rows}

    def _identity(self) -> list[str]:
        """The user's name if git knows it: a worktree's commits need some committer."""
        name = self.run("config", "user.name", allowed=(0, 1))
        email = self.run("config", "user.email", allowed=(0, 1))
        return ["-c", f"user.name={name or WHO}", "-c", f"user.email={email or WHERE}"]


def blob_id(data: bytes) -> str:
    """The id that git gives a file with these bytes."""
    return hashlib.sha1(b"blob %d\0%s" % (len(data), data), usedforsecurity=False).hexdigest()


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in CALLERS}
    return kept | {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
