"""Candidates in worktrees: what they may write, what becomes of them, what is left alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agents.workspace import Candidate, Refused, Workspace
from harness.errors import UserError
from harness.git import Git

FILES = {
    "harness/judge.py": "from optimized.change import WHO\nfrom optimized import plan\n",
    "optimized/__init__.py": '"""Changes."""\n',
    "optimized/change.py": "from optimized import domain\nWHO = 1\n",
    "optimized/domain.py": "",
    "optimized/plan.py": "",
    "optimized/swiglu.py": "KERNEL = 1\n",
    "README.md": "read\n",
    ".gitignore": "runs/\n__pycache__/\n",
}
MESSAGE = "perf(swiglu): decode 2.00 to 1.00 ms\n\nDevice: a card\n\n  gain 1.00 ms [0.90, 1.10] ms"


@pytest.fixture
def user(tmp_path: Path) -> Git:
    """The user's checkout, with work going on: changed, staged and new files, and a hook."""
    root = tmp_path / "mine"
    subprocess.run(["git", "init", "--quiet", "-b", "main", root], check=True)
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git = Git(root)
    git.run("add", ".")
    git.run("commit", "--quiet", "-m", "base", fallback_identity=True)
    (root / "harness" / "judge.py").write_text("broken, I am editing it\n")
    (root / "optimized" / "swiglu.py").write_text("KERNEL = 'mine'\n")
    git.run("add", "optimized/swiglu.py")
    (root / "notes.txt").write_text("mine\n")
    for hook in ("post-checkout", "pre-commit"):
        (root / ".git" / "hooks" / hook).write_text(f"#!/bin/sh\ntouch {root}/hook-ran\nexit 1\n")
        (root / ".git" / "hooks" / hook).chmod(0o755)
    return git


def state(git: Git) -> dict[str, bytes]:
    """All that belongs to the user: every file, of the repository's own, too."""
    return {str(p): p.read_bytes() for p in sorted(git.root.rglob("*")) if p.is_file()}


def branches(git: Git) -> list[str]:
    return git.run("for-each-ref", "--format=%(refname:short)", "refs/heads").splitlines()


def write(candidate: Candidate, name: str, text: str = "X = 1\n") -> None:
    path = candidate.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_what_is_kept_becomes_a_commit_and_nothing_of_the_users_moves(user, tmp_path):
    before = state(user)
    work = Workspace.open(user.root, tmp_path / "run")
    with work.candidate("03 SwiGLU") as first:
        assert (first.path / "harness/judge.py").read_text() == FILES["harness/judge.py"]
        write(first, "optimized/swiglu.py", "KERNEL = 2\n")
        write(first, "optimized/new.py")
        write(first, "harness/__pycache__/judge.cpython-311.pyc")
        assert first.check() == ["optimized/new.py", "optimized/swiglu.py"]
        kept = work.keep(first, MESSAGE)
    assert branches(work.git) == ["candidate/03-swiglu", "kept"]
    assert work.git.run("log", "-1", "--format=%B", kept).strip() == MESSAGE
    assert work.git.run("rev-parse", f"{kept}~1") == user.run("rev-parse", "main") == work.base
    assert work.git.run("diff", "--name-only", work.base, kept).split() == [
        "optimized/new.py", "optimized/swiglu.py"
    ]  # fmt: skip
    with work.candidate("04 other") as second:
        assert (second.path / "optimized/swiglu.py").read_text() == "KERNEL = 2\n"
        write(second, "optimized/swiglu.py", "KERNEL = 3\n")
    assert branches(work.git) == ["candidate/03-swiglu", "kept"]
    assert work.tip == kept
    work.close()
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["repository"]
    assert state(user) == before
    assert not (user.root / "hook-ran").exists()


def link(candidate: Candidate) -> None:
    (candidate.path / "optimized" / "linked.py").symlink_to("/etc/hostname")


def own_commit(candidate: Candidate) -> None:
    write(candidate, "harness/judge.py", "PASSED = True\n")
    candidate.git.run("add", "harness")
    candidate.git.run("commit", "--quiet", "-m", "mine", fallback_identity=True)


def nested(candidate: Candidate) -> None:
    subprocess.run(["git", "init", "--quiet", candidate.path / "optimized" / "inner"], check=True)


