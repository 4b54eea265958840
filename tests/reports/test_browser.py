"""report.html as a browser shows it: charts drawn, nothing too wide, nothing loaded, no errors."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from reports.page import page
from reports.run import Run
from tests.layout import ROOT
from tests.reports import browser
from tests.reports.test_pictures import EVIDENCE

CPU = ROOT / "reports" / "results" / "cpu" / "beam-mini-decode-bs1"
BAD = (
    "<!doctype html><p style='width:900px'>wide</p><script>console.error('planted')</script>"
    "<svg viewBox='0 0 400 40' width=400><text y=20 font-size=6>under</text>"
    "<text x=9 y=20>over</text></svg>"
)


@pytest.fixture(scope="module")
def evidence_page() -> str:
    return page(Run.load(EVIDENCE))


def test_a_phone_and_a_desk_show_every_chart_and_nothing_too_wide(
    evidence_page: str, tmp_path: Path
) -> None:
    toy = page(Run.load(CPU))  # has drift, too, but no floors
    both = [(html, width) for html in (evidence_page, toy) for width in (390, 1440)]
    shown = browser.show([*both, (BAD, 390)], tmp_path)
    for frame, (html, width) in zip(shown.frames, both, strict=False):
        assert (frame["width"], frame["scroll_width"]) == (width, width)
        assert frame["wide"] == [] and frame["requests"] == []
        assert frame["covered"] == 0  # no name of a change lies under what folds out below it
        # Two headlines, two steps, parts, layer, fit, ULPs, and drift where the ledger has it.
        assert len(frame["charts"]) == (9 if html is toy else 8)
        assert all(w > 300 and h > 10 and marks > 1 for w, h, marks in frame["charts"])
        assert frame["smallest"] > 8.5 and frame["overlapping"] == []  # px; texts of pictures
    # The same look finds what is planted in a page beside them.
    bad = shown.frames[-1]
    assert bad["wide"] == ["P"] and bad["scroll_width"] > 390
    assert bad["smallest"] == 6 and bad["overlapping"] == ["over"]
    assert len(shown.console) == 1 and "planted" in shown.console[0]


def test_dark_mode_has_dark_paper(evidence_page: str, tmp_path: Path) -> None:
    (frame,) = browser.show([(evidence_page, 390)], tmp_path, dark=True).frames
    red, green, blue = map(int, re.findall(r"\d+", frame["paper"]))
    assert max(red, green, blue) < 40


def test_it_prints_with_every_detail_open(cpu_run: Path, tmp_path: Path) -> None:
    sizes = []
    for how in ("as it is", "all closed"):
        html = page(Run.load(cpu_run))
        if how == "all closed":
            html = html.replace("details::details-content", "details.none")
        source, pdf = tmp_path / "page.html", tmp_path / "page.pdf"
        source.write_text(html)
        browser.run(tmp_path, f"--print-to-pdf={pdf}", source.as_uri())
        sizes.append(len(re.findall(rb"/Type\s*/Page\b", pdf.read_bytes())))
    assert sizes[0] > sizes[1] > 0


def test_the_page_is_rebuilt_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('torch', 'triton', 'optuna'):\n    sys.modules[name] = None\n"
    )
    out = tmp_path / "report.html"
    command = [sys.executable, "-m", "reports", "html", str(EVIDENCE), "-o", str(out)]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    blocked = [sys.executable, "-c", "import torch"]
    refused = subprocess.run(blocked, env=environment, capture_output=True, check=False)
    assert b"ModuleNotFoundError" in refused.stderr
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
    assert out.read_text() == page(Run.load(EVIDENCE), tmp_path)
