"""The two reports: their figures, their order, and that the page stands alone."""

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from harness.records import StepBudget
from reports import budget
from reports.chart import step_chart
from reports.fit import fit
from reports.headline import floor_us, headlines
from reports.markdown import markdown
from reports.numerics import histograms, judged, pooled, share
from reports.page import page
from reports.render import environment
from reports.run import Run
from reports.write import write_reports
from tests.reports.conftest import ulp
from tests.reports.test_pictures import EVIDENCE


class Words(HTMLParser):
    """The page's text, its links and its tags, as a browser would read them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.resources: list[str] = []
        self.feed(html)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "poster", "data", "action"):
                self.resources.append(value or "")
            if name == "id" and value:
                self.ids.append(value)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def html_text(run: Run) -> str:
    return Words(page(run)).text


@pytest.fixture(params=[html_text, markdown], ids=["html", "markdown"])
def report(request: pytest.FixtureRequest) -> Callable[[Run], str]:
    return request.param


def in_order(text: str, *parts: str) -> bool:
    at = 0
    for part in parts:
        at = text.find(part, at)
        if at < 0:
            pytest.fail(f"{part!r} is missing, or out of order")
    return True


def test_headline_stands_beside_every_baseline(report: Callable[[Run], str], cpu_run: Path) -> None:
    text = " ".join(report(Run.load(cpu_run)).replace("**", "").split())
    assert in_order(text, "Ran on the CPU: Intel Xeon 8481C, 2 threads. No GPU was used.")
    assert in_order(text, "1.000 → 0.760 ms", "9.000 → 7.900 ms")
    assert in_order(text, "1.32×", "[1.29, 1.34]", "CUDA graphs need a GPU", "0.921×", "0.684×")


def test_gpu_is_named(report: Callable[[Run], str], cuda_run: Path) -> None:
    text = " ".join(report(Run.load(cuda_run)).replace("**", "").split())
    assert in_order(text, "Ran on the GPU: NVIDIA H200.", "16.00 → 15.76 ms", "8.12×", "1.02×")
    assert in_order(text, "GPU-5f0c, driver 580.82, SM 1980 MHz")
    assert "No GPU was used" not in text


def test_every_outcome_has_its_reason(report: Callable[[Run], str], cpu_run: Path) -> None:
    text = " ".join(report(Run.load(cpu_run)).split())
    assert in_order(
        text,
        "What was kept, and why",
        "faster by 150.0 us, beyond 12.5 us",
        "nine launches become one",
        "What was rejected, and why",
        "slower by 74.0 us",
        "rounds once where the reference rounds at post_norm",
        "Rounding point post_norm (aten.mul, reference/beam.py:153): declared kept",
        "observed elided",
        "What failed",
        "CompileError: no kernel for sort",
        "Controls",
        "identity",
        "refused",
        "slowed",
        "refused",
    )
    assert in_order(text, "Predicted against realised", "20.0 µs")
    assert "Kernels of one layer of each kind" in text


def test_reasons_are_one_click_away_from_the_table(cpu_run: Path) -> None:
    html = page(Run.load(cpu_run))
    table = html[html.index("<h2>Changes</h2>") :]
    table = table[: table.index("</table>")]
    clicks = re.findall(r"<summary>([^<]*)</summary><p>([^<]*)</p>", table)
    assert [words for words, _ in clicks] == [
        f"inductor, {why}" for why in ("why", "why not", "why not", "why not", "why")
    ]
    assert clicks[3][1] == "CompileError: no kernel for sort"
    assert table.count('href="#change-5"') == 2


def test_headline_says_what_is_left_to_the_floor(cuda_run: Path) -> None:
    path = cuda_run / "ledger.jsonl"
    floor = '"other_targets": {', '"floors_us": {"decode": 1576.0, "prefill": null}, '
    path.write_text(path.read_text().replace(floor[0], floor[1] + floor[0]))
    run = Run.load(cuda_run)
    decode, prefill = headlines(run)
    assert (decode.floor_us, decode.above_floor) == (1576.0, 10.0)
    assert (prefill.floor_us, prefill.above_floor) == (None, None)
    text = html_text(run)
    assert in_order(text, "1.02×", "floor 1.58 ms", "Takes 10.0 times its floor", "Prefill")
    assert text.count("times its floor") == 1
    assert markdown(run).count("; 10.0 times its floor of 1.58 ms") == 1


def test_an_older_ledger_has_the_floor_of_its_bytes() -> None:
    run = Run.load(EVIDENCE)
    assert floor_us(run, "decode") == pytest.approx(6378274432 / 4420e3, rel=1e-3)
    assert floor_us(run, "prefill") is None


def test_ulp_histograms_pool_the_outputs(cpu_run: Path) -> None:
    run = Run.load(cpu_run)
    assert [a.index for a in judged(run)] == [3, 4, 5, 7]
    counts = pooled((ulp("q", 0.25), ulp("k", 0.5)))
    assert counts == {"0": 81920, "1": 49152, "2": 0, "3-4": 0, "5-8": 0, ">8": 0}
    drawn = re.findall(r"<text[^>]*>([^<]*)</text>", histograms(run) or "")
    assert "5. qk_norm_rope (refused by its numerics)" in drawn
    assert {"16.00%", "84.00%", "equal", "&gt;8 ULP"} <= set(drawn)
    assert (share(1.0), share(1 - 1e-7), share(2.8e-6)) == ("100.00%", ">99.99%", "2.8e-6")


def test_predictions_are_drawn_to_one_scale(cpu_run: Path) -> None:
    svg = fit(Run.load(cpu_run)) or ""
    hollow = [float(x) for x in re.findall(r'cx="([\d.]+)"[^>]*fill="var\(--paper\)"', svg)]
    filled = [float(x) for x in re.findall(r'cx="([\d.]+)"[^>]*fill="var\(--(?:kept|re)', svg)]
    predicted, realised = [130.0, 55.0, 99.0], [150.0, -74.0, 90.0]
    scale = (hollow[0] - hollow[1]) / 75.0
    assert scale > 1
    for xs, values in ((hollow, predicted), (filled, realised)):
        zeros = [x - us * scale for x, us in zip(xs, values, strict=True)]
        assert max(zeros) - min(zeros) < 0.1


def test_rejected_as_slower_shows_all_its_figures(cpu_run: Path) -> None:
    text = markdown(Run.load(cpu_run))
    row = next(line for line in text.splitlines() if line.startswith("| 4 |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:3] == ["inductor:swiglu (inductor)", "rejected"]
    assert cells[3:] == ["55.0 µs", "−74.0 µs [−82.0, −66.0] µs", "924.0 µs", "9.000 ms"]
    assert "smallest detectable effect 12.5 µs" in text


def test_numerics_show_noise_beside_what_is_allowed(cpu_run: Path) -> None:
    text = markdown(Run.load(cpu_run))
    assert "| q | reduction | 65,536 | 0.32 | 1.1e-6 | 4.4e-6 | 0.32 |" in text
    assert "| post_norm | aten.mul | reference/beam.py:153 | kept | **elided** | 0.28 |" in text


def test_kernels_before_and_after_in_launch_order(
    report: Callable[[Run], str], cpu_run: Path
) -> None:
    text = report(Run.load(cpu_run))
    section = text[text.index("Kernels of one layer") :]
    assert in_order(section, "moe_sliding", "5 → 2", "operator calls")
    assert in_order(section, "aten::pow", "aten::mean", "aten::rsqrt", "aten::mul", "aten::mm")
    assert in_order(section, "aten::mm", "residual_boundary_kernel", "written", "aten::mm")


def test_reasons_are_escaped(cpu_run: Path) -> None:
    run = Run.load(cpu_run)
    html, text = page(run), markdown(run)
    assert "script" not in Words(html).tags
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; | a" in html
    assert "<script>" not in text
    assert "&lt;script&gt;alert('x')&lt;/script&gt; \\| a" in text


def test_page_loads_nothing(cuda_run: Path) -> None:
    html = page(Run.load(cuda_run))
    read = Words(html)
    assert "ledger.jsonl" in read.resources  # a link, beside the page
    inside = {r for r in read.resources if r != "ledger.jsonl"}
    assert inside and {r[1:] for r in inside} <= set(read.ids)
    assert all(r.startswith("#") for r in inside)
    assert len(read.ids) == len(set(read.ids))
    assert not re.search(r"https?:|@import|url\((?!#)", html)
    assert not {"link", "script", "img", "iframe"} & set(read.tags)
    assert len(html.encode()) < 200_000


def test_chart_has_text_and_the_page_colours(cpu_run: Path) -> None:
    run = Run.load(cpu_run)
    for kind, start, end in (("decode", "1.000", "0.7610"), ("prefill", "9.000", "7.900")):
        svg = step_chart(run, kind)
        assert svg is not None
        texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
        assert {"start", "3", "7", start, end, "compile", "ms"} <= set(texts)
        assert "var(--kept)" in svg and "font-family" not in svg
    assert step_chart(run, "decode") == step_chart(run, "decode")


def test_unfinished_run_says_so(report: Callable[[Run], str], unfinished_run: Path) -> None:
    text = " ".join(report(Run.load(unfinished_run)).split())
    assert in_order(text, "This run is unfinished", f"--resume {unfinished_run}")
    assert "nothing kept so far" in text
    assert "while residual_boundary was being tried" in text
    assert "No change has both figures" in text


def test_kept_control_is_shouted(report: Callable[[Run], str], cpu_run: Path) -> None:
    path = cpu_run / "ledger.jsonl"
    path.write_text(path.read_text().replace('"status": "rejected"', '"status": "kept"', 1))
    text = report(Run.load(cpu_run))
    assert "was not refused but kept" in text
    assert "cannot be trusted" in text


def test_bare_run_still_reports(report: Callable[[Run], str], cpu_run: Path) -> None:
    path = cpu_run / "ledger.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    text = " ".join(report(Run.load(cpu_run)).split())
    assert in_order(text, "beam mini, decode-bs1", "not measured", "No layer was traced")


def test_write_reports_leaves_all_files(cpu_run: Path) -> None:
    paths = write_reports(cpu_run)
    names = ["summary.json", "report.md", "report.html", "latency.svg", "layer.svg", "prs"]
    assert [p.name for p in paths] == names
    assert paths[1].read_text() == markdown(Run.load(cpu_run))


def test_what_is_nothing_but_rounding_is_no_part_of_a_step(cpu_run: Path) -> None:
    run = Run.load(cpu_run)
    measured = StepBudget(
        step_us=6.0, bound_us=1.0, gap_us=2.0, rest_us=3.0, unknown_us=0.0, hidden_us=6.4e-12,
        kernels=2,
    )  # fmt: skip
    run.kernels = {"before": replace(run.kernels["before"], budget=measured)}
    found = budget.parts(replace(run, ceilings=None))
    assert [part.before_us for part in found] == [1.0, 2.0, 3.0, 6.0]
    assert not any("hidden" in part.words for part in found)


def test_a_narrow_column_breaks_before_an_interval_and_nowhere_else() -> None:
    filters = environment(autoescape=True).filters
    shown = filters["estimate"](1000.0, (930.0, 1160.0))
    assert shown == "1.00\u00a0ms [0.93,\u00a01.16]\u00a0ms"
