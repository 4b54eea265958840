"""Tuning looks at the calls that a step really makes, and keeps the fastest valid knobs."""

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from triton.runtime.errors import OutOfResources

from agents import knob_search, tuner
from agents.knob_search import BATCH, MAX_TRIALS, Space, Values, search
from agents.storage import Studies
from agents.tuner import calls, in_step, tune
from optimized.catalog import load_change
from optimized.change import (
    Change,
    Contract,
    Implementation,
    apply_change,
    shape_key,
    share,
)
from optimized.gemv_engines import CannotServe
from optimized.packing import are_adjacent
from reference import beam

MODEL = beam.build(beam.configs["mini"], "cpu", 0)


def step(model: nn.Module):
    cache = beam.cache(beam.configs["mini"], 1, 8, "cpu")
    zero = torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():
        return model(zero, zero, cache)


@dataclass(frozen=True, kw_only=True)
class Delay:
    """Knobs whose effect is known: milliseconds of waiting."""

    ms: int

    @classmethod
    def heuristic(cls, shape):
        return cls(ms=4)

    @classmethod
    def candidates(cls, shape):
        return {"ms": (0, 1, 4, 8)}

    def is_valid(self, shape):
        return self.ms > 0


def waiting(node, knobs):
    def forward(gate, up):
        time.sleep((knobs or Delay.heuristic({})).ms / 1e3)
        return node(gate, up)

    return forward


CHANGE = Change(
    name="waiting",
    region="swiglu",
    summary="SwiGLU after a pause",
    contract=Contract(numerics="exact"),
    implementations=(
        Implementation(
            backend="torch",
            devices=("cpu",),
            build=waiting,
            guard=lambda node, gate, up: "a row of experts" if gate.dim() == 2 else None,
            knobs=Delay,
            shape=lambda node, gate, up: {"F": gate.shape[-1]},
        ),
    ),
)


def applied(change: Change = CHANGE, backend: str = "torch") -> nn.Module:
    model = share(MODEL)
    apply_change(model, change, backend)
    return model


def test_the_fastest_valid_knobs_win_and_trials_are_kept(tmp_path: Path) -> None:
    model = applied()
    where = {"studies": Studies(tmp_path / "optuna.journal"), "seconds": 20.0}
    found = tune(model, CHANGE, "torch", lambda: step(model), **where)
    assert found == {"F=512": {"ms": 1}}
    started = time.perf_counter()
    assert tune(model, CHANGE, "torch", lambda: step(model), **where) == found
    assert time.perf_counter() - started < 2.0  # one timing of the heuristic's is new


def test_calls_are_counted_by_shape_and_declined_ones_left_out() -> None:
    model = applied()
    (call,) = calls(model, CHANGE, CHANGE.implementations[0], lambda: step(model))
    assert call.shape == {"F": 512}
    node: Any = model.get_submodule("model.layers.0.mlp.activate")
    assert call.node is node.replaces()
    assert call.count == 2  # the experts' rows are declined


def test_packed_weights_are_what_is_tuned() -> None:
    """A change is applied before: a guard would leave unpacked weights to the reference."""
    change = load_change("parallel_projection")
    shape = change.implementation("triton").shape
    implementation = replace(change.implementation("torch"), shape=shape)
    model = beam.build(beam.configs["mini"], "cpu", 0)
    apply_change(model, replace(change, implementations=(implementation,)), "torch")
    found = calls(model, change, implementation, lambda: step(model))
    assert all(are_adjacent(call.args[1:]) for call in found)
    rows = [sum(w.shape[0] for w in call.args[1:]) for call in found]
    assert [call.shape["O"] for call in found] == rows
    assert len(set(rows)) == len(rows) > 1  # attention's projections, and the dense layers'


def test_the_step_decides_between_the_fastest_alone() -> None:
    found = {"a": [{"n": 1}, {"n": 2}], "b": [{"n": 7}, {"n": 5}]}
    heuristics: dict[str, Values] = {"a": {"n": 0}, "b": {"n": 5}}
    times = {(0, 5): 10.0, (1, 5): 11.0, (2, 5): 8.0, (2, 7): 7.0, (1, 7): 1.0}
    tried = []

    def step_us(knobs) -> float:
        tried.append((knobs["a"]["n"], knobs["b"]["n"]))
        return times[tried[-1]]

    totals = {"a": 1.0, "b": 1.0}
    assert in_step(found, heuristics, totals, step_us) == {"a": {"n": 2}, "b": {"n": 7}}
    assert tried == [(0, 5), (1, 5), (2, 5), (2, 7)]


