"""What makes the reports readable: words for figures, links that lead somewhere, contrast."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.records import Status, Timing
from reports.__main__ import main
from reports.chart import _side
from reports.figures import Step, broken_points, verdicts
from reports.headline import why_no_floor, workload
from reports.markdown import markdown
from reports.page import page
from reports.run import Run
from reports.svg import STYLE
from tests.layout import ROOT
from tests.reports.test_pages import Words, html_text
from tests.reports.test_pictures import EVIDENCE, LATEST

Report = Callable[[Run], str]
BOTH = pytest.mark.parametrize("report", [html_text, markdown], ids=["html", "markdown"])


def luminance(colour: str) -> float:
    """WCAG's relative luminance of #rrggbb."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("mode", ["light", "dark", "print"])
def test_words_and_bars_stand_out_from_the_paper(mode: str) -> None:
    css = (ROOT / "reports" / "templates" / "style.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    assert len(blocks) == 3
    chosen = dict(zip(("light", "dark", "print"), blocks, strict=True))[mode]
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{3,6});", chosen))
    colours = {
        n: c if len(c) == 7 else "#" + "".join(2 * x for x in c[1:]) for n, c in colours.items()
    }
    paper = luminance(colours["paper"])
    for name, least in {
        "ink": 7.0, "muted": 4.5, "kept": 4.5, "rejected": 4.5, "failed": 4.5, "faint": 3.0,
    }.items():  # fmt: skip
        other = luminance(colours[name])
        ratio = (max(paper, other) + 0.05) / (min(paper, other) + 0.05)
        assert ratio >= least, f"{name} in {mode}: {ratio:.2f}"
        if mode != "print":  # the pictures that stand alone have the same colours
            assert f"--{name}:{colours[name]}" in STYLE


@BOTH
def test_the_outcome_is_said_in_a_sentence(report: Report, cpu_run: Path) -> None:
    said = "2 of the 5 changes tried were kept: each is numerically right by itself and measurably"
    assert said in " ".join(report(Run.load(cpu_run)).split())
    evidence = " ".join(report(Run.load(EVIDENCE)).split())
    assert "10 of the 11 changes tried were kept" in evidence
    assert "every layer of the result together passed the numerical check." in evidence


@BOTH
def test_closing_pairs_are_claimed_only_where_there_are_some(report: Report) -> None:
    claim = "they were timed again at the end in interleaved pairs."
    assert claim in " ".join(report(Run.load(EVIDENCE)).split())
    cut_off = " ".join(report(Run.load(LATEST)).split())
    assert "combines the far ends of both." in cut_off and claim not in cut_off
    assert "12 of the 13 changes tried were kept" in cut_off
    assert "the result as a whole is not judged yet." in cut_off


@BOTH
def test_a_run_that_kept_nothing_says_so(report: Report, cpu_run: Path) -> None:
    run = Run.load(cpu_run)
    refused = [replace(a, status=Status.REJECTED) for a in run.attempts]
    said = " ".join(report(replace(run, attempts=refused)).split())
    assert "None of the 5 changes tried was kept: the model is as it was." in said
    assert "nothing kept, 760.0 µs at the end" in said.replace("\u00a0", " ")
    assert "1.000 → 0.760 ms" not in said.replace("\u00a0", " ")


@BOTH
def test_a_ledger_without_drift_by_layer_says_so(report: Report, cpu_run: Path) -> None:
    words = " ".join(report(Run.load(EVIDENCE)).split())
    assert "Drift of the result This ledger has none by layer. Free-running prefill:" in words
    assert "Drift of the result" not in report(replace(Run.load(cpu_run), closing_verdict=None))


def test_a_step_is_described_in_words() -> None:
    one = "1 sequence, one token, at a context of 100,000"
    assert workload("decode 1 x 1 token(s), context 100000") == one
    many = "8 sequences, 2,048 tokens each, at a context of 100,000"
    assert workload("prefill 8 x 2048 token(s), context 100000") == many
    assert workload("decode of a kind of its own") == "of a kind of its own"


