"""Tuning looks at the calls that a step really makes, and keeps the fastest valid knobs."""

import time
from dataclasses import dataclass

import pytest
import torch

from agents.storage import Studies
from agents.tuner import first_call, tune
from optimized.change import Change, Contract, Implementation, nodes
from reference import beam

MODEL = beam.build(beam.configs["mini"], "cpu", 0)


def step():

    cache = beam.cache(beam.configs["mini"], 1, 8, "cpu")
    with torch.no_grad():
        return MODEL(
            torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long), cache
        )


def test_the_first_module_that_is_called_counts():
    names = nodes(MODEL, "linear")
    node, args = first_call(MODEL, names, step)
    assert node is MODEL.model.layers[0].self_attn.o_proj
    assert names[0].endswith("q_proj")  # whose weight is read past it
    assert args[0].shape == (1, 1, 256)


def test_a_region_that_the_step_does_not_call_is_named():
    with pytest.raises(ValueError, match="not called in this step"):
        first_call(MODEL, ["model.layers.0.self_attn.q_proj"], step)


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
            knobs=Delay,
            shape=lambda node, gate, up: {"F": gate.shape[-1]},
        ),
    ),
)


def test_the_fastest_valid_knobs_win_and_trials_are_kept(tmp_path):
    where = {"studies": Studies(tmp_path / "optuna.journal"), "seconds": 20.0}
    found = tune(MODEL, CHANGE, "torch", step, **where)
    assert found == {"F=512": {"ms": 1}}
    written = (tmp_path / "optuna.journal").stat().st_size
    started = time.perf_counter()
    assert tune(MODEL, CHANGE, "torch", step, **where) == found
    assert (tmp_path / "optuna.journal").stat().st_size >= written
    assert time.perf_counter() - started < 2.0  # nothing is timed again
