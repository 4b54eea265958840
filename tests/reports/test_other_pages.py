"""A kept change's other targets on the page and in report.md: a loss is not to be overlooked."""

from pathlib import Path

import pytest

from harness.records import Status
from reports.markdown import markdown
from reports.run import Run
from tests.reports.test_other_targets import told  # noqa: F401
from tests.reports.test_pages import html_text, in_order

REST = "not measured: the budget of 5 minutes was used up"  # of the change that was kept next


def test_the_page_says_under_the_table_what_got_slower_elsewhere(told: Path) -> None:  # noqa: F811
    run = Run.load(told)
    (kept, *_) = run.changes(Status.KEPT)
    words = html_text(run)
    loss = f"{kept.index}. {kept.name} makes another target slower: decode-bs128, 80.00"
    assert in_order(words, "Gains are per decode step", loss, "At the other targets")
    assert words.count("makes another target slower") == 1


@pytest.mark.parametrize("report", [html_text, markdown], ids=["html", "markdown"])
def test_every_kept_change_has_its_other_targets(told: Path, report) -> None:  # noqa: F811
    words = " ".join(report(Run.load(told)).split()).replace("\u00a0", " ")
    assert in_order(
        words,
        "8 sequences, one token each, at a context of 100,000",
        "40.00 → 39.10 ms",
        "the reference ran in 13 of 52 calls",
        "128 sequences",
        "slower",
        "not measured: its KV cache needs 11.7 GiB",
    )
    assert words.count(REST) == 3


@pytest.mark.parametrize("report", [html_text, markdown], ids=["html", "markdown"])
def test_nothing_is_said_to_be_no_slower_that_was_not_asked(told: Path, report) -> None:  # noqa: F811
    ledger = told / "ledger.jsonl"
    text = ledger.read_text()
    assert "faster by 150.0 us, beyond 12.5 us" in text
    older = "faster by 150.0 us, beyond 12.5 us; nothing got slower"
    ledger.write_text(text.replace("faster by 150.0 us, beyond 12.5 us", older))
    words = report(Run.load(told))
    assert "beyond 12.5 us; prefill got no slower" in words and "nothing got slower" not in words
