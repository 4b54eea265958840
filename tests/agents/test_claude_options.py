"""What a run with a model is asked for, and what a continued one goes on with."""

from argparse import Namespace
from pathlib import Path

import pytest

from agents import run, search
from agents.claude import options
from agents.claude.ideas import Ideas, key_of
from agents.claude.line import KEYS
from agents.claude.tree import Tree
from harness.errors import UserError
from harness.ledger import Ledger

WORDS = "--target", "decode-bs1", "--proposer", "claude"


@pytest.fixture
def given(monkeypatch):
    """The command line, read and checked, under an environment with a key and `more`."""

    def given(*words: str, **more: str) -> Namespace:
        for name in (*KEYS, "ANTHROPIC_MODEL", "ANTHROPIC_EFFORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"ANTHROPIC_API_KEY": "sk-test", **more}.items():
            monkeypatch.setenv(name, value)
        return run.words([*WORDS, *words])

    return given


def test_model_effort_and_budgets_come_from_flags_then_from_the_environment(given) -> None:
    found = options.of(given("--budget-usd", "2"))
    assert found == options.Options(
        model=options.MODEL, effort=None, budget_usd=2.0, budget_tokens=None
    )
    more = {"ANTHROPIC_MODEL": "claude-opus-5", "ANTHROPIC_EFFORT": "high"}
    found = options.of(given("--budget-usd", "2", "--effort", "low", **more))
    assert found is not None
    assert found.settings == {"model": "claude-opus-5", "output_config": {"effort": "low"}}
    assert options.of(run.words(["--target", "decode-bs1"])) is None
    auto = given("--proposer", "auto", "--budget-tokens", "5000")
    assert options.writes_code(auto) and options.of(auto) is not None


BAD = {
    "no-budget": ((), {}, "say what the model may use up: --budget-usd or --budget-tokens"),
    "no-price": (
        ("--llm-model", "other", "--budget-usd", "2"),
        {},
        "the price of other is not known here, so --budget-usd cannot be held; give --budget-tok",
    ),
    "no-key": (("--budget-usd", "2"), {"ANTHROPIC_API_KEY": ""}, "no key for the Messages API"),
    "effort": (("--budget-usd", "2"), {"ANTHROPIC_EFFORT": "most"}, "ANTHROPIC_EFFORT is 'most'"),
    "below-0": (("--budget-tokens", "-5"), {}, "'-5' is not a whole number of at least 1"),
    "candidates": (("--candidates", "0"), {}, "'0' is not a whole number of at least 1"),
    "plateau": (("--plateau", "0"), {}, "'0' is not a whole number of at least 1"),
    "no-model": (
        ("--proposer", "catalog", "--plateau", "2"),
        {},
        "--plateau counts a model's rounds; give --proposer claude, or auto with --budget-usd",
    ),
    "no-rounds": (
        ("--proposer", "auto", "--candidates", "2"),
        {},
        "--candidates is of a model's rounds; give --proposer claude, or auto with --budget-usd",
    ),
    "unasked-effort": (
        ("--proposer", "auto", "--effort", "low"),
        {},
        "--effort is of a model's rounds; give --propos",
    ),
    "unasked-model": (
        ("--proposer", "auto", "--llm-model", "x"),
        {},
        "--llm-model is of a model's rounds; give --pr",
    ),
    "unread-budget": (("--proposer", "catalog", "--budget-usd", "1"), {}, "--budget-usd is of a"),
    "floor": (("--floor-share", "90"), {}, "'90' is not a share above 0, at most 1"),
    "replayed": (
        ("--proposer", f"replay:{__file__}", "--candidates", "2"),
        {},
        "a record says how many candidates a round has; leave --candidates out",
    ),
    "no-record": (("--proposer", "replay:none.jsonl"), {}, "no trajectory at none.jsonl; a run wi"),
}


@pytest.mark.parametrize("words, more, says", BAD.values(), ids=BAD.keys())
def test_what_is_missing_is_said_in_one_line(words, more, says, given) -> None:
    with pytest.raises(UserError) as error:
        options.of(given(*words, **more))
    assert says in str(error.value)


def test_a_continued_run_keeps_its_model_and_takes_a_new_budget(given) -> None:
    known = options.recorded(given("--budget-usd", "2", "--effort", "high"))
    assert known == {
        "llm_model": options.MODEL,
        "effort": "high",
        "budget_usd": 2.0,
        "budget_tokens": None,
        "candidates": 3,
    }
    again = given("--budget-usd", "3")
    options.recall(again, known)
    assert options.of(again) == options.Options(
        model=options.MODEL, effort="high", budget_usd=3.0, budget_tokens=None
    )
    with pytest.raises(UserError, match="was begun with --llm-model claude-opus-5-5; leave --llm"):
        options.recall(given("--llm-model", "claude-opus-5"), known)
    with pytest.raises(UserError, match="was begun with --candidates 3; leave --candidates out"):
        options.recall(given("--candidates", "2"), known)


def test_a_continued_run_ends_where_it_was_to_end_unless_told_otherwise(given) -> None:
    known = search.recorded(given("--plateau", "2", "--floor-share", "0.8"))
    assert known == {"plateau": 2, "floor_share": 0.8}
    again = given("--plateau", "5")
    search.recall(again, known)
    assert search.limits(again) == search.Limits(plateau=5, floor_share=0.8)
    assert search.limits(given()) == search.Limits(plateau=3, floor_share=0.9)
    over_mcp = given()
    over_mcp.proposer = "mcp"  # there whoever writes the changes says when it ends
    assert search.limits(over_mcp).plateau is None


def test_the_tree_shows_the_project_and_nothing_else(tmp_path: Path) -> None:
    root, candidates = tmp_path / "project", tmp_path / "run" / "candidates"
    for folder in (root / "harness", root / ".git", candidates):
        folder.mkdir(parents=True)
    (root / "harness" / "judge.py").write_text("one\nJudge two\nthree\n")
    (root / ".git" / "config.txt").write_text("judge")
    (tmp_path / "secret.txt").write_text("judge")
    (root / "harness" / "link.txt").symlink_to(tmp_path / "secret.txt")
    (candidates / "a.py").write_text("a = 1\n")
    tree = Tree(candidates, root)
    assert tree.read("harness/judge.py", 2, 3) == (
        "harness/judge.py, lines 2 to 3 of 3\n   2  Judge two\n   3  three"
    )
    assert tree.read("candidates/a.py").endswith("   1  a = 1")
    assert tree.read("harness").splitlines() == [
        "harness: 2 files and folders",
        *("judge.py", "link.txt"),
    ]
    for path in ("../secret.txt", ".git/config.txt", "harness/link.txt", str(tmp_path), "runs/x"):
        with pytest.raises(ValueError, match="is not to be read; what can be: reference, "):
            tree.read(path)
    hits = tree.search("judge").splitlines()
    assert hits == ["1 lines contain 'judge'", "harness/judge.py:2: Judge two"]


def test_an_idea_is_known_by_its_code(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "run")
    ledger.append("run", {})
    ideas = Ideas(ledger)
    assert ideas.write("a.py", "x = 1  # one\n") == "written: candidates/a.py, 1 lines"
    ideas.write("b.py", "# two\nx  =  1\n")
    assert ideas.write("c.py", "x = ").startswith("written, but it is no Python: ")
    ideas.write("d.py", '"""Words."""\nx = 1\n')
    ideas.write("e.py", "x = 2")
    a, b, c, d, e = (ideas.path(f"{name}.py") for name in "abcde")
    assert ideas.key(a) == ideas.key(d) != ideas.key(e)
    assert ideas.key(a) == ideas.key(b) != ideas.key(c)
    ideas.note(a, False, "rejected: it differs")
    assert ideas.judged(b) == (False, "rejected: it differs") and ideas.judged(c) is None
    assert Path(ideas.submit(b)).name == f"b-{ideas.key(a)}.py"
    assert key_of(ideas.submit(b)) == ideas.key(a)
    for name in ("../a.py", "A.py", "a.txt", "submitted/a.py"):
        with pytest.raises(ValueError, match="is no name for a change file"):
            ideas.write(name, "")
