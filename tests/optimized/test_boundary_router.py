"""The boundary with the router's logits in one kernel, and the layer around it."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from optimized import closed_layer, experts_cute, launches
from optimized.boundary_router import CHANGE, BoundaryRouterKnobs, LayerKnobs, enter
from optimized.change import apply_change, shape_key, share
from optimized.expert_knobs import ExpertsKnobs
from optimized.gemv_engines import CannotServe
from optimized.residual_boundary import CHANGE as BOUNDARY
from optimized.residual_boundary import BoundaryKnobs
from optimized.routed_experts import CHANGE as EXPERTS
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


def layer_call(tokens=1, full=False, width=128):
    c = replace(TOY, hidden=width, query_heads=2, kv_heads=1, head_dim=32, window=16)
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
    next_norm = bf16(width, seed=9).abs() + 0.5
    h, x = bf16(tokens, 1, width, seed=3, scale=4.0), bf16(tokens, 1, width, seed=4)
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


def closable(width=128, split=False, tokens=1, **experts_knobs):
    """A layer call as `layer_call`'s, its experts and last boundary replaced by their kernels, with
    as many warps in both, which add up in the same order on a GPU, too."""
    layer, args = layer_call(tokens, width=width)
    mlp: Any = layer.mlp
    top_k = mlp.gate.top_k
    sizes = tokens * top_k, top_k, *mlp.experts.down_proj.shape
    shape = dict(zip("PKEDF", sizes, strict=True))
    few = replace(ExpertsKnobs.heuristic(shape), up_rows=8, up_programs=4)
    knobs = replace(few, **experts_knobs)
    apply_change(layer, EXPERTS, "triton", {shape_key(shape): knobs})
    boundary = BoundaryKnobs(warps=knobs.down_warps, rows=1, split=split)
    apply_change(layer, BOUNDARY, "triton", {shape_key({"T": 1, "D": width}): boundary})
    return layer, args


def closing(width):
    return LayerKnobs(**vars(BoundaryRouterKnobs.heuristic({"N": 1, "D": width})), closes=True)


@pytest.mark.parametrize(
    ("width", "split", "rows"), [(128, False, 8), (160, False, 64), (320, True, 128)], ids=str
)
def test_experts_that_close_the_layer_change_nothing(width, split, rows, monkeypatch):
    """Many programs, few, and rows beyond the last; twice, so that the counter is zero again."""
    layer, args = closable(width, split, down_rows=rows)
    assert closed_layer.is_split(layer.mlp_boundary, width) == split
    names = []
    note = lambda kernel, _: nullcontext(names.append(kernel.fn.__name__))  # noqa: E731
    monkeypatch.setattr(launches, "observers", [note])
    close = CHANGE.implementation("triton").build(layer, closing(width))
    h, x, step, cache, next_norm = args
    for seed in (3, 5):
        args = bf16(*h.shape, scale=4.0, seed=seed), x, step, cache, next_norm
        expected = run_triton(CHANGE, layer, *args)
        assert names[-2:] == ["experts_down_across_kernel", "residual_boundary_kernel"]
        names.clear()
        for ours, theirs in zip(close(*args), expected, strict=True):
            assert same_bits(ours, theirs) and ours.shape == theirs.shape
        assert names[-1] == "experts_down_close_kernel"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tokens": 2}, "2 tokens"),
        ({"down_across": False}, "down_across False"),
        ({"engine": "cutedsl"}, "engine 'cutedsl'"),
        ({"width": 4096, "down_warps": 1}, "down_warps = 1 for 4096 values"),
        ({"rank_sum": {"group": SimpleNamespace(size=lambda: 2)}}, "2 ranks' sums"),
        ({"rank_sum": {"applied": "other"}}, "other comes between"),
    ],
    ids=["tokens", "slots", "engine", "warps", "ranks", "between"],
)
def test_a_layer_that_cannot_be_closed_is_an_error(given, says, monkeypatch):
    monkeypatch.setattr(experts_cute, "check", lambda engine: None)
    layer, args = closable(**{n: v for n, v in given.items() if n != "rank_sum"})
    vars(layer.mlp.rank_sum).update(given.get("rank_sum", {}))
    ids = torch.arange(layer.mlp.gate.top_k, device=DEVICE)
    experts = ids[None].expand(len(args[0]), -1).contiguous()
    given = args[1], experts.float(), experts, args[0], args[4], closed_layer.counter(layer)
    with pytest.raises(CannotServe, match=f"do not close the layer: .*{says}"):
        closed_layer.close(layer, *given)


@pytest.mark.gpu
@pytest.mark.parametrize("split", [False, True], ids=["whole", "pieces"])
def test_closing_in_a_graph_changes_nothing(split):
    layer, args = closable(5120, split)
    expected = run_triton(CHANGE, layer, *args)
    close = CHANGE.implementation("triton").build(layer, closing(5120))
    close(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = close(*args)
    for _ in range(100):
        for result in found:
            result.fill_(torch.nan)
        graph.replay()
        for ours, theirs in zip(found, expected, strict=True):
            assert same_bits(ours, theirs)


def test_closing_is_offered_for_one_token():
    for tokens in (1, 2, 300):
        sizes = {"N": tokens, "D": 5120}
        assert LayerKnobs.candidates(sizes)["closes"] == (
            (False, True) if tokens == 1 else (False,)
        )
        assert not LayerKnobs.heuristic(sizes).closes
        assert closing(5120).is_valid(sizes) == (tokens == 1)


def test_layers_without_experts_are_left_alone_where_others_close():
    layers = nn.ModuleList([Layer(TOY, 0), Layer(TOY, TOY.layers - 1)])
    knobs = {shape_key({"N": 1, "D": TOY.hidden}): closing(TOY.hidden)}
    assert apply_change(layers, CHANGE, "triton", knobs) == ["0", "1"]
    assert [isinstance(layer.mlp, MoE) for layer in layers] == [False, True]


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
