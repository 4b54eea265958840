"""The closing verdict's drift and routing in both reports."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from harness.drift_record import Drift, DriftRow
from harness.ledger import Ledger
from harness.records import Flip, Routing, Verdict
from reports.drift import chart, lines, routing
from reports.markdown import markdown
from reports.page import page
from reports.run import Run


def row(of: str, routes: str, step: str, *layers: float, flips: int = 0) -> DriftRow:
    return DriftRow(
        of=of, routes=routes, step=step, layers=layers, kl_mean=2.5e-5, kl_max=4e-4, flips=flips,
        tokens=24,
    )  # fmt: skip


ROWS = (
    row("result", "free", "prefill", 0.0, 0.0031, 0.092, flips=2),
    row("reference", "free", "prefill", 0.0027, 0.0055, 0.13, flips=4),
    row("result", "forced", "decode", 0.0, 0.0011, 0.0037),
)
FLIP = Flip(where="layers.3, prefill", output="gate[1]", row=60, margin=0.0012, limit=0.0019)


def closed(directory: Path, unforced: str | None = None, *, drifts: bool = True) -> Run:
    drift = Drift(layers=("a", "b", "c"), decodes=8, seed=1, rows=ROWS, unforced=unforced)
    verdict = Verdict(
        scope="model", passed=True, reason=None, cases=216, seed=1, outputs=(), points=(),
        notes=("free-running prefill: relative 0.09",),
        routing=Routing(rows=1288, flipped=1, flips=(FLIP,)) if drifts else None,
        drift=drift if drifts else None,
    )  # fmt: skip
    Ledger.open(directory).append("model_verdict", verdict)
    run = Run.load(directory)
    assert run.closing_verdict == verdict  # through the ledger and back
    return run


def test_the_table_in_markdown(cpu_run: Path) -> None:
    shown = markdown(closed(cpu_run))
    assert "## Drift of the result" in shown
    first = "| the result | free | prefill | 0 | 0.092 | 2.5e-5 | 0.0004 | 2 of 24 |"
    noise = "| the reference under noise | free | prefill | 0.0027 | 0.13 |"
    assert first in shown and noise in shown
    assert "In the verdict that decides: 1,288 rows of choices compared, 1 differ" in shown
    assert "the largest margin is 0.0012, 0.0019 is noise (layers.3, prefill, gate[1], row 60)" in (
        shown
    )
    assert "free-running prefill: relative" not in shown  # the table says it


def test_the_page_has_the_chart_too(cpu_run: Path) -> None:
    shown = page(closed(cpu_run, "mlp.gate is not called by itself"))
    section = shown.partition("Drift of the result")[2].partition("<h2>What was kept")[0]
    assert section.count("<tr>") == 1 + len(ROWS)
    assert "<svg" in section and "relative error" in section and "var(--kept)" in section
    assert "Routes were not forced: mlp.gate is not called by itself." in section
    assert len(re.findall(r'id="', shown)) == len(set(re.findall(r'id="([^"]*)"', shown)))


@pytest.mark.parametrize("render", [markdown, page], ids=["md", "html"])
def test_a_verdict_without_drift_has_no_table(render, cpu_run: Path) -> None:
    shown = render(closed(cpu_run, drifts=False))
    assert "This ledger has none by layer." in shown and "Top-1 flips" not in shown
    assert "Free-running prefill: relative 0.09" in shown


def test_nothing_is_shown_before_the_end() -> None:
    assert (lines(None), routing(None), chart(None)) == ([], None, None)


def test_a_change_s_flips_are_listed(cpu_run: Path) -> None:
    run = Run.load(cpu_run)
    kept = next(a for a in run.attempts if a.region_verdict and a.control is None)
    assert kept.region_verdict is not None
    more = replace(FLIP, margin=None, where="layers.4, decode")
    found = Routing(rows=1288, flipped=2, flips=(more, FLIP))
    changed = replace(kept, region_verdict=replace(kept.region_verdict, routing=found))
    run.attempts[run.attempts.index(kept)] = changed
    shown = markdown(run)
    assert "- 1,288 rows of choices compared, 2 differ; the largest margin is masked out" in shown
    assert "| Region routed differently in | Output | Row | Margin | Noise explains |" in shown
    assert "| layers.4, decode | gate[1] | 60 | masked out | 0.0019 |" in shown
    assert "| layers.3, prefill | gate[1] | 60 | 0.0012 | 0.0019 |" in shown
    html = page(run)
    assert "<td>layers.3, prefill</td><td><code>gate[1]</code></td>" in html
    assert "Routing: 1,288 rows of choices compared, 2 differ" in html
