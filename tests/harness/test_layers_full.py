"""The full gate: many teacher-forced decodes, each layer call against the reference's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.judge import judge_model
from harness.layers import DECODES
from harness.records import Verdict
from harness.workload import Workload
from optimized.change import share
from tests.harness.judged import change, changed, toy
from tests.harness.test_judge_honest import reordered_add_norm

FIRST = 17  # the toy's longest prompt; decode n, counted from 0, is at FIRST + n
LAYERS, STEPS = 2, 5


def full(region: str, build: Callable[[nn.Module], Callable[..., Any]], seed: int = 1) -> Verdict:
    candidate = changed(toy(), change(region, build))
    return judge_model(toy().model, candidate, toy(), seed, full=True, drifts=False)


def test_an_honest_change_passes_with_every_decode_judged() -> None:
    verdict = full("add_norm", reordered_add_norm)
    assert verdict.passed, verdict.reason
    assert verdict.cases == LAYERS * (STEPS + DECODES - 1)
    calls = LAYERS * (DECODES - 1)
    (note,) = [n for n in verdict.notes if "teacher-forced" in n]
    assert note == (
        f"one prefill and {DECODES} teacher-forced decodes after it; noise was measured in 8 of "
        f"{calls} layer calls of the last {DECODES - 1}"
    )
    later = {o.output: o for o in verdict.outputs if "later decodes: " in o.output}
    out = later["blocks.0, later decodes: out[0]"]
    assert out.elements == calls * 3 * 64  # three sequences of width 64
    assert 0 < out.allowed_share < 0.02  # noise was measured, and pooled
    assert verdict.routing is not None and verdict.routing.rows > calls * 3
    assert verdict.drift is None


def at_decode(n: int, alter: Callable[..., Any]) -> Callable[[nn.Module], Callable[..., Any]]:
    """The attention itself, altered in one decode step alone."""

    def build(node: nn.Module) -> Callable[..., Any]:
        def forward(x: Tensor, positions: Tensor, store: dict[str, Tensor]) -> Tensor:
            out = node(x, positions, store)
            if positions.shape[1] == 1 and int(positions.max()) == FIRST + n:
                return alter(out, store)
            return out

        return forward

    return build


def test_what_goes_wrong_late_is_seen_by_the_full_gate_alone() -> None:
    wrong = at_decode(20, lambda out, store: out * 1.25)
    candidate = changed(toy(), change("mix", wrong))
    quick = judge_model(toy().model, candidate, toy(), 1, drifts=False)
    assert quick.passed, quick.reason
    verdict = full("mix", wrong)
    assert verdict.reason is not None
    assert "decode 21 after it" in verdict.reason  # named from 1


def test_a_stray_write_in_a_late_decode_is_judged_in_full() -> None:
    def stray(out: Tensor, store: dict[str, Tensor]) -> Tensor:
        store["k"][0, 0, 0] += 1
        return out

    verdict = full("mix", at_decode(9, stray))
    assert verdict.reason is not None
    assert "writes 1 row(s) that the reference leaves as they are" in verdict.reason
    assert "decode 10 after it" in verdict.reason


def test_a_late_wrong_route_is_no_near_tie() -> None:
    def build(node: Any) -> Callable[..., Any]:
        calls = {"n": 0}

        def forward(x: Tensor):
            weights, experts = node(x)
            calls["n"] += x.shape[1] == 1
            if calls["n"] > 30:
                experts = (experts + 1) % 4
            return weights, experts

        return forward

    verdict = full("choose", build)
    assert verdict.reason is not None
    assert "above its self-noise" in verdict.reason
    assert verdict.routing is not None and verdict.routing.flipped > 0
    worst = verdict.routing.largest
    assert worst is not None and worst.margin is not None and worst.margin > worst.limit
    assert worst.output == "mixture.choose[1]" and worst.where.startswith("blocks.")


def test_an_infinite_value_is_named() -> None:
    verdict = full("mix", at_decode(3, lambda out, _: torch.full_like(out, torch.inf)))
    assert verdict.reason is not None
    assert "NaN or infinite" in verdict.reason and "decode 4 after it" in verdict.reason


@pytest.mark.gpu
def test_the_full_gate_on_a_gpu() -> None:
    workload = Workload.load("beam", "mini", "cuda")
    verdict = judge_model(workload.model, share(workload.model), workload, 1, full=True)
    assert verdict.passed, verdict.reason
    assert verdict.drift is not None and verdict.drift.unforced is None
    assert len(verdict.drift.rows) == 8
    errors = {(r.of, r.routes, r.step): r.layers[-1] or 0.0 for r in verdict.drift.rows}
    for (of, routes, step), error in errors.items():
        assert of != "result" or error <= errors["reference", routes, step]
