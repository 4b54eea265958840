"""Curves: the ends come first, what does not fit or was not reached says so, floors add up."""

import json
import time

import pytest

from harness.__main__ import main
from harness.bench_curve import BATCHES, CONTEXTS, curve, targets
from harness.errors import ExitCode
from harness.floors import least_work
from harness.records import Ceilings
from harness.workload import Target, Workload
from optimized.change import share

CEILINGS = Ceilings(
    device_name="a card",
    read_gb_per_s=10.0,
    copy_gb_per_s=9.0,
    bf16_tflop_per_s=1.0,
    fp32_tflop_per_s=1.0,
    launch_us=1.0,
)
SMALL = Target(name="small", batch=2, tokens=1, context=64)
HUGE = Target(name="huge", batch=1 << 20, tokens=1, context=1 << 20)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload.load("beam", "mini", "cpu")


@pytest.mark.parametrize(("kind", "sizes"), [("context", CONTEXTS), ("batch", BATCHES)])
def test_the_ends_are_measured_first(kind, sizes):
    chosen = targets(kind, toy=False)
    grows = [getattr(t, kind) for t in chosen]
    assert grows[:2] == [sizes[0], sizes[-1]] and sorted(grows) == list(sizes)
    assert (sizes[0], sizes[-1]) in [(1024, 1 << 20), (1, 256)]
    assert {t.batch for t in chosen if kind == "context"} <= {1}
    assert {t.context for t in chosen if kind == "batch"} <= {8192}


def test_a_point_has_a_time_or_a_reason_and_its_floors(workload):
    models = {"reference": workload.model, "plan": share(workload.model)}
    deadline = time.monotonic() + 60
    points = list(curve(workload, models, [SMALL, HUGE], deadline=deadline, ceilings=CEILINGS))
    assert [p.model for p in points] == ["reference", "plan"] * 2
    for point in points[:2]:
        assert point.absent is None and point.step is not None and point.step.median_us > 0
        inputs = workload.inputs(SMALL)
        assert point.weight_bytes == least_work(workload.model, inputs.args)[0]
        assert point.kv_bytes == workload.cache_bytes(SMALL) == inputs.cache.nbytes
        assert point.weight_bytes is not None
        assert point.floor_us == (point.weight_bytes + point.kv_bytes) / 1e4
    for point in points[2:]:
        assert point.step is None and "GiB does not fit" in str(point.absent)
        assert point.floor_us is None and point.kv_floor_us > 0


def test_a_spent_budget_leaves_reasons(workload):
    models = {"reference": workload.model}
    points = list(curve(workload, models, [SMALL], deadline=0.0, ceilings=CEILINGS))
    assert [p.absent for p in points] == ["the budget was spent before"]


def test_the_command_lists_all_points_and_writes_them(tmp_path, capsys):
    words = ["bench", "--curve", "context", "--preset", "mini", "--device", "cpu"]
    words += ["--budget-minutes", "0.001", "--out", str(tmp_path)]
    assert main(words) == ExitCode.OUT_OF_BUDGET
    found = json.loads((tmp_path / "curve-context.json").read_text())
    assert [p["context"] for p in found["points"]] == [c // 64 for c in CONTEXTS]
    assert {p["absent"] for p in found["points"]} == {"the budget was spent before"}
    assert capsys.readouterr().out.count("absent: batch 1") == len(CONTEXTS)


@pytest.mark.gpu
def test_on_a_card_points_replay_a_graph():
    card = Workload.load("beam", "mini", "cuda")
    models = {"reference": card.model}
    points = list(curve(card, models, [SMALL], deadline=time.monotonic() + 60, ceilings=CEILINGS))
    assert points[0].step is not None and points[0].step.samples >= 5
