"""A run for a prefill is reported as one: its gains, its trace, its headline first."""

import re
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.ledger import Ledger
from reports.figures import median_error_us, predictions
from reports.latency import latency
from reports.layer import layer
from reports.markdown import markdown
from reports.page import page
from reports.run import Run
from reports.summary import summary
from tests.reports.test_pages import Words, in_order
from tests.reports.test_terminal import printed

STEP = re.compile(r"(decode|prefill) (?:step|gain)")


def test_gains_and_predictions_are_of_the_target(prefill_run: Path) -> None:
    run = Run.load(prefill_run)
    assert run.header.kind == "prefill" and run.kinds == ("prefill", "decode")
    assert [p.realised_us for p in predictions(run)] == [900.0, 0.0, 1100.0]
    assert median_error_us(run) == 770.0
    document = summary(run)
    kept = document["changes"][0]
    assert document["kind"] == "prefill"
    assert (kept["gain_us"], kept["gain_interval_us"]) == (900.0, [892.0, 908.0])
    assert (kept["decode_us"], kept["prefill_us"]) == (850.0, 8100.0)
    assert kept["prefill_interval_us"] == [8019.0, 8181.0]
    assert document["controls"][1]["gain_us"] == pytest.approx(-270.0)
    assert document["median_prediction_error_us"] == 770.0


def test_both_reports_speak_of_a_prefill(prefill_run: Path) -> None:
    run = Run.load(prefill_run)
    for text in (markdown(run).replace("**", ""), Words(page(run)).text):
        words = " ".join(text.split())
        assert in_order(words, "Prefill", "9.000 → 7.900 ms", "Decode", "1.000 → 0.760 ms")
        assert in_order(words, "900 µs", "Gains are per prefill step", "Controls", "slowed")
        assert "770 µs a prefill step" in words and "Of one prefill step" in words
        assert set(STEP.findall(words)) == {"prefill"}


def test_a_decode_run_speaks_of_a_decode(cpu_run: Path) -> None:
    run = Run.load(cpu_run)
    for text in (markdown(run).replace("**", ""), Words(page(run)).text):
        words = " ".join(text.split())
        assert in_order(words, "Decode", "1.000 → 0.760 ms", "Prefill", "9.000 → 7.900 ms")
        assert set(STEP.findall(words)) == {"decode"}


def test_table_rows_hold_the_target_first(prefill_run: Path) -> None:
    lines = markdown(Run.load(prefill_run)).splitlines()
    head = next(line for line in lines if line.startswith("| # | Change"))
    assert head.endswith("| Realised gain | Prefill with it | Decode with it |")
    row = next(line for line in lines if line.startswith("| 3 | residual_boundary"))
    assert row.endswith("| 130 µs | 900 µs [892, 908] µs | 8.100 ms | 850.0 µs |")
    baseline = next(line for line in lines if line.startswith("| plain PyTorch, eager"))
    assert baseline.startswith("| plain PyTorch, eager | 9.000 ms [8.910, 9.090] ms | **1.14×**")


def test_the_terminal_shows_what_the_prefill_gained(prefill_run: Path) -> None:
    lines = printed(prefill_run).splitlines()
    assert "900 µs [892, 908] µs" in lines[1]
    assert [line.split(":")[0] for line in lines[-6:] if "→" in line] == ["prefill", "decode"]
    assert "median of |predicted - realised|: 770 µs a prefill step" in lines


def test_pictures_are_of_the_target(prefill_run: Path) -> None:
    run = Run.load(prefill_run)
    drawn = latency(run) or ""
    assert drawn.index("Prefill") < drawn.index("Decode")
    assert "One layer of a prefill step, in launch order" in (layer(run) or "")


def test_a_run_that_kept_nothing_does_not_speak_of_changes(cpu_run: Path) -> None:
    run = Run.load(cpu_run)
    run.attempts = [a for a in run.attempts if a.name == "inductor:router"]
    text = markdown(run)
    assert "nothing kept, 760.0 µs at the end" in text and "with the kept changes" not in text


def test_a_target_of_no_kind_is_damage(cpu_run: Path) -> None:
    path = cpu_run / Ledger.NAME
    path.write_text(path.read_text().replace('"decode-bs1"', '"training"'))
    with pytest.raises(UserError, match="'training' is neither a decode nor a prefill"):
        Run.load(cpu_run)
