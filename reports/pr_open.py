"""Opening a run's bundles as pull requests, each on the branch of the one before it.

Branches are made in worktrees of their own; nothing touches a checkout, its index or its HEAD.
"""

import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UserError
from harness.git import Git
from optimized.plan_text import slug
from reports.pr_bundle import PATCH, Bundle

GH_TIMEOUT_S = 300
PREFIX = "kernelwright"


@dataclass(frozen=True, kw_only=True)
class Request:
    """One pull request: `patches` on top of `commit`, or of the branch `onto` where it is open."""

    bundle: Bundle
    branch: str
    commit: str
    patches: tuple[Path, ...]  # all from the commit on
    page: Path
    onto: str | None  # the branch of the change before it


def requests(written: Sequence[tuple[Bundle, Path]], run: str) -> list[Request]:
    """Of the kept changes of the run called `run` that have patches, in order: where one has none,
    those after it have none either."""
    found: list[Request] = []
    for bundle, folder in written:
        commit = bundle.kept.ground.commit
        if bundle.patch is None or commit is None:
            break
        found.append(
            Request(
                bundle=bundle,
                branch=f"{PREFIX}/{slug(run)}/{folder.name}",
                commit=commit,
                patches=(*(found[-1].patches if found else ()), folder.resolve() / PATCH),
                page=folder.resolve() / "PR.md",
                onto=found[-1].branch if found else None,
            )
        )
    return found


def chosen(
    made: Sequence[Request], written: Sequence[tuple[Bundle, Path]], change: int | None
) -> list[Request]:
    """All, or the one of change number `change`; UserError if there is none."""
    found = [r for r in made if change in (None, r.bundle.index)]
    if found:
        return found
    bundles = [bundle for bundle, _ in written if change in (None, bundle.index)]
    if not bundles:
        kept = ", ".join(str(bundle.index) for bundle, _ in written)
        asked = "" if change is None else f"there is no kept change number {change}; "
        raise UserError(f"{asked}{f'kept are number {kept}' if kept else 'the run kept nothing'}")
    raise UserError(f"change {bundles[0].index} cannot be opened: {why_not(bundles[0])}")


def why_not(bundle: Bundle) -> str:
    return bundle.obstacle or (
        "it was not judged in a git checkout, so its patch has no base; apply it with git am "
        "where it belongs"
    )


def commands(request: Request, remote: str) -> list[str]:
    """What `open_request` does, as a shell would."""
    tree = f"../{slug(request.branch)}"
    push = f"git -C {tree} push {remote} {request.branch}"
    patches = shlex.join(map(str, request.patches))
    return [
        f"git worktree add -b {request.branch} {tree} {request.commit}",
        f"git -C {tree} am {patches}",
        push,
        shlex.join(create(request, request.onto)),
        f"git worktree remove {tree}",
    ]


def create(request: Request, base: str | None) -> list[str]:
    """The words for gh: onto the repository's own branch, or `base`."""
    words = ["gh", "pr", "create", "--head", request.branch, "--title", request.bundle.subject]
    return words + ["--body-file", str(request.page)] + (["--base", base] if base else [])


def gh() -> str | None:
    return shutil.which("gh")


def require(root: Path, remote: str) -> Git:
    """All that opening needs, before anything is made; UserError names what is missing."""
    git = Git.open(root)
    if gh() is None:
        raise UserError("gh is not on PATH; install it, or run the commands printed here")
    remotes = git.run("remote").split()
    if remote not in remotes:
        raise UserError(
            f"{root} has no remote called {remote} (it has {', '.join(remotes) or 'none'}); "
            "add it, name another with --remote, or run the commands printed without --open"
        )
    return git


def open_request(git: Git, request: Request, remote: str) -> str:
    """Make the branch, push it and open the pull request; returns what gh says: its address.

    A branch with the same files stays as it is, so that a failed push or a failed gh can be tried
    again. UserError if a branch of that name has others, or a patch does not apply.
    """
    made = make_branch(git, request)
    git.run("push", "--quiet", remote, f"{made}:refs/heads/{request.branch}")
    heads = git.run("ls-remote", "--heads", remote, request.onto) if request.onto else ""
    try:
        done = subprocess.run(
            create(request, request.onto if heads else None),
            cwd=git.root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=GH_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"gh failed: {error}; {request.branch} is pushed, try again") from error
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise UserError(f"gh failed: {said}; {request.branch} is pushed, try again")
    return done.stdout.strip()


def make_branch(git: Git, request: Request) -> str:
    """Apply the patches in a worktree of its own; the branch's commit."""
    if git.commit(request.commit) is None:
        raise UserError(
            f"commit {request.commit} of the run is not in {git.root}; fetch it first, or apply "
            f"{request.patches[-1]} with git am where it belongs"
        )
    with worktree(git, request.commit) as tree:
        tree.run("am", "--quiet", "--committer-date-is-author-date", *request.patches,
                 fallback_identity=True)  # fmt: skip
        for path, text in request.bundle.files.items():
            if tree.file("HEAD", path) != text.encode():
                raise UserError(f"{request.patches[-1]} does not give {path} as the ledger has it")
        made = tree.run("rev-parse", "HEAD")
    there = git.commit(f"refs/heads/{request.branch}")
    if there is None:
        git.run("branch", "--no-track", request.branch, made)
        return made
    if git.run("rev-parse", f"{there}^{{tree}}") != git.run("rev-parse", f"{made}^{{tree}}"):
        raise UserError(f"there is a branch {request.branch} with other files; rename or delete it")
    return there


@contextmanager
def worktree(git: Git, commit: str) -> Iterator[Git]:
    """A detached checkout of `commit` for a while."""
    with tempfile.TemporaryDirectory(prefix="kernelwright-") as folder:
        path = Path(folder) / "tree"
        git.run("worktree", "add", "--quiet", "--detach", path, commit)
        try:
            yield Git(path)
        finally:
            git.run("worktree", "remove", "--force", path)
