"""Each module of the reference against its counterpart in transformers, with the same weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

from reference.beam import Attention, Beam, ResidualBoundary, rms_norm, rope
from tests.reference import oracle, small
from tests.reference.noise import assert_within, permutation, reorderings, undo, within
from tests.reference.oracle import published_beam
from tests.reference.published_rounding import PublishedAttend, PublishedMoE

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
ORDERINGS = 64
DENSE_SLIDING, DENSE_FULL, MOE_SLIDING, MOE_FULL = range(4)
T = 20


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def hidden(dtype: torch.dtype) -> Tensor:
    return random(2, T, small.SMALL.hidden, dtype=dtype, seed=7)


@DTYPES
def test_norm_is_bit_equal(dtype: torch.dtype) -> None:
    model = small.build(dtype)
    ours = model.model.norm
    theirs = oracle.published(model).model.norm
    x = hidden(dtype) * torch.logspace(-8, 8, T)[:, None].to(dtype)
    assert torch.equal(ours(x), theirs(x))


@DTYPES
def test_rope_is_bit_equal_at_any_position(dtype: torch.dtype) -> None:
    model = small.build(dtype)
    c = model.config
    q = random(2, T, c.query_heads, c.head_dim, dtype=dtype)
    place = torch.randint(1 << 20, (2, T), generator=torch.Generator().manual_seed(3))
    step = model.step(place, small.beam.cache(c, 2, T, "cpu"))
    cos, sin = oracle.published(model).model.rotary_emb(q, place, "sliding_attention")
    assert torch.equal(torch.cat((step.cos, step.cos), dim=-1), cos)
    assert torch.equal(torch.cat((step.sin, step.sin), dim=-1), sin)
    theirs, _ = published_beam.apply_rotary_pos_emb(q.transpose(1, 2), q.transpose(1, 2), cos, sin)
    assert torch.equal(rope(q, step.cos, step.sin), theirs.transpose(1, 2))


def test_ssmax_factor_is_bit_equal_at_any_position() -> None:
    model = small.build(torch.float32)
    place = torch.randint(1 << 20, (2, T), generator=torch.Generator().manual_seed(3))
    step = model.step(place, small.beam.cache(model.config, 2, T, "cpu"))
    assert torch.equal(step.q_scale, published_beam.compute_attention_scaling(place)[:, 0, :, 0])


@DTYPES
@pytest.mark.parametrize("n", [2, 3, 105])
def test_residual_boundary_is_bit_equal(dtype: torch.dtype, n: int) -> None:
    y, h = hidden(dtype), random(2, T, small.SMALL.hidden, dtype=dtype, seed=8)
    model = oracle.published(small.build(dtype))
    post, pre = model.model.layers[0].input_layernorm, model.model.layers[1].input_layernorm
    boundary = ResidualBoundary(n, small.SMALL.eps)
    new_h, x = boundary(y, h, post.weight, pre.weight)
    theirs = published_beam.depth_scaled_residual_add(post(y), h, n)
    assert torch.equal(new_h, theirs)
    assert torch.equal(x, pre(theirs))


@DTYPES
def test_dense_mlp(dtype: torch.dtype) -> None:
    model, x = small.build(dtype), hidden(dtype)
    theirs = oracle.published(model).model.layers[DENSE_SLIDING].mlp(x)

    def run(m: Beam, x: Tensor) -> Tensor:
        return m.model.layers[DENSE_SLIDING].mlp(x)

    reordered = (undo(run(m, x[..., o]), o) for m, o in reorderings(model, model.config, ORDERINGS))
    assert_within(theirs, run(model, x), reordered)


def routed(model: Beam, x: Tensor) -> tuple[Tensor, Tensor]:
    return model.model.layers[MOE_SLIDING].mlp.gate(x.flatten(0, 1))


@DTYPES
def test_router(dtype: torch.dtype) -> None:
    model, x = small.build(dtype), hidden(dtype)
    logits, their_weights, their_experts = (
        oracle.published(model).model.layers[MOE_SLIDING].mlp.gate(x)
    )
    weights, experts = routed(model, x)
    assert logits.dtype == weights.dtype == torch.float32
    assert torch.equal(experts, their_experts)
    reordered = []
    for m, order in reorderings(model, model.config, ORDERINGS):
        other_weights, other_experts = routed(m, x[..., order])
        assert torch.equal(other_experts, experts)  # no near-ties among these rows
        reordered.append(other_weights)
    assert_within(their_weights, weights, reordered)


@DTYPES
def test_expert_outputs(dtype: torch.dtype) -> None:
    model, x = small.build(dtype), hidden(dtype)
    rows = x.flatten(0, 1)
    _, experts = routed(model, x)
    ours = model.model.layers[MOE_SLIDING].mlp.experts.each(rows, experts)
    # One expert a token at weight 1 makes the published sum over experts a plain output.
    one = torch.ones(rows.shape[0], 1)
    published = oracle.published(model).model.layers[MOE_SLIDING].mlp.experts
    theirs = torch.stack([published(rows, e[:, None], one) for e in experts.unbind(1)], dim=1)
    reordered = (
        undo(m.model.layers[MOE_SLIDING].mlp.experts.each(rows[..., o], experts), o)
        for m, o in reorderings(model, model.config, ORDERINGS)
    )
    assert_within(theirs, ours, reordered)


@DTYPES
def test_moe(dtype: torch.dtype) -> None:
    model, x = small.build(dtype), hidden(dtype)
    theirs = oracle.published(model).model.layers[MOE_SLIDING].mlp(x)

    def run(m: Beam, x: Tensor) -> Tensor:
        moe = m.model.layers[MOE_SLIDING].mlp
        return (moe if dtype == torch.float32 else PublishedMoE(moe))(x)

    reordered = (undo(run(m, x[..., o]), o) for m, o in reorderings(model, model.config, ORDERINGS))
    assert_within(theirs, run(model, x), reordered)


@DTYPES
@pytest.mark.parametrize("layer", [DENSE_SLIDING, DENSE_FULL], ids=["sliding", "full"])
def test_attention(dtype: torch.dtype, layer: int) -> None:
    """A prefill longer than the window, with a cache that was empty."""
    model, x = small.build(dtype), hidden(dtype)
    c, place = model.config, small.positions(2, 0, T)

    def run(m: Any, x: Tensor) -> Tensor:
        attention: Attention = m.model.layers[layer].self_attn
        if dtype != torch.float32:
            attention.attend = PublishedAttend(attention.attend.scale)
        cache = small.beam.cache(c, 2, T, "cpu")
        return attention(x, m.step(place, cache), cache.layers[layer])

    other = oracle.published(model).model
    mask = place[:, None] <= place[..., None]
    if not c.is_full(layer):
        mask &= place[:, None] > place[..., None] - c.window
    theirs, _ = other.layers[layer].self_attn(
        x,
        None if c.is_full(layer) else other.rotary_emb(x, place, "sliding_attention"),
        oracle.additive(mask, dtype),
        published_beam.compute_attention_scaling(place) if c.is_full(layer) else None,
    )
    reordered = (undo(run(m, x[..., o]), o) for m, o in reorderings(model, model.config, ORDERINGS))
    assert_within(theirs, run(model, x), reordered)


@DTYPES
def test_attention_alone_under_permuted_keys(dtype: torch.dtype) -> None:
    """The product q k^T, the softmax and the product with v, their reductions reordered."""
    c = small.SMALL
    q = random(2, T, c.query_heads, c.head_dim, dtype=dtype, seed=1)
    k, v = (random(2, T, c.kv_heads, c.head_dim, dtype=dtype, seed=s) for s in (2, 3))
    mask = torch.ones(T, T, dtype=torch.bool).tril().expand(2, T, T)
    attend = PublishedAttend(c.head_dim**-0.5)

    def reordered():
        generator = torch.Generator().manual_seed(0)
        for _ in range(ORDERINGS):
            keys, dims = permutation(T, generator), permutation(c.head_dim, generator)
            yield attend(q[..., dims], k[:, keys][..., dims], v[:, keys], mask[..., keys])

    model = oracle.published(small.build(dtype)).model
    theirs, _ = published_beam.eager_attention_forward(
        model.layers[DENSE_FULL].self_attn,
        *(y.transpose(1, 2) for y in (q, k, v)),
        oracle.additive(mask, dtype),
        attend.scale,
    )
    assert_within(theirs, attend(q, k, v, mask), reordered())


@DTYPES
def test_output_gate_is_bit_equal(dtype: torch.dtype) -> None:
    """Through the attention module, on one token, where attention returns v itself."""
    model = small.build(dtype)
    c, x = model.config, random(2, 1, small.SMALL.hidden, dtype=dtype)
    ours = model.model.layers[DENSE_FULL].self_attn
    theirs = oracle.published(model).model.layers[DENSE_FULL].self_attn
    place = small.positions(2, 0, 1)
    seen = []
    for module in (ours.o_proj, theirs.o_proj):
        module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    cache = small.beam.cache(c, 2, 1, "cpu")
    ours(x, model.step(place, cache), cache.layers[DENSE_FULL])
    theirs(x, None, None, published_beam.compute_attention_scaling(place))
    assert torch.equal(seen[0].flatten(), seen[1].flatten())


def test_norm_noise_excludes_a_second_rounding() -> None:
    """What the gate is for: a rounding more, before the weight, lies far outside the noise."""
    x, weight = hidden(torch.bfloat16), torch.rand(small.SMALL.hidden).bfloat16() + 0.5
    eps = small.SMALL.eps
    ours = rms_norm(x, weight, eps)
    generator = torch.Generator().manual_seed(0)
    orders = [permutation(x.shape[-1], generator) for _ in range(ORDERINGS)]
    reordered = [undo(rms_norm(x[..., o], weight[o], eps), o) for o in orders]
    assert within(ours, ours, reordered)
    assert not within(rms_norm(x, torch.ones_like(weight), eps) * weight, ours, reordered)
