"""Where a step's time goes, on traces whose kernels overlap, checked by hand."""

from dataclasses import replace

import pytest
import torch

from harness.records import KernelRow, StepBudget
from harness.step import Step
from reports.budget import step_budget as recorded_budget
from reports.run import Run
from tests.layout import ROOT
from tests.traces.made import CEILINGS, Did, trace
from tests.traces.toy_stack import tower
from traces.budget import exposed_us, idle_us, step_budget
from traces.capture import _profile, _record, _run_steps, capture
from traces.kernels import aggregate, kernel_rows
from traces.origins import read
from traces.tables import print_rows
from traces.trace import Trace


def overlapping(*spans: tuple[float, float, int], device: str = "cuda") -> Trace:
    """Kernels by (start, end, bytes read); 1000 bytes take 1 us at CEILINGS."""
    kernels = [
        Did(name=f"k{i}", call=0, time_us=end - start, gap_us=0.0, reads=[(i, nbytes)])
        for i, (start, end, nbytes) in enumerate(spans)
    ]
    made = trace(kernels, [("", None)], device=device)
    placed = [
        replace(k, start_us=start, end_us=end)
        for k, (start, end, _) in zip(made.kernels, spans, strict=True)
    ]
    return replace(made, kernels=tuple(placed))


EVIDENCE = ROOT / "reports/results/h200/beam-decode-bs1-2026-11-29"

# Alone; overlaps by 3 us; after a gap of 4; starts and ends inside the one before; overlaps.
SPANS = (
    (5.0, 15.0, 8000),
    (12.0, 20.0, 2000),
    (24.0, 40.0, 16000),
    (26.0, 30.0, 500),
    (38.0, 50.0, 0),
)


def test_exposed_times_add_up_to_the_step_exactly() -> None:
    t = overlapping(*SPANS)
    assert exposed_us(t) == [10.0, 5.0, 20.0, 0.0, 10.0]
    assert idle_us(t) == [0.0, 0.0, 4.0, 0.0, 0.0]
    assert sum(exposed_us(t)) == 50.0 - 5.0


def test_each_microsecond_is_counted_once() -> None:
    t = overlapping(*SPANS)
    budget = step_budget(t, kernel_rows(t, CEILINGS))
    assert budget == StepBudget(
        step_us=45.0,
        bound_us=8.0 + 2.0 + 16.0 + 0.0 + 0.0,
        gap_us=4.0,
        rest_us=2.0 + 3.0 + 0.0 + 0.0 + 10.0,
        unknown_us=0.0,
        hidden_us=3.0 + 4.0 + 2.0,
        kernels=5,
    )
    parts = budget.bound_us + budget.gap_us + budget.rest_us + budget.unknown_us
    assert parts == budget.step_us


def test_what_is_hidden_pays_for_no_more_than_its_exposed_time() -> None:
    t = overlapping((0.0, 10.0, 10_000), (1.0, 12.0, 11_000))
    budget = step_budget(t, kernel_rows(t, CEILINGS))
    assert (budget.bound_us, budget.rest_us, budget.hidden_us) == (12.0, 0.0, 9.0)


def test_kernels_of_unknown_bytes_stand_apart() -> None:
    t = overlapping((0.0, 10.0, 4000), (12.0, 20.0, 1))
    unknown = replace(t.kernels[1], costed=False, flops=None)
    t = replace(t, kernels=(t.kernels[0], unknown))
    budget = step_budget(t, kernel_rows(t, CEILINGS))
    assert (budget.bound_us, budget.gap_us, budget.rest_us, budget.unknown_us) == (4, 2, 6, 8)


def test_on_a_cpu_operators_follow_each_other() -> None:
    t = overlapping((0.0, 10.0, 4000), (3.0, 6.0, 1000), device="cpu")  # nested: times are own
    assert exposed_us(t) == [10.0, 3.0]
    assert step_budget(t, kernel_rows(t, CEILINGS)).step_us == 13.0


def test_a_step_without_kernels_has_no_time() -> None:
    empty = replace(overlapping((0.0, 1.0, 1)), kernels=())
    assert step_budget(empty, []).step_us == 0.0


def test_rows_carry_exposed_times_and_sums_keep_them() -> None:
    rows = kernel_rows(overlapping(*SPANS), CEILINGS)
    assert [row.exposed_us for row in rows] == [10.0, 5.0, 20.0, 0.0, 10.0]
    assert sum(row.exposed_us or 0.0 for row in aggregate(rows, "module")) == 45.0
    old = rows[0].to_json()
    del old["exposed_us"]  # a ledger from before
    assert KernelRow.from_json(old).exposed_us is None


@pytest.mark.parametrize(("nbytes", "share"), [(8000, 0.8), (0, None)])
def test_the_share_of_the_bandwidth(nbytes: int, share: float | None) -> None:
    (row,) = kernel_rows(overlapping((0.0, 10.0, nbytes)), CEILINGS)
    assert row.read_share(CEILINGS) == share


def test_the_table_shows_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    t = replace(overlapping(*SPANS), ceilings=CEILINGS)
    rows = kernel_rows(t)
    print_rows(rows, rows, None)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = {line[0]: line[-2:] for line in lines if line and line[-1].endswith("%")}
    assert found["bytes"] == ["26.0", "57.8%"]
    assert found["launch"] == ["4.0", "8.9%"]
    assert found["ramp,"] == ["15.0", "33.3%"]
    assert found["from"] == ["45.0", "100.0%"]
    assert rows.summary()["budget"]["step_us"] == 45.0


def test_the_parts_of_a_cpu_step_add_up_and_fit_into_it() -> None:
    model, inputs = tower(1)
    cpu = torch.device("cpu")
    recorder, recorded = _record(model, inputs, cpu)
    step = Step(model, inputs, "eager")
    _, steps = read(recorder, recorded, _profile(lambda: _run_steps(step, cpu), cpu), "cpu")
    for timed in steps:
        assert 0 < sum(span.time_us + span.gap_us for span in timed.spans) <= timed.total_us
    trace = capture(model, inputs, ceilings=CEILINGS)
    budget = kernel_rows(trace).budget
    own = sum(kernel.time_us + kernel.gap_us for kernel in trace.kernels)
    parts = budget.bound_us + budget.gap_us + budget.rest_us + budget.unknown_us
    assert parts == pytest.approx(budget.step_us)
    assert parts == pytest.approx(own)


def test_the_parts_of_the_recorded_gpu_steps_add_up() -> None:
    """Sums by line of an older ledger: kernels are taken to follow each other."""
    run = Run.load(EVIDENCE)
    for when, step_us, kernel_us in (("before", 21973.3, 18588.9), ("after", 6265.4, 5811.3)):
        budget = recorded_budget(run.kernels[when])
        assert budget is not None
        parts = budget.bound_us + budget.gap_us + budget.rest_us + budget.unknown_us
        assert parts == pytest.approx(budget.step_us)
        assert parts == pytest.approx(step_us, abs=0.1)
        assert budget.bound_us + budget.rest_us == pytest.approx(kernel_us, abs=0.1)
