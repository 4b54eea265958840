"""A run with a model works from a checkout of the base commit, whatever is edited meanwhile."""

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from agents import base, drafts
from harness.ledger import Ledger
from tests.agents import killers
from tests.agents.agent_run import committed, environment

PROGRAM = """
import sys
from agents import base, run
from harness import cli


def main():
    base.enter(run.words(None))
    from harness import certificate, wire
    words = certificate.ROOT, wire.__file__, "torch" in sys.modules, sys.path[0]
    print(*words, sep="\\n")
    return 0


sys.exit(cli.run(main))
"""


@pytest.fixture
def told(tmp_path: Path):
    """What the program says in a checkout, line by line, and what it leaves behind."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "tmp").mkdir()

    def told(root: Path, *words: str) -> tuple[list[str], str]:
        own = environment(None, root) | {"TMPDIR": str(tmp_path / "tmp"), "ANTHROPIC_API_KEY": "k"}
        line = [sys.executable, str(tmp_path / "program.py"), *words]
        done = subprocess.run(line, env=own, cwd=tmp_path, capture_output=True, text=True)
        assert list((tmp_path / "tmp").iterdir()) == []
        return done.stdout.splitlines(), done.stderr

    return told


def test_a_checkout_in_use_is_left_alone(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    used, made = tmp_path / f"{base.PREFIX}1-used", tmp_path / f"{base.PREFIX}1-being-made"
    for folder in (used, made):
        folder.mkdir()
    with (used / base.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        base.remove_left()
        assert used.exists() and made.exists()
    base.remove_left()
    assert not used.exists() and made.exists()


def test_the_program_begins_anew_from_the_commit_that_the_run_began_on(tmp_path, told) -> None:
    git = committed(tmp_path / "mine")
    first, judge = git.commit("HEAD"), git.root / "harness" / "wire.py"
    judge.write_text("raise RuntimeError('this is being edited')\n")
    model = "--target", "decode-bs1", "--proposer", "claude", "--budget-usd", "1"
    left = tmp_path / "tmp" / f"{base.PREFIX}1-killed"
    left.mkdir()
    (left / base.LOCK).touch()
    (root, wire, heavy, path), said = told(git.root, *model)
    assert (said, heavy) == ("", "False") and root == path != str(git.root)
    assert root.startswith(str(tmp_path / "tmp" / base.PREFIX)) and root.endswith("/tree")
    assert wire == f"{root}/harness/wire.py"

    # Whoever proposes what is in optimized/ works with the files as they are.
    _, said = told(git.root, "--target", "decode-bs1", "--proposer", "catalog")
    assert said.endswith("RuntimeError: this is being edited\n")

    # A continued run stays where it began, whatever was committed since.
    git.run("commit", "--quiet", "--all", "-m", "broken", fallback_identity=True)
    _, said = told(git.root, *model)
    assert said.endswith("RuntimeError: this is being edited\n")
    ledger = killers.begun(tmp_path / "run")
    text = ledger.path.read_text().replace('"proposer": "killers"', '"proposer": "claude"', 1)
    ledger.path.write_text(text)
    ledger.append(drafts.EVENT, {"commit": first, "others": [], "judging": [], "absent": None})
    again = "--resume", str(ledger.directory), "--budget-usd", "1"
    (root, wire, *_), said = told(git.root, *again)
    assert said == "" and wire == f"{root}/harness/wire.py"
    assert base.began_on(Ledger(ledger.directory)) == first

    ledger.path.write_text(ledger.path.read_text().replace(str(first), "0" * 40))
    out, said = told(git.root, *again)
    assert out == [] and said == (
        f"error: {ledger.directory} began on commit {'0' * 40}, which {git.root} does not have; "
        "fetch it, or start a new run\n"
    )

    os.rename(git.root / ".git", tmp_path / "gone")  # then the files are used as they are
    judge.write_text("")
    (root, wire, *_), said = told(git.root, *model)
    assert (root, wire, said) == (str(git.root), f"{git.root}/harness/wire.py", "")