@BOTH
def test_a_missing_floor_has_its_reason(report: Report, cpu_run: Path) -> None:
    path = cpu_run / "ledger.jsonl"
    text, none = path.read_text(), '"floors_us": {"decode": null, "prefill": null}, '
    path.write_text(text.replace('"other_targets": {', none + '"other_targets": {'))
    run = Run.load(cpu_run)
    assert why_no_floor(run, "prefill") == "its step was not traced"
    run.kernels["before"] = replace(run.kernels["before"], compulsory_bytes=1000)
    assert why_no_floor(run, "decode") == "a toy's weights stay in a cache"
    run.floors["prefill"] = 1.0
    assert why_no_floor(run, "decode") == "its step was not traced"
    run.floors["prefill"] = None
    assert "o floor: a toy's weights stay in a cache" in report(run)
    assert why_no_floor(Run.load(EVIDENCE), "decode") is None
    assert why_no_floor(Run.load(EVIDENCE), "prefill") == "this run computed none"


def test_links_lead_to_the_run_from_wherever_the_page_lies(cpu_run: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for folder in (cpu_run, tmp_path / "elsewhere", tmp_path):
        out = folder / "page.html"
        assert main(["html", str(cpu_run), "-o", str(out)]) == 0
        links = [r for r in Words(out.read_text()).resources if r.endswith("ledger.jsonl")]
        assert links and all((folder / link).samefile(cpu_run / "ledger.jsonl") for link in links)


def test_kernels_are_named_as_people_read_them() -> None:
    html, text = page(Run.load(EVIDENCE)), markdown(Run.load(EVIDENCE))
    assert "elementwise_kernel&lt;MulFunctor&gt;</code>" in html
    assert "| vectorized_elementwise_kernel&lt;CUDAFunctor_add&gt; " in text
    assert (
        'title="void at::native::vectorized_elementwise_kernel&lt;4' in html
    )  # whole, to point at
    assert "at::native" not in text and "TrivialOffsetCalculator" not in Words(html).text


@BOTH
def test_an_accepted_change_is_accused_of_no_broken_rounding(report: Report) -> None:
    """The evidence has points of accepted changes that fit neither replay: no broken promise."""
    run = Run.load(EVIDENCE)
    points = [
        (verdict.passed, point.observed)
        for attempt in run.changes()
        for verdict in verdicts(attempt)
        for point in verdict.points
    ]
    assert (True, "neither") in points
    text = report(run)
    assert "observed neither" not in text and "**neither**" not in text


def test_a_refused_change_is_still_accused(cpu_run: Path) -> None:
    run = Run.load(cpu_run)
    accused = [p.point for a in run.changes() for v in verdicts(a) for p in broken_points(v)]
    assert accused == ["post_norm"]


def side_of(level_us: float, baseline_us: float, tried_us: float | None) -> int:
    """The side on which the last level's label stands: 1 above, -1 below."""
    timing = Timing(median_us=level_us, interval_us=(level_us, level_us), samples=9)
    refused = tried_us is not None
    step = Step(
        label="3", name="x", status=None, level=None if refused else timing, tried_us=tried_us
    )
    return _side(step, level_us, 1000.0, [("compile", baseline_us)])


@pytest.mark.parametrize(
    ("level_us", "baseline_us", "tried_us", "side"),
    [
        (600.0, 300.0, None, -1),  # free below
        (600.0, 540.0, None, 1),  # a baseline's line runs where the label would stand
        (600.0, 700.0, None, -1),
        (600.0, 300.0, 550.0, 1),  # what was refused last lies there
        (600.0, 300.0, 900.0, -1),
    ],
)
def test_the_last_label_stands_clear_of_lines_and_rings(
    level_us: float, baseline_us: float, tried_us: float | None, side: int
) -> None:
    assert side_of(level_us, baseline_us, tried_us) == side