def test_calls_that_are_hardly_any_of_the_step_are_decided_alone() -> None:
    found = {"few": [{"n": 3}, {"n": 4}], "none": [], "many": [{"n": 1}]}
    heuristics: dict[str, Values] = {"few": {"n": 4}, "none": {"n": 0}, "many": {"n": 2}}
    tried = []

    def step_us(knobs) -> float:
        tried.append(dict(knobs))
        return 100.0 - len(tried)

    totals = {"few": 1.9, "none": 1.9, "many": 2.0}
    chosen = in_step(found, heuristics, totals, step_us)
    assert chosen == {"few": {"n": 3}, "none": {"n": 0}, "many": {"n": 1}}
    assert tried == [heuristics, chosen]  # none of the two for "few" alone


def test_no_step_is_run_where_the_heuristic_is_fastest() -> None:
    def step_us(knobs) -> float:
        raise AssertionError("not needed")

    assert in_step({"a": [{"n": 0}]}, {"a": {"n": 0}}, {"a": 9.0}, step_us) == {"a": {"n": 0}}


def test_the_step_decides_what_is_on_and_off_on_top_of_the_fastest() -> None:
    """`split` gains and stays, `ahead` loses, `heavy` cannot be launched, an invalid one is not
    tried; none of them is timed alone."""
    names = "split", "ahead", "heavy", "wrong"
    space = Space(
        candidates={"n": (0, 1), **dict.fromkeys(names, (False, True)), "word": ("a", "b")},
        heuristic={"n": 0, **dict.fromkeys(names, False), "word": "a"},
        is_valid=lambda values: not values["wrong"],
    )
    assert space.switches() == [*names]
    fastest = {**space.heuristic, "n": 1}
    tried = []

    def step_us(knobs) -> float:
        one = knobs["a"]
        tried.append([one["n"], *(name for name in names if one[name])])
        if one["heavy"]:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return 100.0 - one["n"] - 5 * one["split"] + 3 * one["ahead"]

    given = {"a": [fastest]}, {"a": space.heuristic}, {"a": 50.0}, step_us
    chosen = in_step(*given, spaces={"a": space})
    assert chosen == {"a": {**fastest, "split": True}}
    assert tried == [[0], [1], [1, "split"], [1, "split", "ahead"], [1, "split", "heavy"]]
    tried.clear()
    assert in_step(*given, spaces={"a": space}, seconds=0.0) == {"a": fastest}
    assert tried == [[0], [1]]


def test_a_shape_that_is_hardly_any_of_a_region_keeps_the_heuristics_knobs(tmp_path: Path) -> None:
    """Of the region's two shapes one is called for 2 of 1002 milliseconds."""
    model = applied()
    (call,) = calls(model, CHANGE, CHANGE.implementations[0], lambda: step(model))
    times = {"F=512": 500.0, "F=8": 1.0}
    rare = replace(call, shape={"F": 8})
    asked = []

    def searched(name, space, run, time_us, **_):
        asked.append(name)
        return [(1.0, {"ms": 1})]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "calls", lambda *_: [rare, call])
        patch.setattr(tuner, "search", searched)
        patch.setattr(tuner._Tuned, "time_us", lambda self, values: times[self.key])
        studies = Studies(tmp_path / "optuna.journal")
        given = {"studies": studies, "seconds": 9.0}
        found = tune(model, CHANGE, "torch", lambda: None, **given)
        patch.setattr(Space, "switches", lambda _: ["ms"])
        patch.setattr(Delay, "is_valid", lambda *_: True)
        steps = []

        def step_us(knobs) -> float:
            steps.append({key: values["ms"] for key, values in knobs.items()})
            return 50.0 - len(steps)  # so short that a rare shape's calls are some of it

        tune(model, CHANGE, "torch", lambda: None, step_us=step_us, **given)
    assert found == {"F=512": {"ms": 1}}
    assert [name.split(":")[-1] for name in asked] == ["F=512"] * 2
    assert len(steps) > 1 and {tried["F=8"] for tried in steps} == {4}


def wide(valid=lambda values: (values["x"] + values["y"]) % 4 == 0) -> Space:
    numbers = tuple(range(16))
    return Space(
        candidates={"x": numbers, "y": numbers}, heuristic={"x": 8, "y": 8}, is_valid=valid
    )


