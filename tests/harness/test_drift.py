"""The free-running drift, with routes free and forced."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.drift import describe, drift
from harness.drift_record import Drift, DriftRow
from harness.layers import layer_names
from harness.steps import steps
from harness.workload import Workload
from optimized.change import share
from tests.harness.judged import change, changed, mini, toy

DECODES = 2
LENGTHS = 17 + 12 + 1  # of the toy's three sequences; it returns logits for every token


def drifted(workload: Workload, candidate: nn.Module, *, forced: bool = True) -> Drift:
    return drift(
        workload.model,
        candidate,
        names=layer_names(workload.model),
        inputs=itertools.islice(steps(workload, 1, sizes=False, decodes=DECODES), 1 + DECODES),
        decodes=DECODES,
        seed=1,
        forced=forced,
    )


def error(row: DriftRow, layer: int) -> float:
    found = row.layers[layer]
    assert found is not None
    return found


def rows(found: Drift, of: str) -> dict[tuple[str, str], DriftRow]:
    return {(r.routes, r.step): r for r in found.rows if r.of == of}


def test_the_reference_reroutes_itself_and_forced_routes_leave_only_rounding() -> None:
    found = drifted(mini(), share(mini().model))
    assert found.layers == tuple(f"model.layers.{i}" for i in range(6))
    assert all(set(r.layers) == {0.0} and r.kl_max == 0.0 for r in rows(found, "result").values())
    own = rows(found, "reference")
    assert set(own) == {(r, s) for r in ("free", "forced") for s in ("prefill", "decode")}
    free, forced = own["free", "prefill"], own["forced", "prefill"]
    assert 0 < error(forced, 0) == error(free, 0) < 0.01
    assert error(free, -1) > 3 * error(forced, -1) > 0
    assert forced.kl_mean <= forced.kl_max < free.kl_max
    assert (free.tokens, own["free", "decode"].tokens) == (3, 3 * DECODES)


def test_the_last_layer_is_the_last_that_is_called() -> None:
    """Layers of an encoder that a step does not need hid how far the decoder had drifted."""
    model = share(toy().model)
    model.encoder = nn.ModuleList([nn.Linear(2, 2)])
    names = layer_names(model)
    assert names[-1] == "encoder.0"
    inputs = itertools.islice(steps(toy(), 1, sizes=False), 1)
    found = drift(model, share(model), names=names, inputs=inputs, decodes=0, seed=1, forced=False)
    assert found.layers == tuple(names[:-1])
    assert None not in rows(found, "reference")["free", "prefill"].layers


def misrouted(rows_of_ten: int) -> Callable[[nn.Module], Callable[..., Any]]:
    """The router with some rows sent to other experts, at the right weights."""

    def build(node: Any) -> Callable[..., Any]:
        def forward(x: Tensor):
            weights, experts = node(x)
            picked = torch.arange(x.shape[1]) % 10 < rows_of_ten
            return weights, torch.where(picked[:, None], 3 - experts, experts)

        return forward

    return build


@pytest.mark.parametrize("rows_of_ten", [3, 10])
def test_a_model_that_only_routes_otherwise_does_not_drift_on_forced_routes(rows_of_ten) -> None:
    found = rows(drifted(toy(), changed(toy(), change("choose", misrouted(rows_of_ten)))), "result")
    free, forced = found["free", "prefill"], found["forced", "prefill"]
    assert error(free, 0) > 0.01 and free.kl_max > forced.kl_max
    assert forced.layers == (0.0, 0.0) and forced.kl_max == 0.0 and forced.flips == 0
    assert free.tokens == LENGTHS  # no padding


def test_forced_routes_take_weights_from_the_models_own_values() -> None:
    """The candidate's norm is scaled, so its router sees other values: on forced routes it must
    drift by what that does, and not be handed the reference's weights."""

    def scaled(node: Any) -> Callable[..., Any]:
        def forward(x: Tensor, residual: Tensor):
            residual, out = node(x, residual)
            return residual, out * 1.25

        return forward

    found = rows(drifted(toy(), changed(toy(), change("add_norm", scaled))), "result")
    assert error(found["forced", "prefill"], -1) > 0.05


def test_a_choice_that_no_submodule_returns_cannot_be_forced() -> None:
    def whole(node: Any) -> Callable[..., Any]:
        def forward(x: Tensor) -> Tensor:
            weights, experts = node.choose.forward(x)
            every = torch.einsum("btd,edf->btef", x, node.weight)
            chosen = every.gather(2, experts[..., None].expand(-1, -1, -1, every.shape[-1]))
            return (F.gelu(chosen).float() * weights[..., None]).sum(2).to(x.dtype)

        return forward

    found = drifted(toy(), changed(toy(), change("mixture", whole)))
    assert found.unforced == "blocks.0.mixture.choose is not called by itself"
    assert {r.routes for r in found.rows} == {"free"}


def test_a_tree_that_is_called_elsewhere_is_opened_down_to_what_was_replaced() -> None:
    """As a sandboxed candidate, whose every module calls its namesake in another process."""

    class Elsewhere:
        integers: dict[str, list[Tensor]] = {}

        def __init__(self, forward: Callable[..., Any]) -> None:
            self.forward = forward

        def __call__(self, *args: Any) -> Any:
            return self.forward(*args)

    candidate = changed(toy(), change("choose", misrouted(3)))
    twin = share(candidate)
    for name, module in candidate.named_modules():
        module.forward = Elsewhere(twin.get_submodule(name).forward)
    plain = changed(toy(), change("choose", misrouted(3)))
    assert drifted(toy(), candidate) == drifted(toy(), plain)
    assert all(isinstance(module.forward, Elsewhere) for module in candidate.modules())


def test_the_figures_as_sentences() -> None:
    found = drifted(toy(), share(toy().model), forced=False)
    assert {r.routes for r in found.rows} == {"free"} and found.unforced is None
    prefill, decode = describe(found)
    assert prefill.startswith(
        f"free-running prefill: relative 0, KL 0, 0 of {LENGTHS} top-1 flip(s); the reference "
        "against itself under noise: relative "
    )
    assert decode.startswith("free-running decode: relative 0, KL 0, 0 of 6 top-1 flip(s); ")
