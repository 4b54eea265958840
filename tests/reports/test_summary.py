"""summary.json and the figures behind it."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.records import Status, Timing, Verdict
from reports.figures import baseline_rows, median_error_us, predictions, ratio, steps
from reports.run import Run
from reports.summary import summary, write_summary
from reports.terminal import headline


def test_cpu_summary_leaves_out_the_graph_and_says_why(cpu_run: Path) -> None:
    document = summary(Run.load(cpu_run))
    assert document["baselines"] == {
        "eager": {"decode_us": 1000.0, "prefill_us": 9000.0},
        "compile": {"decode_us": 700.0, "prefill_us": 5400.0},
    }
    assert document["absent"] == {"graph": "CUDA graphs need a GPU"}
    assert document["speedup"]["decode"] == {"vs_eager": 1000 / 760, "vs_compile": 700 / 760}
    assert document["environment"]["device_name"] == "Intel Xeon 8481C"
    assert document["workload"]["prefill"] == "prefill 8 x 64 token(s), context 250"
    assert document["stopped"] == "done"


def test_cuda_summary_has_all_baselines(cuda_run: Path) -> None:
    document = summary(Run.load(cuda_run))
    assert list(document["speedup"]["decode"]) == ["vs_eager", "vs_graph", "vs_compile"]
    assert document["speedup"]["decode"]["vs_graph"] == pytest.approx(16000 / 15760)
    assert document["absent"] == {}


def test_changes_carry_their_figures_and_controls_stand_apart(cpu_run: Path) -> None:
    document = summary(Run.load(cpu_run))
    assert [(c["name"], c["status"]) for c in document["changes"]] == [
        ("residual_boundary", "kept"),
        ("inductor:swiglu", "rejected"),
        ("qk_norm_rope", "rejected"),
        ("inductor:router", "failed"),
        ("parallel_projection", "kept"),
    ]
    kept, slower, wrong, failed, _ = document["changes"]
    assert (kept["predicted_us"], kept["gain_us"], kept["decode_us"]) == (130.0, 150.0, 850.0)
    assert kept["decode_interval_us"] == [841.5, 858.5]
    assert (slower["gain_us"], slower["mde_us"], slower["prefill_us"]) == (-74.0, 12.5, 9000.0)
    assert wrong["decode_us"] is None and not wrong["verdict"]["region"]["passed"]
    assert failed["verdict"] == {"region": None, "model": None}
    assert [(c["control"], c["refused"]) for c in document["controls"]] == [
        ("identity", True),
        ("slowed", True),
    ]
    assert document["final"]["kernels_per_layer"] == {"moe_sliding": 2}
    assert document["final"]["other_targets"] == {"decode-bs8": {"median_us": 2000.0}}


def test_a_run_that_kept_nothing_claims_nothing(cpu_run: Path) -> None:
    """The machine was faster at the end than when the baselines were timed; the model was not."""
    run = Run.load(cpu_run)
    run.attempts = [a for a in run.attempts if a.status is not Status.KEPT]
    eager, _, compiled = baseline_rows(run)
    assert eager.decode is not None and compiled.decode is not None
    assert (eager.decode.value, compiled.decode.value) == (1.0, 0.7)
    assert any(
        "decode: 1.000 ms, nothing kept; 760.0 µs at the end" in line for line in headline(run)
    ), headline(run)
    run.header = replace(run.header, stands_on=("residual_boundary",))
    assert not run.unchanged


def test_unfinished_summary_claims_nothing(unfinished_run: Path) -> None:
    document = summary(Run.load(unfinished_run))
    assert (document["final"], document["stopped"]) == (None, None)
    assert document["speedup"] == {"decode": {}, "prefill": {}}


def test_prediction_error_is_the_median_over_timed_changes(cpu_run: Path) -> None:
    run = Run.load(cpu_run)
    assert [p.error_us for p in predictions(run)] == [20.0, 129.0, 9.0]
    assert median_error_us(run) == 20.0


def test_steps_follow_the_model_and_keep_refused_candidates_apart(cpu_run: Path) -> None:
    path = steps(Run.load(cpu_run), "decode")
    assert [s.label for s in path] == ["start", "3", "4", "5", "6", "7"]
    levels = [s.level.median_us if s.level else None for s in path]
    assert levels == [1000.0, 851.0, None, None, None, 761.0]
    assert [s.tried_us for s in path] == [None, 850.0, 924.0, None, None, 760.0]


def test_summary_round_trips_through_its_file(cuda_run: Path) -> None:
    run = Run.load(cuda_run)
    path = write_summary(cuda_run)
    assert path == cuda_run / "summary.json"
    document = json.loads(path.read_text())
    assert document == summary(run)
    rebuilt = Verdict.from_json(document["changes"][0]["verdict"]["region"])
    assert rebuilt == run.attempts[2].region_verdict
    assert [p.name for p in cuda_run.iterdir()].count("summary.json") == 1
    assert not list(cuda_run.glob(".summary.json*"))


@settings(max_examples=50, deadline=None)
@given(
    base=st.floats(1.0, 1e7),
    after=st.floats(1.0, 1e7),
    spread=st.floats(0.0, 0.5),
)
def test_ratio_lies_in_its_interval_and_inverts(base: float, after: float, spread: float) -> None:
    def around(us: float) -> Timing:
        return Timing(median_us=us, interval_us=(us * (1 - spread), us * (1 + spread)), samples=9)

    there, back = ratio(around(base), around(after)), ratio(around(after), around(base))
    low, high = there.interval
    assert low <= there.value <= high
    assert math.isclose(there.value * back.value, 1.0)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_json_cannot_hold_becomes_null(cpu_run: Path, value: float) -> None:
    run = Run.load(cpu_run)
    verdict = run.attempts[2].region_verdict
    assert verdict is not None
    outputs = tuple(replace(o, worst_scaled=value) for o in verdict.outputs)
    run.attempts[2] = replace(run.attempts[2], region_verdict=replace(verdict, outputs=outputs))
    text = json.dumps(summary(run), allow_nan=False)
    region = json.loads(text)["changes"][0]["verdict"]["region"]
    assert region["outputs"][0]["worst_scaled"] is None
