"""The whole model, layer by layer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from harness.judge import judge_model
from harness.layers import joint_contract, layer_names
from harness.policy import Policy
from optimized.change import Contract, share
from tests.harness.judged import change, changed, mini, normed, toy


def test_layers_are_found_without_names() -> None:
    assert layer_names(mini().model) == [f"model.layers.{i}" for i in range(6)]
    assert layer_names(toy().model) == ["blocks.0", "blocks.1"]
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert layer_names(plain) == ["0", "1"]


def test_the_model_itself_passes() -> None:
    verdict = judge_model(mini().model, share(mini().model), mini(), 1)
    assert verdict.passed, verdict.reason
    assert verdict.scope == "model" and verdict.cases == 6 * 5
    assert {o.output.rpartition(": ")[2] for o in verdict.outputs} == {
        "out[0]",
        "out[1]",
        "cache.k",
        "cache.v",
    }
    assert all(o.bit_equal_share == 1.0 for o in verdict.outputs)
    assert any(n.startswith("free-running prefill: relative 0,") for n in verdict.notes)


def test_reordered_norms_pass_on_an_unknown_model() -> None:
    def reordered(node: Any) -> Callable[..., Any]:
        def forward(x: Tensor, residual: Tensor):
            residual = residual + x
            wide = residual.float().flip(-1)
            wide = residual.float() - wide.mean(-1, keepdim=True)
            square = wide.flip(-1).square().mean(-1, keepdim=True)
            scaled = wide * torch.rsqrt(square + 1e-5)
            return residual, scaled.to(x.dtype) * node.weight + node.bias

        return forward

    for seed in range(5):
        candidate = changed(toy(), change("add_norm", reordered))
        verdict = judge_model(toy().model, candidate, toy(), seed)
        assert verdict.passed, verdict.reason


def test_a_skipped_rounding_shows_in_its_layer() -> None:
    def once(n: Any) -> Callable[..., Any]:
        def forward(y: Tensor, h: Tensor, post_weight: Tensor, pre_weight: Tensor):
            h = (normed(y, post_weight, n.eps) * n.y_scale + h.float() * n.h_scale).bfloat16()
            return h, normed(h, pre_weight, n.eps).bfloat16()

        return forward

    candidate = changed(mini(), change("residual_boundary", once))
    verdict = judge_model(mini().model, candidate, mini(), 1)
    assert verdict.reason is not None  # on some machines a route flips first
    first = "model.layers.0: out[0]: " if "elements differ" in verdict.reason else "mlp.gate[1] rou"
    assert verdict.reason.startswith(first)
    shares = {r.output: (1 - r.bit_equal_share, r.allowed_share) for r in verdict.outputs}
    differ, allowed = shares["model.layers.0: out[0]"]
    assert differ > allowed > 0


def test_what_a_part_of_a_layer_elides_is_known_to_the_layer() -> None:
    def once(node: Any) -> Callable[..., Any]:
        def forward(x: Tensor, residual: Tensor):
            wide = residual.float() + x.float()
            residual, centred = wide.to(x.dtype), wide - wide.mean(-1, keepdim=True)
            scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
            return residual, scaled.to(x.dtype) * node.weight + node.bias

        return forward

    contract = Contract(numerics="reduction", elides={"residual + x": "one kernel"})
    candidate = changed(toy(), change("add_norm", once, contract))
    assert {"first: residual + x", "second: residual + x"} == {*joint_contract(candidate).elides}
    allowed = judge_model(toy().model, candidate, toy(), 1, policy=Policy(allow_elided=True))
    assert allowed.passed, allowed.reason
    refused = judge_model(toy().model, candidate, toy(), 1)
    assert refused.reason is not None and "allows no elided rounding" in refused.reason


def test_stale_cache_rows_are_seen() -> None:
    def stale(node: Any) -> Callable[..., Any]:
        def forward(*args: Any) -> Any:
            before = args[-3].clone()
            out = node(*args)
            args[-3][:, 1::2] = before[:, 1::2]
            return out

        return forward

    candidate = changed(mini(), change("qk_norm_rope", stale))
    verdict = judge_model(mini().model, candidate, mini(), 1)
    assert verdict.reason is not None and "row(s) unwritten" in verdict.reason


def test_biased_routing_is_seen() -> None:
    def biased(node: Any) -> Callable[..., Any]:
        def forward(x: Tensor):
            scores = torch.sigmoid(x.float() @ node.weight.T)
            return node.choose(scores.flip(-1))

        return forward

    candidate = changed(mini(), change("router", biased))
    verdict = judge_model(mini().model, candidate, mini(), 1)
    assert verdict.reason is not None
    assert "routes" in verdict.reason and "above its self-noise" in verdict.reason