def found_in(
    tmp_path: Path, space: Space, run=lambda values: None, time_us=None, seconds: float = 60.0
) -> list[tuple[float, Values]]:
    studies = Studies(tmp_path / "optuna.journal")
    timed = time_us or (lambda values: float(values["x"] + values["y"]))
    return search("study", space, run, timed, studies=studies, seconds=seconds)


def test_invalid_knobs_cost_no_trial(tmp_path: Path) -> None:
    found = found_in(tmp_path, wide())
    assert len(found) == MAX_TRIALS
    points = {(values["x"], values["y"]) for _, values in found}
    assert len(points) == MAX_TRIALS and (8, 8) in points
    assert all((x + y) % 4 == 0 for x, y in points)
    assert [us for us, _ in found] == sorted(us for us, _ in found)
    assert found_in(tmp_path, wide()) == found  # enough were timed


def test_few_combinations_are_all_timed(tmp_path: Path) -> None:
    space = wide(lambda values: values["x"] == values["y"])
    assert {values["x"] for _, values in found_in(tmp_path, space)} == set(range(16))


def test_seconds_end_a_search_after_a_batch_with_the_heuristic(tmp_path: Path) -> None:
    found = found_in(tmp_path, wide(), seconds=0.0)
    assert len(found) == BATCH and {"x": 8, "y": 8} in [values for _, values in found]
    assert len(found_in(tmp_path, wide(), seconds=0.0)) == 2 * BATCH


@pytest.mark.parametrize(
    "error",
    [OutOfResources(300_000, 232_448, "shared memory"), CannotServe("no kernel")],
    ids=["device", "library"],
)
def test_what_cannot_be_launched_fails_its_trial_alone(tmp_path: Path, error: Exception) -> None:
    def run(values: Values) -> None:
        if values["x"] == 8:
            raise error

    def time_us(values: Values) -> float:
        run(values)
        return float(values["x"] + values["y"])

    found = found_in(tmp_path, wide(), run, time_us)
    assert found and all(values["x"] != 8 for _, values in found)
    study = optuna.load_study(
        study_name="study", storage=Studies(tmp_path / "optuna.journal").open()
    )
    failed = [t for t in study.trials if t.state is optuna.trial.TrialState.FAIL]
    assert {"x": 8, "y": 8} in [t.params for t in failed]
    assert len(found) + len(failed) == MAX_TRIALS


def test_a_mistake_of_the_change_is_not_taken_for_bad_knobs(tmp_path: Path) -> None:
    def run(values: Values) -> None:
        raise ZeroDivisionError("of its own")

    with pytest.raises(ZeroDivisionError, match="of its own"):
        found_in(tmp_path, wide(), run)


def test_a_batch_is_compiled_in_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knob_search.os, "cpu_count", lambda: BATCH)
    together = threading.Barrier(BATCH, timeout=20)  # broken unless all of a batch meet at it
    assert len(found_in(tmp_path, wide(), lambda values: together.wait())) == MAX_TRIALS


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["parallel_projection", "attention_step", "routed_experts"])
def test_every_shape_of_a_decode_is_tuned_on_a_card(name: str, tmp_path: Path) -> None:
    change = load_change(name)
    config = beam.configs["mini"]
    reference = beam.build(config, "cuda", 0)
    cache, zero = beam.cache(config, 1, 64, "cuda"), torch.zeros(1, 1, dtype=torch.long).cuda()
    model = share(reference)
    apply_change(model, change, "triton")
    studies = Studies(tmp_path / "optuna.journal")
    told = []

    def step_us(knobs) -> float:
        told.append(knobs)
        return float(len(told))  # nothing is better than the heuristic's

    def run_step() -> None:
        model(zero, zero, cache)

    kept = tune(model, change, "triton", run_step, studies=studies, seconds=4.0, step_us=step_us)
    assert kept == {}
    found = calls(model, change, change.implementation("triton"), run_step)
    storage = studies.open()
    for call in found:
        study = optuna.load_study(study_name=f"{name}:triton:{_key(call)}", storage=storage)
        timed = [t for t in study.trials if t.value is not None]
        assert len(timed) >= 2 and all(0 < (t.value or 0) < 1e5 for t in timed)
    assert told and set(told[0]) == {_key(call) for call in found}


def _key(call) -> str:
    return shape_key(call.shape)
