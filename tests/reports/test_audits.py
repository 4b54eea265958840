"""What the reports say of audits: seeds, reasons, clocks."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.ledger import Ledger
from harness.records import Attempt, Audit, AuditedCall, Clocks, Status
from reports.run import Run
from reports.summary import summary
from reports.write import write_reports

REASON = "cache.k was not written in 1 row(s), the first at (0, 249), as the model does"


def audit(reason: str | None) -> Audit:
    call = AuditedCall(
        step="decode",
        when="among the timed calls",
        seed=4711,
        compared_with="the module run eagerly, bit for bit",
        reason=reason,
    )
    clocks = Clocks(
        inside_us=760.0,
        outside_us=758.5,
        difference_us=-1.5,
        spread_us=2.0,
        gap_us=1.0,
        reason=None,
    )
    return Audit(calls=(call,), clocks=clocks)


@pytest.fixture
def audited(cpu_run: Path) -> Path:
    """A run whose last attempt was audited and refused, and whose result failed its audit, too."""
    ledger = Ledger.open(cpu_run)
    last = ledger.all("attempt", Attempt)[-1]
    final = dict(ledger.last("final") or {})
    refused = replace(
        last,
        index=last.index + 1,
        status=Status.REJECTED,
        reason=f"audit: {audit(REASON).reason}",
        audit=audit(REASON),
    )
    ledger.append("attempt", refused)
    ledger.append("final", {**final, "audit": audit(REASON).to_json()})
    write_reports(cpu_run)
    return cpu_run


@pytest.mark.parametrize("name", ["report.md", "report.html"])
def test_the_report_says_what_was_run_and_what_was_wrong(audited: Path, name: str) -> None:
    page = (audited / name).read_text()
    assert "seed 4711" in page
    assert f"Audit failed: decode, among the timed calls: {REASON}" in page
    assert "decode 760.0 us from inside, 758.5 us from outside (-1.5 us" in page
    assert "What was timed at the end is not the model that was judged" in page


def test_the_summary_holds_the_audit(audited: Path) -> None:
    run = Run.load(audited)
    changes = summary(run)["changes"]
    assert changes[-1]["audit"]["calls"][0]["seed"] == 4711
    assert changes[0]["audit"] is None
    assert run.final is not None and run.final.audit == audit(REASON)
