"""What a language model used up, its rounds, and why a search ended, wherever a run is shown."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from harness.ledger import Ledger
from harness.records import Verdict
from reports import pr_page, spending
from reports.markdown import markdown
from reports.page import page
from reports.run import Run
from reports.summary import summary
from reports.terminal import print_run
from tests.reports.conftest import paired

KEPT = "residual_boundary"


def spent(file: str | None, new: int, answered: int, usd: float | None) -> dict:
    tokens = {"input": new, "output": answered, "cache_write": 0, "cache_read": 7}
    return {"file": file, "spent": tokens, "usd": usd, "total": tokens}


@pytest.fixture
def paid(cpu_run: Path) -> Path:
    ledger = Ledger.open(cpu_run)
    ledger.append("agent_spent", spent(KEPT, 1000, 200, 0.25))
    ledger.append("agent_spent", spent("never-tried.py", 20, 3, 1.5))
    ledger.append("agent_spent", spent(None, 5, 1, 0.0125))
    return cpu_run


def test_each_attempt_and_all_together_are_told_with_tokens_and_dollars(paid: Path) -> None:
    run = Run.load(paid)
    found = [(row.what, row.spending.words) for row in spending.rows(run)]
    assert found == [
        (KEPT, "1,207 tokens, $0.2500"),
        (spending.UNTRIED, "30 tokens, $1.50"),
        (spending.AFTERWARDS, "13 tokens, $0.0125"),
    ]
    words = markdown(run)
    assert "| 3. residual_boundary | 1,000 | 0 | 7 | 200 | $0.2500 |" in words
    assert "| **in all** | 1,025 | 0 | 21 | 204 | $1.76 |" in words
    html = page(run)
    assert "What the model used up" in html and '<td class="num">$1.76</td>' in html
    told = summary(run)
    assert told["spent"] == {
        "tokens": 1250, "input": 1025, "cache_write": 0, "cache_read": 21, "output": 204,
        "usd": 1.7625,
    }  # fmt: skip
    by_name = {c["name"]: c.get("spent") for c in told["changes"]}
    assert by_name.pop(KEPT)["usd"] == 0.25 and set(by_name.values()) == {None}
    console = Console(record=True, width=200)
    print_run(run, console)
    assert "the language model used up 1,250 tokens, $1.76" in console.export_text()
    told = (pr_page.write(paid, only=3)[0][1] / "PR.md").read_text()
    assert "- Written by a language model: 1,207 tokens, $0.2500 until it was submitted\n" in told


def test_where_a_price_is_unknown_no_sum_is_made_up(paid: Path) -> None:
    Ledger.open(paid).append("agent_spent", spent(None, 1, 0, None))
    run = Run.load(paid)
    total = spending.total(run.spending)
    assert total is not None and (total.usd, total.words) == (None, "1,258 tokens")
    assert "| **in all** | 1,026 | 0 | 28 | 204 | – |" in markdown(run)


def test_without_a_model_nothing_of_it_is_shown(cpu_run: Path) -> None:
    run = Run.load(cpu_run)
    told = json.dumps(summary(run))
    for text in (markdown(run), page(run), told):
        assert "used up" not in text and '"spent"' not in text and "Rounds" not in text
    told = (pr_page.write(cpu_run, only=3)[0][1] / "PR.md").read_text()
    assert "language model" not in told


def test_a_round_shows_what_each_candidate_came_to(cpu_run: Path) -> None:
    ledger = Ledger.open(cpu_run)
    ledger.append("round", {"number": 1, "files": [KEPT, "/run/other.py"]})
    ledger.append("round", {"number": 2, "files": ["alone.py"]})
    passed = Verdict(
        scope="region", passed=True, reason=None, cases=3, seed=0, outputs=(), points=()
    )
    failed = Verdict(
        scope="region", passed=False, reason="no", cases=3, seed=0, outputs=(), points=()
    )
    common = {"region": "r", "call": None, "seconds": 1.0, "worker": "worker 2 (cpu, here)"}
    pair = paired(100.0, 60.0).to_json()
    ledger.append("evaluated", {
        "file": KEPT, "verdict": passed.to_json(), "time": pair, "losses": [], **common
    })  # fmt: skip
    ledger.append("evaluated", {
        "file": "/run/other.py", "verdict": failed.to_json(), "time": None,
        "losses": ["worker 1 was killed by SIGKILL"], **common,
    })  # fmt: skip
    words = markdown(Run.load(cpu_run))
    assert (
        "| 1 | residual_boundary | passed | 100.0 → 60.0 µs, gain 40.0 µs [32.0, 48.0] µs "
        "| 3. kept |" in words
    )
    assert "| 1 | other.py | failed | – | not decided |" in words and "alone.py" not in words
    assert "worker 2 (cpu, here); lost at other.py: worker 1 was killed by SIGKILL |" in words
    assert "not decided" in page(Run.load(cpu_run))


BY = {
    "a checkout of commit abc, each in a worktree of its own": {},
    "the files as they were; not as in commit abc: harness/x.py": {"judging": ["harness/x.py"]},
    "the files as they were: no git": {"absent": "no git"},
}


@pytest.mark.parametrize("words", BY)
def test_what_candidates_were_judged_by_is_said(words: str, cpu_run: Path) -> None:
    event = {"commit": "abc", "others": [], "judging": [], "absent": None, **BY[words]}
    Ledger.open(cpu_run).append("workspace", event)
    assert f"| A model's candidates judged by | {words} |" in markdown(Run.load(cpu_run))


ENDS = {
    "plateau": ("3 rounds in a row kept nothing", "The search ended at a plateau: 3 rounds in a"),
    "floor": ("it needs 90 of 95 us", "The search ended near the floor: it needs 90 of 95 us."),
    "budget": ("5 minutes are used up", "The budget stopped this run: 5 minutes are used up; con"),
}


@pytest.mark.parametrize("reason", ENDS)
def test_why_it_ended_is_said(reason: str, cpu_run: Path) -> None:
    why, says = ENDS[reason]
    Ledger.open(cpu_run).append("stopped", {"reason": reason, "why": why})
    run = Run.load(cpu_run)
    assert f"> {says}" in markdown(run) and says in page(run)
    told = summary(run)
    assert (told["stopped"], told["stopped_why"]) == (reason, why)
    console = Console(record=True, width=200)
    print_run(run, console)
    assert says in console.export_text()
