"""The two pictures, the curves, and the parts of a step: what is drawn, and to what scale."""

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness.errors import ExitCode, UserError
from harness.records import StepBudget
from reports import curves
from reports.__main__ import main
from reports.budget import WHOLE, dependency_us, parts
from reports.figures import LayerPair, launches, layer_pairs, steps, time_us
from reports.latency import latency
from reports.layer import WIDEST, by_module, chosen, layer, ordered
from reports.run import Run
from reports.svg import Canvas, ticks
from tests.layout import ROOT

H200 = ROOT / "reports" / "results" / "h200"
EVIDENCE = H200 / "beam-decode-bs1-2026-11-29"  # a finished run, by an older ledger
LATEST = H200 / "beam-decode-bs1"  # a run that was cut off
LARGEST = 60_000  # bytes of a picture
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def evidence() -> Run:
    return Run.load(EVIDENCE)


def texts(svg: str) -> list[str]:
    return ["".join(t.itertext()) for t in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def boxes(svg: str, colour: str) -> list[ElementTree.Element]:
    found = ElementTree.fromstring(svg).iter(f"{SVG}rect")
    return [r for r in found if r.get("fill") == f"var(--{colour})"]


def test_the_latency_picture_names_every_change_and_both_ends(evidence: Run) -> None:
    svg = latency(evidence)
    assert svg is not None and len(svg) < LARGEST
    words = texts(svg)
    assert [s.name for s in steps(evidence, "decode")] == [
        w for w in words if w in {s.name for s in steps(evidence, "decode")}
    ]
    assert {"Decode", "20.90 → 6.11 ms", "Prefill", "1.190 → 0.655 s"} <= set(words)
    assert {"20.9", "6.10", "1,190", "656"} <= set(words)
    assert words.count("compile") == 2
    assert "1 sequence, one token, at a context of 100,000" in words


def test_the_latency_picture_is_stepped_to_scale(evidence: Run) -> None:
    root = ElementTree.fromstring(latency(evidence) or "")
    paths = [p for p in root.iter(f"{SVG}polyline") if p.get("stroke-width") == "2.2"]
    for kind, path in zip(("decode", "prefill"), paths, strict=True):
        y = [float(pair.split(",")[1]) for pair in str(path.get("points")).split()]
        assert y[::2] == y[1::2]  # each change has a level
        level = [s.level.median_us for s in steps(evidence, kind) if s.level]
        drops = (y[0] - y[-1]) / (level[0] - level[-1])
        first = next(i for i, s in enumerate(steps(evidence, kind)) if i and s.level)
        assert (y[0] - y[2 * first]) / (level[0] - level[1]) == pytest.approx(drops, rel=0.01)


def test_the_layer_picture_draws_every_kernel_to_one_scale(evidence: Run) -> None:
    pair = chosen(evidence)
    assert pair is not None and launches(pair.before) == 154
    svg = layer(evidence)
    assert svg is not None and len(svg) < LARGEST
    written = [k for k in pair.after if k.written]
    others = [k for k in pair.after if not k.written]
    assert len(boxes(svg, "kept")) == len(written) + 1  # and one in the key
    assert len(boxes(svg, "muted")) == len(others) + 1
    assert len(boxes(svg, "faint")) == len(pair.before) + 1
    groups = by_module(pair.before, pair.module).values()
    scale = WIDEST / max(time_us(rows) for rows in groups)
    widest = max(float(b.get("width", 0)) for b in boxes(svg, "faint"))
    slit = 0.8
    assert widest == pytest.approx(max(k.time_us for k in pair.before) * scale - slit, abs=0.02)


def test_the_layer_picture_names_written_kernels(evidence: Run) -> None:
    words = texts(layer(evidence) or "")
    assert "residual_boundary_kernel, 2.82 µs" in words
    assert "before: 154 kernels, 336 µs" in words and "11 of them written" in words
    assert "none: another kernel does it" in words


def test_modules_keep_their_order_and_new_ones_stand_where_they_run() -> None:
    assert ordered(["a", "b", "c"], ["a", "x", "c", "y"]) == ["a", "x", "b", "c", "y"]
    assert ordered(["a"], ["x", "a"]) == ["x", "a"]


def test_pictures_work_alone_in_light_and_dark(evidence: Run) -> None:
    for svg in (latency(evidence), layer(evidence)):
        assert svg is not None
        assert "prefers-color-scheme:dark" in svg and "href" not in svg
        used = set(re.findall(r"var\(--(\w+)\)", svg))
        assert used <= set(re.findall(r"--(\w+):", svg))
    inline = layer(evidence, standalone=False) or ""
    assert "<style" not in inline and "xmlns" not in inline


@pytest.mark.parametrize("folder", [EVIDENCE, LATEST], ids=lambda folder: folder.name)
def test_committed_pictures_are_those_of_the_ledger(folder: Path) -> None:
    run = Run.load(folder)
    assert (folder / "latency.svg").read_text() == latency(run)
    assert (folder / "layer.svg").read_text() == layer(run)


def test_a_run_without_times_or_layers_has_no_pictures(cpu_run: Path) -> None:
    lines = (cpu_run / "ledger.jsonl").read_text().splitlines()
    (cpu_run / "ledger.jsonl").write_text(lines[0] + "\n")
    run = Run.load(cpu_run)
    assert latency(run) is None and layer(run) is None
    with pytest.raises(UserError, match="neither times nor traced layers"):
        main(["pictures", str(cpu_run)])


def test_a_hostile_name_stays_text(cpu_run: Path) -> None:
    run = Run.load(cpu_run)
    (pair, *_) = layer_pairs(run)
    bad = replace(pair.before[0], module=f"{pair.module}.<b>&", name="<script>")
    svg = layer(run, LayerPair(kind="k", module=pair.module, before=(bad,), after=()))
    assert svg is not None and "<b>&" in texts(svg) and "<script" not in svg


def test_the_command_writes_both_pictures(cpu_run: Path, tmp_path: Path, capsys) -> None:
    assert main(["pictures", str(cpu_run), "-o", str(tmp_path)]) == ExitCode.DONE
    written = capsys.readouterr().out.split()
    assert written == [str(tmp_path / "latency.svg"), str(tmp_path / "layer.svg")]


def test_parts_of_a_step_from_an_older_ledger_add_up(evidence: Run) -> None:
    found = {part.name: part for part in parts(evidence)}
    assert list(found) == ["bandwidth", "launch gaps", "dependency", "rest", WHOLE]
    whole = found.pop(WHOLE)
    for side in ("before_us", "after_us"):
        together = sum(getattr(part, side) or 0.0 for part in found.values())
        assert together == pytest.approx(getattr(whole, side))
    assert evidence.kernels["after"].step_us is not None
    assert whole.after_us == pytest.approx(6_270, rel=0.01)


@pytest.mark.parametrize(
    ("calls", "time_us", "gap_us", "floor_us", "waits_us"),
    [
        (10, 30.0, 4.0, 5.0, 11.0),  # ten empty kernels take 15, of which 4 are gaps
        (10, 12.0, 4.0, 5.0, 7.0),  # no more than what lies beyond the floor
        (10, 30.0, 20.0, 5.0, 0.0),  # the gaps hold all of it
        (10, 30.0, 4.0, 40.0, 0.0),
    ],
)
def test_dependency_is_what_empty_kernels_would_take_in_turn(
    evidence: Run, calls: int, time_us: float, gap_us: float, floor_us: float, waits_us: float
) -> None:
    assert evidence.ceilings is not None
    kernels = evidence.kernels["after"]
    one = replace(
        kernels.rows[0], calls=calls, time_us=time_us, gap_us=gap_us, floor_us=floor_us,
        exposed_us=time_us + gap_us,
    )  # fmt: skip
    ceilings = replace(evidence.ceilings, launch_us=1.5)
    assert dependency_us(replace(kernels, rows=(one,)), ceilings) == pytest.approx(waits_us)
    assert dependency_us(replace(kernels, rows=(one,)), None) == 0.0


def test_recorded_parts_are_shown_as_they_are(evidence: Run) -> None:
    budget = StepBudget(
        step_us=10.0,
        bound_us=6.0,
        gap_us=1.0,
        rest_us=3.0,
        unknown_us=0.0,
        hidden_us=2.0,
        kernels=4,
    )
    changed = replace(
        evidence,
        kernels={"after": replace(evidence.kernels["after"], budget=budget)},
        ceilings=None,
    )
    found = parts(changed)
    assert [part.after_us for part in found] == [6.0, 1.0, 3.0, 10.0, 2.0]
    assert {part.before_us for part in found} == {None}


@pytest.mark.parametrize(
    ("largest", "found"),
    [(22.0, [0, 10, 20]), (1300, [0, 500, 1000]), (0.9, [0, 0.25, 0.5, 0.75]), (0, [0])],
)
def test_ticks_are_round(largest: float, found: list[float]) -> None:
    assert ticks(largest) == found


def point(context: int, us: float | None, model: str = "reference") -> dict:
    step = None if us is None else {"median_us": us, "interval_us": [us, us], "samples": 9}
    floors = {"weight_floor_us": 1000.0, "kv_floor_us": context / 1024}
    absent = None if us is not None else "a cache of 900 GiB does not fit"
    return {
        "model": model,
        "batch": 1,
        "context": context,
        "step": step,
        "absent": absent,
        **floors,
    }


def curve_file(folder: Path, points: list[dict]) -> Path:
    data = {"curve": "context", "model": "m", "preset": "p", "points": points}
    path = folder / "curve-context.json"
    path.write_text(json.dumps({**data, "environment": {"device_name": "a card"}}))
    return path


def test_a_curve_has_its_times_floors_and_reasons(tmp_path: Path, capsys) -> None:
    points = [point(1024, 2000.0), point(65536, 4000.0), point(1 << 20, None)]
    points += [point(1024, 1500.0, "plan"), point(1 << 20, 3000.0, "plan")]
    path = curve_file(tmp_path, points)
    assert main(["curve", str(path)]) == ExitCode.DONE
    svg = path.with_suffix(".svg").read_text()
    assert capsys.readouterr().out.strip() == str(path.with_suffix(".svg"))
    words = texts(svg)
    assert {"1K", "64K", "1M", "reference", "plan", "4.00 ms", "3.00 ms"} <= set(words)
    assert {"floor: weights and KV cache", "weights alone"} <= set(words)
    told = " ".join(words[words.index("weights alone") + 1 :])
    assert told == "not timed: 1M (reference): a cache of 900 GiB does not fit"
    drawn = [p for p in ElementTree.fromstring(svg).iter(f"{SVG}polyline")
             if p.get("stroke") == "var(--kept)"]  # fmt: skip
    line, in_key = (str(p.get("points")).split() for p in drawn)
    assert [float(at.split(",")[0]) for at in line] == [curves.LEFT, curves.WIDTH - curves.RIGHT]
    assert in_key[0].startswith("0,")


def test_axes_of_a_curve_are_logarithmic(tmp_path: Path) -> None:
    path = curve_file(tmp_path, [point(c, 2000.0) for c in (1024, 32768, 1 << 20)])
    root = ElementTree.fromstring(curves.figure(curves.load(path)))
    x = [float(c.get("cx", 0)) for c in root.iter(f"{SVG}circle")]
    assert x[1] - x[0] == pytest.approx(x[2] - x[1])


@pytest.mark.parametrize("content", ["not JSON", "{}", '{"points": [{}]}', '{"points": []}'])
def test_no_curve_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(UserError, match="is no curve .*; make one with"):
        curves.load(tmp_path / "c.json")
    with pytest.raises(UserError, match="cannot read"):
        curves.load(tmp_path / "missing.json")


def test_coordinates_are_short() -> None:
    canvas = Canvas(10, "t")
    canvas.line([(1 / 3, 2.0), (10.5, 100)], "ink")
    assert 'points="0.33,2 10.5,100"' in canvas.parts[0]
