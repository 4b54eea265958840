"""The boundary with the router's logits in one kernel, and the layer around it."""

from dataclasses import replace

import pytest
import torch

from optimized.boundary_router import CHANGE, BoundaryRouterKnobs, enter
from optimized.change import apply_change, share
from optimized.router_topk import choose
from reference.beam import Layer, MoE, ResidualBoundary, StepTables, build, configs
from reference.beam import cache as kv_cache
from reference.beam_attention import Step
from reference.cache import LayerCache
from tests.optimized.kernel_checks import (
    DEVICE,
    all_knobs,
    bf16,
    needs_kernels,
    refusal,
    run_triton,
    same_bits,
)
from tests.reference.noise import assert_within

pytestmark = needs_kernels
TOY = configs["mini"]


def parts(tokens, width, experts=16):
    """(boundary, y, h, post, pre, router weight)."""
    weight = bf16(experts, width, seed=5).float() * width**-0.5 + 1e-6  # not BF16 values
    norms = (bf16(width, seed=s).float().mul(0.2).add(1).bfloat16() for s in (3, 4))
    y, h = bf16(tokens, 1, width, seed=1), bf16(tokens, 1, width, scale=4.0, seed=2)
    return ResidualBoundary(8, 1e-6), y, h, *norms, weight


def numbers(boundary):
    return (boundary.y_scale, boundary.h_scale), (boundary.eps, boundary.eps)


def reference(boundary, y, h, post, pre, weight):
    h, x = boundary(y, h, post, pre)
    return h, x, torch.nn.functional.linear(x.flatten(0, 1).float(), weight)


def reordered(given, count=16):
    boundary, y, h, post, pre, weight = given
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(y.shape[-1], generator=generator).to(DEVICE)
        back = order.argsort()
        moved = (t[..., order] for t in (y, h, post, pre, weight))
        h_out, x, logits = reference(boundary, *moved)
        yield h_out[..., back], x[..., back], logits


def assert_matches(given, knobs=None):
    boundary, y, h, post, pre, weight = given
    found = enter(y, h, post, pre, None, weight, *numbers(boundary), knobs)
    expected = reference(*given)
    noise = list(zip(*reordered(given), strict=True))
    for mine, ours, others in zip(found, expected, noise, strict=True):
        assert mine.dtype == ours.dtype
        assert_within(mine, ours, others)


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("width", [256, 320])
def test_matches_the_reference(tokens, width):
    assert_matches(parts(tokens, width))


def test_every_knob_gives_the_same_function():
    given, seen = parts(2, 320, experts=10), 0
    for knobs in all_knobs(CHANGE, {"N": 2, "D": 320}):
        assert_matches(given, knobs)
        seen += 1
    assert seen >= 5


def test_rows_that_no_expert_has_are_not_written():
    assert_matches(parts(1, 256, experts=6), BoundaryRouterKnobs(rows=4, warps=4, split=False))


def layer_call(tokens=1, full=False):
    c = replace(TOY, hidden=128, query_heads=2, kv_heads=1, head_dim=32, window=16)
    index = next(i for i in range(c.layers) if not c.is_dense(i) and c.is_full(i) == full)
    layer = Layer(c, index).to(DEVICE).requires_grad_(False)
    generator = torch.Generator(DEVICE).manual_seed(0)
    for name, tensor in layer.state_dict().items():
        if "norm" in name:
            tensor.uniform_(0.5, 1.5, generator=generator)
        else:
            tensor.normal_(std=0.1, generator=generator)
    k, v = (bf16(tokens, (32 if full else 16) + 1, 1, 32, seed=s) for s in (1, 2))
    positions = torch.arange(20, 20 + tokens, device=DEVICE)[:, None]
    step = Step(positions, *StepTables(c)(positions, 32, 32, False), extent=32)
    cache = LayerCache(k, v, None if full else 16)
    next_norm = bf16(128, seed=9).abs() + 0.5
    h, x = bf16(tokens, 1, 128, seed=3, scale=4.0), bf16(tokens, 1, 128, seed=4)
    return layer, (h, x, step, cache, next_norm)


@pytest.mark.parametrize("tokens", [1, 4])
def test_the_layer_around_it(tokens):
    """Everything else is the layer's own modules, called as the reference calls them."""
    layer, args = layer_call(tokens)
    h, x, step, cache, next_norm = args
    mine = h, x, step, LayerCache(cache.k.clone(), cache.v.clone(), cache.window), next_norm
    found = run_triton(CHANGE, layer, *mine)

    y = layer.self_attn(x, step, cache)
    norms = layer.post_attention_layernorm.weight, layer.pre_feedforward_layernorm.weight
    numbers_of = numbers(layer.attn_boundary)
    h, x, logits = enter(y, h, *norms, None, layer.mlp.gate.weight, *numbers_of, None)
    weights, experts = choose(layer.mlp.gate, logits[None])
    assert experts.tolist() == layer.mlp.gate.choose(logits.sigmoid())[1].tolist()
    y = layer.mlp.experts(x.flatten(0, 1), weights, experts).view_as(x)
    expected = layer.mlp_boundary(y, h, layer.post_feedforward_layernorm.weight, next_norm)
    for ours, out in zip(expected, found, strict=True):
        assert same_bits(out, ours)
    assert same_bits(mine[3].k, cache.k)


def test_refuses_what_it_is_not_made_for():
    layer, args = layer_call(1)
    assert refusal(CHANGE, layer, *args) == ""
    many = [a.expand(9, -1, -1) for a in args[:2]]
    assert "9 tokens" in refusal(CHANGE, layer, *many, *args[2:])
    dense = Layer(TOY, 0)
    assert "no such router" in refusal(CHANGE, dense, *args)
    assert isinstance(layer.mlp, MoE)


@pytest.mark.slow
def test_many_tokens_end_in_the_combined_boundary():
    model = build(TOY, DEVICE, 3)
    faster = share(model)
    apply_change(faster, CHANGE, "triton")
    at = [layer.kind for layer in model.model.layers].index("moe_sliding")
    full = kv_cache(TOY, 2, 132, DEVICE)
    h = bf16(2, 132, TOY.hidden)
    layer, replaced = model.model.layers[at], faster.model.layers[at]
    x = layer.input_layernorm(h)
    step = model.step(torch.arange(132, device=DEVICE).expand(2, -1), full)
    args = h, x, step, full.layers[at], model.model.norm.weight
    assert replaced.declines(*args) is None
    assert "tokens" in replaced.declines(h[:, :9], x[:, :9], *args[2:])
    for ours, theirs in zip(replaced(*args), layer(*args), strict=True):
        assert (ours == theirs).float().mean() > 0.999
