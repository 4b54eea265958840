"""A model's candidates as commits in worktrees, and what they are judged by."""

import subprocess
from pathlib import Path

import pytest

from agents.drafts import EVENT, Drafts
from agents.workspace import Refused
from harness.git import Git
from harness.ledger import Ledger
from tests.agents.test_workspace import (
    FILES,
    branches,
    state,
    user,  # noqa: F401 - a fixture
)

TEXT = "CHANGE = 1\n"


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger.create(tmp_path / "run")
    ledger.append("run", {"schema": 1})
    return ledger


@pytest.fixture
def submitted(ledger: Ledger) -> Path:
    file = ledger.directory / "candidates" / "submitted" / "fast-12ab.py"
    file.parent.mkdir(parents=True)
    file.write_text(TEXT)
    return file


def test_a_candidate_is_judged_as_committed_on_the_base_commit(
    user: Git,  # noqa: F811
    ledger: Ledger,
    submitted: Path,
    tmp_path: Path,
) -> None:
    subprocess.run(["git", "clone", "--quiet", user.root, tmp_path / "clean"], check=True)
    before = state(Git(tmp_path / "clean"))
    said: list[str] = []
    drafts = Drafts.open(ledger, said.append, tmp_path / "clean")
    base = user.commit("main")
    assert base is not None and drafts.work is not None
    assert said == [f"candidates are judged by a checkout of commit {base[:12]}"]
    assert drafts.root is not None
    assert drafts.root == ledger.directory / "checkouts" / "base"
    assert (drafts.root / "harness/judge.py").read_text().startswith("from optimized")
    with drafts.draft(str(submitted), "fewer launches") as file:
        tree = Git(Path(file).parents[1])
        assert (Path(file).name, Path(file).read_text()) == ("fast_12ab.py", TEXT)
        assert tree.run("diff", "--name-only", base, "HEAD") == "optimized/fast_12ab.py"
        assert tree.run("log", "-1", "--format=%B") == "candidate: fast-12ab\n\nfewer launches"
        assert branches(drafts.work.git) == ["candidate/fast-12ab"]
    assert branches(drafts.work.git) == []
    # A killed session leaves its checkout; the next one makes it anew.
    again = Drafts.open(ledger, said.append, tmp_path / "clean")
    assert again.root == drafts.root and again.root is not None
    assert (again.root / "optimized" / "swiglu.py").read_text() == "KERNEL = 1\n"
    again.close()
    assert sorted(p.name for p in ledger.directory.iterdir()) == [
        "candidates", "ledger.jsonl", "repository"
    ]  # fmt: skip
    assert state(Git(tmp_path / "clean")) == before


def test_where_the_checkout_is_edited_the_files_that_differ_are_named(
    user: Git,  # noqa: F811
    ledger: Ledger,
    submitted: Path,
) -> None:
    before, said = state(user), []
    drafts = Drafts.open(ledger, said.append, user.root)
    assert drafts.root is None
    assert said[0].endswith(": harness/judge.py")
    recorded = ledger.last(EVENT)
    assert recorded is not None
    assert recorded["others"] == ["harness/judge.py", "optimized/swiglu.py"]
    with drafts.draft(str(submitted), "") as file:
        assert Path(file).read_text() == TEXT
        assert (Path(file).parent / "swiglu.py").read_text() == "KERNEL = 1\n"
    drafts.close()
    assert state(user) == before


def test_a_kernel_that_is_being_edited_is_left_out(
    user: Git,  # noqa: F811
    ledger: Ledger,
) -> None:
    (user.root / "harness" / "judge.py").write_text(FILES["harness/judge.py"])
    said: list[str] = []
    drafts = Drafts.open(ledger, said.append, user.root)
    assert said[0].endswith(", without what was edited: optimized/swiglu.py")
    assert drafts.root is not None
    assert (drafts.root / "optimized" / "swiglu.py").read_text() == FILES["optimized/swiglu.py"]
    drafts.close()
    (user.root / "optimized" / "domain.py").write_text("the judge imports it\n")
    assert Drafts.open(ledger, said.append, user.root).root is None
    assert said[1].endswith(": optimized/domain.py")


def test_a_candidate_in_the_place_of_what_the_judge_imports_is_refused(
    user: Git,  # noqa: F811
    ledger: Ledger,
    submitted: Path,
) -> None:
    drafts = Drafts.open(ledger, lambda _: None, user.root)
    forged = submitted.with_name("change.py")
    forged.write_text("WHO = 2\n")
    with pytest.raises(Refused, match=r"optimized/change\.py is not writable: the judge imports"):
        with drafts.draft(str(forged), ""):
            pass
    assert drafts.work is not None and branches(drafts.work.git) == []


def test_without_a_repository_candidates_are_judged_as_they_are(
    ledger: Ledger, submitted: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    drafts = Drafts.open(ledger, said.append, tmp_path)
    assert drafts.root is None and "is not a git checkout" in said[0]
    with drafts.draft(str(submitted), "") as file:
        assert file == str(submitted)
