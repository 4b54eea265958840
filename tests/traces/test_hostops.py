"""Operator calls on a CPU, from events that the profiler really showed."""

import json
from pathlib import Path
from typing import Any

import pytest

from traces.hostops import plain_events, recorded_events
from traces.kineto import Node, host_forest, steps
from traces.names import STEP

# One step of the toy tower, one storey, whose first region Inductor compiled: recorded, and plain
# (torch 2.13 on a CPU, 2026-11-29; times from the start of the step).
DATA = json.loads((Path(__file__).parent / "data" / "compiled_step.json").read_text())


def step(events: list[dict[str, Any]]) -> Node:
    (found,) = steps(host_forest(events))
    return found


def test_the_recorder_leaves_the_sequence_of_events_as_it_was() -> None:
    recorded, _ = recorded_events(step(DATA["recorded"]), set(DATA["opaque"]))
    plain = plain_events(step(DATA["plain"]))
    assert [e.name for e in recorded] == [e.name for e in plain]
    assert len(plain) == 26


def test_every_event_belongs_to_a_call() -> None:
    _, owners = recorded_events(step(DATA["recorded"]), set(DATA["opaque"]))
    modules = [DATA["calls"][o.call or 0] for o in owners]
    assert modules[0] == "storeys.0.squash"
    assert owners[0].name == "compiled f3nolt6p"
    operators = [DATA["operators"][o.group[1]] for o in owners if o.group[0] == "operator"]
    assert list(dict.fromkeys(operators)) == list(dict.fromkeys(DATA["operators"]))
    # aten::linear only leads to aten::t, and its own time goes there
    assert owners[1].group == owners[2].group == ("operator", 0)


def test_self_times_add_up_to_the_outermost_events() -> None:
    plain = plain_events(step(DATA["plain"]))
    outermost = sum(e.end_us - e.start_us for e in plain if e.outer)
    assert sum(e.self_us for e in plain) == pytest.approx(outermost)


def node(name: str, start: float, end: float, *children: Node) -> Node:
    return Node(name, start, end, list(children))


def test_compiled_kernels_with_names_are_calls_and_carry_the_wrappers_time() -> None:
    """What torch.compile shows where Inductor's kernel profiling is on."""
    graph = "## Call CompiledFxGraph fmmv6gcbh2t3d5wv ##"
    region = node(
        "Torch-Compiled Region: 0/0",
        20,
        80,
        node("Pregraph bytecode", 21, 23),
        node(
            graph,
            30,
            75,
            node("aten::mm", 32, 60, node("aten::resolve_conj", 40, 41)),
            node("graph_0_cpp_fused_mul_0", 65, 70),
        ),
    )
    call = node("kernelwright:call:0", 5, 95, node("TorchDynamo Cache Lookup", 8, 12), region)
    events, owners = recorded_events(node(STEP, 0, 100, call), {0})
    times: dict[str, float] = {}
    for event, owner in zip(events, owners, strict=True):
        times[owner.name] = times.get(owner.name, 0.0) + event.self_us
    assert times == {"aten::mm": 28.0, "cpp_fused_mul_0": 4 + 60 - 28.0}
    assert {o.call for o in owners} == {0}
