"""Kernels on a GPU: launches tied to operators, graph replays aligned with them.

The ranges are what the recorder leaves on a CPU; the device's events are made up (`device.py`).
"""

import pytest
import torch

from tests.traces.device import Kernel as Launch
from tests.traces.device import eager_events, one_kernel, replay_events
from tests.traces.device import launched as launch_events
from tests.traces.toy_stack import line_of, tower
from traces import kineto
from traces.assemble import assemble
from traces.capture import _record
from traces.observed import Operator
from traces.origins import Timed, launched, read
from traces.outline import outline
from traces.recorder import Recorder
from traces.trace import Trace

MODEL, INPUTS = tower()


@pytest.fixture(scope="module")
def recorded() -> tuple[Recorder, list[kineto.Event]]:
    return _record(MODEL, INPUTS, torch.device("cpu"))


def two_for_products(operator: Operator) -> list[Launch]:
    """As `one_kernel`, but a product is a split-K pair."""
    if operator.work.matmul:
        return [("void gemm_128x64<bf16>(int)", 6.0), ("void splitk_reduce<float>(int)", 1.0)]
    return one_kernel(operator)


def traced(
    recorder: Recorder, host: list[kineto.Event], replay: list[Launch], kernels=one_kernel
) -> Trace:
    eager = eager_events(host, recorder, kernels)
    launches, timed = read(recorder, eager, replay_events(replay), "cuda")
    return assemble(
        recorder,
        launches,
        timed,
        outline=outline(MODEL),
        device="cuda",
        mode="graph",
        step_times_us=[100.0],
        title="tower",
    )


def names(recorder: Recorder, kernels=one_kernel) -> list[Launch]:
    return [kernel for operator in recorder.operators for kernel in kernels(operator)]


def test_an_eager_launch_has_its_operators_module_and_line(recorded) -> None:
    recorder, host = recorded
    found = launched(recorder, eager_events(host, recorder))
    assert [x.name for x in found] == [name for name, _ in names(recorder)]
    tanh = [x for x in found if x.op == "aten::tanh"]
    assert [recorder.calls[x.call or 0].module for x in tanh] == [
        "storeys.0.squash",
        "storeys.1.squash",
    ]
    assert {x.source for x in tanh} == {line_of("return (torch.tanh(wide)")}


def test_a_replay_takes_modules_and_lines_from_the_recording(recorded) -> None:
    recorder, host = recorded
    trace = traced(recorder, host, names(recorder))
    assert trace.summary()["attributed_share"] == 1.0
    assert [trace.module(k) for k in trace.kernels if k.matmul] == [
        *("storeys.0.twins",) * 2,
        *("storeys.1.twins",) * 2,
    ]
    assert trace.steps == 2  # the first of three is left out
    gaps = {round(k.gap_us, 3) for k in trace.kernels[1:]}
    assert (trace.kernels[0].gap_us, gaps) == (0.0, {0.5})


def test_renamed_products_keep_their_modules(recorded) -> None:
    recorder, host = recorded
    replay = [
        ("cutlass_80_wmma_tensorop", 5.0) if "mm_kernel" in name else (name, us)
        for name, us in names(recorder)
    ]
    trace = traced(recorder, host, replay)
    renamed = [k for k in trace.kernels if k.name.startswith("cutlass")]
    assert [trace.module(k) for k in renamed] == [
        *("storeys.0.twins",) * 2,
        *("storeys.1.twins",) * 2,
    ]
    assert all(k.op == "aten::mm" for k in renamed)
    assert trace.summary()["attributed_share"] == 1.0


def test_a_kernel_that_only_the_replay_has_is_listed_as_ambiguous(recorded) -> None:
    recorder, host = recorded
    plain = names(recorder)
    first = next(i for i, (name, _) in enumerate(plain) if "mm_kernel" in name)
    trace = traced(recorder, host, [*plain[:first], ("Memset (Device)", 1.0), *plain[first:]])
    assert [k.name for k in trace.ambiguous] == ["Memset (Device)"]
    sure = sum(us for _, us in plain)
    assert trace.summary()["attributed_share"] == pytest.approx(sure / (sure + 1.0))


def test_a_kernel_that_the_replay_lacks_moves_nobody(recorded) -> None:
    recorder, host = recorded
    plain = names(recorder)
    tanh = next(i for i, (name, _) in enumerate(plain) if "tanh" in name)
    trace = traced(recorder, host, [*plain[:tanh], *plain[tanh + 1 :]])
    assert len(trace.kernels) == len(plain) - 1
    assert not trace.ambiguous
    assert [trace.module(k) for k in trace.kernels if "tanh" in k.name] == ["storeys.1.squash"]


def test_the_longest_kernel_of_an_operator_carries_its_cost(recorded) -> None:
    recorder, host = recorded
    trace = traced(recorder, host, names(recorder, two_for_products), two_for_products)
    product = [k for k in trace.kernels if "gemm" in k.name]
    reduction = [k for k in trace.kernels if "splitk" in k.name]
    assert (len(product), len(reduction)) == (4, 4)
    assert all((k.bytes or 0) > 0 and (k.flops or 0) > 0 for k in product)
    assert {(k.bytes, k.flops, k.matmul) for k in reduction} == {(0, 0, False)}
    assert {k.source for k in reduction} == {k.source for k in product}


def test_a_launch_outside_all_operators_belongs_to_the_module_call(recorded) -> None:
    recorder, host = recorded
    call = next(i for i, c in enumerate(recorder.calls) if c.module == "storeys.1.meld")
    span = next(e for e in host if e["name"] == f"kernelwright:call:{call}")
    events = eager_events(host, recorder, lambda operator: [])
    events += launch_events("fused_kernel", 9, span["ts"] + 0.1, span["ts"] + 5, 1.0, span["tid"])
    (found,) = launched(recorder, events)
    assert recorder.calls[found.call or 0].module == "storeys.1.meld"
    assert found.source == line_of("def forward(self, a: Tensor, b: Tensor)")
    assert found.operator is None


def test_overlapping_kernels_have_no_gap_between_them() -> None:
    spans = [(0.0, 4.0), (2.0, 3.0), (3.5, 5.0), (6.0, 7.0)]
    assert kineto.gaps_us(spans) == [0.0, 0.0, 0.0, 1.0]


def test_a_replays_kernels_follow_their_start_not_their_record() -> None:
    events = replay_events([("a", 1.0), ("b", 1.0)], repeats=1)
    shuffled = [events[2], events[0], events[1], *events[3:]]
    step = kineto.steps(kineto.host_forest(shuffled))[0]
    timed = Timed.of_device(kineto.in_step(kineto.device_events(shuffled), step), step)
    assert timed.names == ("a", "b")