REFUSED = {
    "judge": (lambda c: write(c, "harness/judge.py"), "harness/judge.py is not writable: a cand"),
    "new-file": (lambda c: write(c, "conftest.py"), "conftest.py is not writable: a candidate"),
    "ignored": (lambda c: write(c, "runs/x.py"), "runs/x.py is not writable: a candidate may"),
    "deleted": (lambda c: (c.path / "README.md").unlink(), "README.md is not writable"),
    "own-commit": (own_commit, "harness/judge.py is not writable: a candidate may change"),
    "judges-import": (
        lambda c: write(c, "optimized/domain.py"),
        "optimized/domain.py is not writable: the judge imports it",
    ),
    "package": (lambda c: write(c, "optimized/__init__.py"), "optimized/__init__.py is not wri"),
    "link": (link, "optimized/linked.py is not writable: a candidate may write plain Python"),
    "binary": (lambda c: write(c, "optimized/x.so"), "optimized/x.so is not writable: a cand"),
    "repository": (nested, "optimized/inner/ is not writable: a candidate may write plain"),
}


@pytest.mark.parametrize("act, says", REFUSED.values(), ids=REFUSED.keys())
def test_a_diff_elsewhere_is_refused_by_its_path(act, says, user, tmp_path):
    before = state(user)
    work = Workspace.open(user.root, tmp_path / "run")
    with pytest.raises(Refused, match=says), work.candidate("one") as candidate:
        write(candidate, "optimized/swiglu.py")
        act(candidate)
        work.keep(candidate, MESSAGE)
    assert (branches(work.git), work.tip) == ([], work.base)
    assert state(user) == before


def test_oracle_and_judge_come_from_the_base_commit(user, tmp_path):
    """Also where the candidate's worktree was changed after it was committed, .git included."""
    work = Workspace.open(user.root, tmp_path / "run")
    with work.candidate("one") as candidate:
        write(candidate, "optimized/swiglu.py", "KERNEL = 2\n")
        made = candidate.commit(MESSAGE)
        write(candidate, "harness/judge.py", "PASSED = True\n")
        (candidate.path / ".git").write_text("gitdir: /nowhere\n")
        with work.judged(made) as tree:
            said = subprocess.run(
                [sys.executable, "-c", "import optimized.swiglu as s; print(s.KERNEL, s.__file__)"],
                cwd=tree, capture_output=True, text=True, check=True,
            ).stdout  # fmt: skip
            assert said == f"2 {tree}/optimized/swiglu.py\n"
            assert (tree / "harness/judge.py").read_text() == FILES["harness/judge.py"]
        with pytest.raises(Refused, match="harness/judge.py"):
            candidate.check()
    assert work.git.run("worktree", "list").count("\n") == 0
    assert branches(work.git) == []


def test_what_a_killed_session_left_is_removed_and_what_it_kept_stays(user, tmp_path):
    work = Workspace.open(user.root, tmp_path / "run")
    with work.candidate("one") as candidate:
        write(candidate, "optimized/swiglu.py")
        kept = work.keep(candidate, MESSAGE)
    with work.candidate("two") as candidate:
        write(candidate, "optimized/new.py")
        candidate.commit(MESSAGE)
        again = Workspace.open(user.root, tmp_path / "run")  # as if the first had been killed
        assert not candidate.path.exists()
        assert branches(again.git) == ["candidate/one", "kept"]
        assert again.tip == kept
    user.run("fetch", "--quiet", tmp_path / "run" / "repository", "kept")
    assert user.run("rev-parse", "FETCH_HEAD") == kept


def test_nothing_written_is_nothing_kept(user, tmp_path):
    work = Workspace.open(user.root, tmp_path / "run")
    with pytest.raises(UserError, match="changes nothing"), work.candidate("one") as candidate:
        work.keep(candidate, MESSAGE)


def test_without_a_repository_or_git_it_is_one_line(user, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="is not a git checkout; clone the project with git"):
        Workspace.open(tmp_path, tmp_path / "run")
    with pytest.raises(UserError, match="is not a git checkout"):
        Workspace.open(user.root / "harness", tmp_path / "run")
    with pytest.raises(UserError, match="has no commit nope"):
        Workspace.open(user.root, tmp_path / "run", "nope")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))  # as a hook would set it
    assert Workspace.open(user.root, tmp_path / "run").base == user.run("rev-parse", "main")
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(UserError, match="git is not on PATH; install it"):
        Workspace.open(user.root, tmp_path / "run")


def test_a_clone_without_its_history_will_do(user, tmp_path):
    shallow = tmp_path / "shallow"
    user.run("commit", "--quiet", "--allow-empty", "-m", "second", fallback_identity=True)
    source = f"file://{user.root}"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", source, shallow], check=True)
    work = Workspace.open(shallow, tmp_path / "run")
    with work.candidate("one") as candidate:
        write(candidate, "optimized/swiglu.py")
        kept = work.keep(candidate, MESSAGE)
    assert Workspace.open(shallow, tmp_path / "run").tip == kept
