"""The weighted sum and the boundary after it in one kernel, and a layer that ends in it."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn

from optimized import combined_boundary
from optimized.change import apply_change, shape_key, share
from optimized.combine import weighted_sum
from optimized.combined_boundary import CombinedKnobs, combine_and_cross
from optimized.grouped_knobs import GroupedKnobs
from optimized.residual_boundary import BoundaryKnobs, cross
from optimized.routed_experts import CHANGE as EXPERTS
from reference.beam import Beam, Combine, Layer, ResidualBoundary, build, cache, configs
from tests.optimized.kernel_checks import DEVICE, bf16, needs_kernels, same_bits
from tests.reference.noise import assert_within, within

pytestmark = needs_kernels
NODE, SUM = ResidualBoundary(9, 1e-6), Combine(2.5)
NUMBERS = SUM.scale, (NODE.y_scale, NODE.h_scale), (NODE.eps, NODE.eps)


def arguments(tokens, top_k, width):
    """(y in some order, weights, places, h with gaps between rows, the norms' weights)."""
    weights = torch.rand(tokens, top_k, device=DEVICE)
    places = torch.randperm(tokens * top_k).to(torch.int32).to(DEVICE)
    h = bf16(1, tokens, width + 16, seed=2)[..., :width]
    norms = (torch.rand(2, width, device=DEVICE) + 0.5).to(torch.bfloat16)
    return bf16(tokens * top_k, width), weights, places, h, *norms


def reference(y, weights, places, h, post, pre):
    rows = y[places.long()].view(*weights.shape, -1)
    return NODE(SUM(rows, weights).view(h.shape), h, post, pre)


def reordered(y, weights, places, h, post, pre, count=12):
    """The reference with the reductions of the norms in other orders, per output."""
    outputs = [], []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(h.shape[-1], generator=generator).to(DEVICE)
        moved = (t[..., order] for t in (h, post, pre))
        for output, found in zip(
            outputs, reference(y[:, order], weights, places, *moved), strict=True
        ):
            output.append(found[..., order.argsort()])
    return outputs


@pytest.mark.parametrize("shape", [(1, 8, 320), (5, 4, 320), (3, 2, 480), (2, 1, 96)], ids=str)
def test_matches_the_reference_and_the_two_kernels(shape):
    y, weights, places, h, post, pre = args = arguments(*shape)
    found = combine_and_cross(*args, *NUMBERS)
    for ours, theirs, others in zip(found, reference(*args), reordered(*args), strict=True):
        assert ours.is_contiguous()
        assert_within(ours, theirs, others)
    summed = weighted_sum(y, weights, SUM.scale, places=places).view(h.shape)
    knobs = BoundaryKnobs(warps=1, rows=1, split=True)
    apart = cross(summed, h, post, pre, None, *NUMBERS[1:], knobs)
    assert all(same_bits(ours, other) for ours, other in zip(found, apart, strict=True))


def test_matches_at_full_width_with_every_knob():
    args, sizes = arguments(2, 8, 5120), {"N": 16384, "K": 8, "D": 5120}
    assert CombinedKnobs.heuristic(sizes) == CombinedKnobs(warps=4)
    expected, noise = reference(*args), reordered(*args)
    for warps in CombinedKnobs.candidates(sizes)["warps"]:
        knobs = CombinedKnobs(warps=int(warps))
        assert knobs.is_valid(sizes)
        found = combine_and_cross(*args, *NUMBERS, knobs)
        for ours, theirs, others in zip(found, expected, noise, strict=True):
            assert_within(ours, theirs, others)


def test_a_rounding_less_would_be_noticed():
    y, weights, places, h, post, pre = args = arguments(32, 4, 256)
    rows = y[places.long()].view(32, 4, -1).float()
    whole = (rows * weights[..., None]).sum(1) * SUM.scale
    unrounded = NODE(whole.view(h.shape), h.float(), post, pre)[0].bfloat16()
    assert not within(unrounded, reference(*args)[0], reordered(*args)[0])


def test_no_tokens():
    y, weights, places, h, post, pre = arguments(1, 2, 64)
    found = combine_and_cross(y, weights[:0], places[:0], h[:, :0], post, pre, *NUMBERS)
    assert [x.shape for x in found] == [(1, 0, 64)] * 2


@pytest.fixture(scope="module")
def model() -> Beam:
    return build(configs["mini"], DEVICE, 3)


def layer_and_call(model: Beam, tokens: int):
    """An MoE layer and (h, x, step, cache, next norm) of a prefill of two sequences."""
    config, kinds = configs["mini"], [cast(Layer, x).kind for x in model.model.layers]
    at = kinds.index("moe_sliding")
    layer: Any = model.model.layers[at]
    full = cache(config, 2, tokens, DEVICE)
    h = bf16(2, tokens, config.hidden)
    step = model.step(torch.arange(tokens, device=DEVICE).expand(2, -1), full)
    return layer, (h, layer.input_layernorm(h), step, full.layers[at], model.model.norm.weight)


def test_a_layer_ends_in_it(model):
    """A near-tie of the router may send a token elsewhere; none is in this draw."""
    layer, call = layer_and_call(model, 9)
    expected = layer(*call)
    layer = with_tuned_experts(layer)
    for ours, theirs in zip(combined_boundary.forward(layer, *call), expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours == theirs).float().mean() > 0.999


KNOBS = replace(GroupedKnobs.heuristic({"P": 72, "E": 16, "D": 64, "F": 32}), row_tile=16)


def with_tuned_experts(layer: Any) -> nn.Module:
    """The layer with experts whose launch knobs were tuned for 18 tokens."""
    faster, (count, width, inner) = share(layer), layer.mlp.experts.down_proj.shape
    sizes = {"P": 18 * layer.mlp.gate.top_k, "K": layer.mlp.gate.top_k}
    sizes |= {"E": count, "D": width, "F": inner}
    apply_change(faster, EXPERTS, "triton", {shape_key(sizes): KNOBS})
    return faster


def test_the_experts_keep_the_knobs_they_were_tuned_to(model):
    layer, (_, x, *_) = layer_and_call(model, 9)
    rows = x.flatten(0, 1)
    chosen = layer.mlp.gate(rows)
    experts: Any = with_tuned_experts(layer).mlp
    assert combined_boundary.tuned(experts.experts, rows, *chosen) == KNOBS
    assert combined_boundary.tuned(layer.mlp.experts, rows, *chosen) is None


def test_outside_says_why(model):
    layer, (h, x, *_) = layer_and_call(model, 132)
    assert combined_boundary.outside(layer, h, x) is None
    assert "no such boundary" in (combined_boundary.outside(model.model.layers[0], h, x) or "")
    assert "256 tokens" in (combined_boundary.outside(layer, h[:, :128], x[:, :128]) or "")
    assert "torch.float32" in (combined_boundary.outside(layer, h.float(), x) or "")
    uneven = h.new_empty(2, 133, h.shape[-1])[:, :132]
    assert "strides" in (combined_boundary.outside(layer, uneven, x) or "")
