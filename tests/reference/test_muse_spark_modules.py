"""Each module of the reference against its counterpart in transformers, with the same weights."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from reference import muse_spark
from reference.layers import centred_norm, input_scaled_norm, rope_in_dtype, unit_norm
from reference.muse_spark import MuseSpark
from reference.muse_spark_attention import Attention
from reference.muse_spark_moe import Experts
from tests.reference import muse_spark_oracle as oracle
from tests.reference import muse_spark_toy as toy
from tests.reference import small
from tests.reference.muse_spark_oracle import modeling
from tests.reference.muse_spark_toy import SMALL, PublishedMoE, reorderings
from tests.reference.noise import assert_within, permutation, undo, within
from tests.reference.oracle import additive
from tests.reference.published_rounding import PublishedAttend

BF16 = torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
ORDERINGS = 32
SLIDING, FULL = 0, 1
T = 20


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def hidden(dtype: torch.dtype) -> Tensor:
    return random(2, T, SMALL.hidden, dtype=dtype, seed=7)


def layer(model: Any, i: int) -> Any:
    """Layer `i` of ours or of the published model."""
    return model.model.language_model.layers[i]


@DTYPES
def test_norms_are_bit_equal_at_any_scale(dtype: torch.dtype) -> None:
    model = toy.build(dtype)
    theirs = layer(oracle.published(model), 0)
    x = hidden(dtype) * torch.logspace(-8, 8, T)[:, None].to(dtype)
    weight, c = theirs.input_layernorm.weight, SMALL
    assert torch.equal(centred_norm(x, weight, c.eps), theirs.input_layernorm(x))
    assert torch.equal(unit_norm(x, c.post_eps), theirs.post_attention_layernorm(x))
    scaled = theirs.post_feedforward_layernorm
    assert torch.equal(input_scaled_norm(x, scaled.weight, c.post_eps), scaled(x))


@DTYPES
def test_embedding_is_bit_equal(dtype: torch.dtype) -> None:
    model, ids = toy.build(dtype), small.tokens(2, T)
    theirs = oracle.published(model).model.language_model.embed_tokens(ids)
    assert torch.equal(model.model.language_model.embed_tokens(ids), theirs)


@DTYPES
def test_rope_is_bit_equal_at_any_position(dtype: torch.dtype) -> None:
    model = toy.build(dtype)
    q = random(2, T, SMALL.query_heads, SMALL.head_dim, dtype=dtype)
    place = torch.randint(1 << 20, (2, T), generator=torch.Generator().manual_seed(3))
    step = model.step(place, muse_spark.cache(model.config, 2, T, "cpu"))
    cos, sin = oracle.published(model).model.language_model.rotary_emb(q, place)
    assert step.cos.dtype == dtype
    assert torch.equal(torch.cat((step.cos, step.cos), dim=-1), cos)
    assert torch.equal(torch.cat((step.sin, step.sin), dim=-1), sin)
    theirs, _ = modeling.apply_rotary_pos_emb(q.transpose(1, 2), q.transpose(1, 2), cos, sin)
    assert torch.equal(rope_in_dtype(q, step.cos, step.sin), theirs.transpose(1, 2))


@DTYPES
@pytest.mark.parametrize("i", [SLIDING, FULL], ids=["sliding", "full"])
def test_queries_keys_and_values_are_bit_equal(dtype: torch.dtype, i: int) -> None:
    """What the attention function gets, from the same projections."""
    model, x, place = toy.build(dtype), hidden(dtype), small.positions(2, 0, T)
    ours, theirs = layer(model, i).self_attn, layer(oracle.published(model), i).self_attn
    heads = lambda y: y.unflatten(-1, (-1, SMALL.head_dim))  # noqa: E731
    q, k, v = (heads(p(x)) for p in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
    cache = muse_spark.cache(model.config, 2, T, "cpu")
    step, kv = model.step(place, cache), cache.layers[i]
    if i == FULL:
        got = ours.prepare(q, k, v, kv.k, kv.v, step.full_slots)
    else:
        got = ours.prepare(q, k, v, step.cos, step.sin, kv.k, kv.v, step.ring_slots)
    want = theirs.qk_norm(q) * theirs.qk_scale_factor, theirs.qk_norm(k)
    if i == SLIDING:
        cos, sin = torch.cat((step.cos,) * 2, -1), torch.cat((step.sin,) * 2, -1)
        want = modeling.apply_rotary_pos_emb(*want, cos, sin, unsqueeze_dim=2)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@DTYPES
def test_gated_residual_boundaries_are_bit_equal(dtype: torch.dtype) -> None:
    y, h = hidden(dtype), random(2, T, SMALL.hidden, dtype=dtype, seed=8)
    model = toy.build(dtype)
    ours, other = layer(model, 0), oracle.published(model)
    theirs = layer(other, 0)
    got = ours.attn_boundary(
        y,
        h,
        ours.post_attention_residual_gate.gate,
        None,
        ours.pre_feedforward_layernorm.weight,
    )
    want = theirs.post_attention_residual_gate(h, theirs.post_attention_layernorm(y))
    assert torch.equal(got[0], want)
    assert torch.equal(got[1], theirs.pre_feedforward_layernorm(want))
    post = ours.post_feedforward_layernorm.weight
    gate = ours.post_feedforward_residual_gate.gate
    want = theirs.post_feedforward_residual_gate(h, theirs.post_feedforward_layernorm(y))
    decoder = other.model.language_model
    for i, norm in ((0, decoder.layers[1].input_layernorm), (SMALL.layers - 1, decoder.norm)):
        got = layer(model, i).mlp_boundary(y, h, gate, post, norm.weight)
        assert torch.equal(got[0], want)
        assert torch.equal(got[1], norm(want))


def test_the_gates_stay_fp32_and_reach_their_floor() -> None:
    """In BF16 models, too; a gate far up lets nothing of the residual but sqrt(floor) through."""
    model = toy.build(BF16)
    boundary, gate = layer(model, 0).attn_boundary, torch.tensor([9.0, -9.0])
    assert layer(model, 0).post_attention_residual_gate.gate.dtype == torch.float32
    y, h = torch.tensor([[[3.0, 3.0]]]), torch.tensor([[[2.0, 5.0]]])
    got, _ = boundary(y, h, gate, None, torch.zeros(2))
    floor = torch.tensor(1e-3).sqrt()
    assert torch.equal(got[0, 0, 0], floor * 2.0 + unit_norm(y, 1e-8)[0, 0, 0])
    assert got[0, 0, 1] == 5.0


def routed(model: MuseSpark, x: Tensor) -> tuple[Tensor, Tensor]:
    return layer(model, 0).mlp.gate(x.flatten(0, 1))


def by_expert(weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    """A token's choice in ascending expert order: the published top-k has none."""
    order = experts.argsort(dim=-1)
    return weights.gather(-1, order), experts.gather(-1, order)


@DTYPES
def test_router(dtype: torch.dtype) -> None:
    model, x = toy.build(dtype), hidden(dtype)
    logits, *their_choice = layer(oracle.published(model), 0).mlp.gate(x)
    weights, experts = by_expert(*routed(model, x))
    their_weights, their_experts = by_expert(*their_choice)
    assert logits.dtype == weights.dtype == torch.float32
    assert torch.equal(experts, their_experts)
    reordered = []
    for m, order in reorderings(model, model.config, ORDERINGS):
        other_weights, other_experts = by_expert(*routed(m, x[..., order]))
        assert torch.equal(other_experts, experts)  # no near-ties among these rows
        reordered.append(other_weights)
    assert_within(their_weights, weights, reordered)


def shuffled(experts: Experts, generator: torch.Generator) -> tuple[Experts, Tensor]:
    """The same experts with their widths in another order, and the order of inputs and outputs."""
    other, state = copy.deepcopy(experts), experts.state_dict()
    pooled = permutation(SMALL.expert_width, generator)
    inner = permutation(SMALL.expert_ff, generator)
    gate_up = state["gate_up_proj"].unflatten(1, (2, -1))[:, :, inner][..., pooled]
    norm = "post_expert_norm.weight"
    other.load_state_dict(
        {
            "gate_up_proj": gate_up.flatten(1, 2),
            "down_proj": state["down_proj"][:, pooled][..., inner],
            norm: state[norm][pooled],
        }
    )
    return other, pooled


@DTYPES
def test_expert_outputs(dtype: torch.dtype) -> None:
    """Each chosen expert with its output norm."""
    model, x = toy.build(dtype), hidden(dtype)
    _, experts = routed(model, x)
    z = random(2 * T, SMALL.expert_width, dtype=dtype, seed=2)

    def run(node: Experts, z: Tensor) -> Tensor:
        return node.post_expert_norm(node.each(z, experts))

    # One expert a token at weight 1 makes the published sum over experts a plain output.
    one = torch.ones(len(z), 1)
    published = layer(oracle.published(model), 0).mlp.experts
    theirs = torch.stack([published(z, e[:, None], one) for e in experts.unbind(1)], dim=1)
    ours, generator = layer(model, 0).mlp.experts, torch.Generator().manual_seed(0)
    others = [shuffled(ours, generator) for _ in range(ORDERINGS)]
    reordered = [undo(run(node, z[:, order]), order) for node, order in others]
    assert_within(theirs, run(ours, z), reordered)


@DTYPES
def test_moe(dtype: torch.dtype) -> None:
    model, x = toy.build(dtype), hidden(dtype)
    theirs = layer(oracle.published(model), 0).mlp(x)

    def run(m: MuseSpark, x: Tensor) -> Tensor:
        moe = layer(m, 0).mlp
        return (moe if dtype == torch.float32 else PublishedMoE(moe))(x)

    reordered = (undo(run(m, x[..., o]), o) for m, o in reorderings(model, model.config, ORDERINGS))
    assert_within(theirs, run(model, x), reordered)


@DTYPES
@pytest.mark.parametrize("i", [SLIDING, FULL], ids=["sliding", "full"])
def test_attention(dtype: torch.dtype, i: int) -> None:
    """A prefill longer than the window, with a cache that was empty."""
    model, x = toy.build(dtype), hidden(dtype)
    c, place = model.config, small.positions(2, 0, T)

    def run(m: Any, x: Tensor) -> Tensor:
        attention: Attention = layer(m, i).self_attn
        if dtype != torch.float32:
            attention.attend = PublishedAttend(attention.attend.scale)
        cache = muse_spark.cache(c, 2, T, "cpu")
        return attention(x, m.step(place, cache), cache.layers[i])

    other = oracle.published(model)
    mask = place[:, None] <= place[..., None]
    if i == SLIDING:
        mask &= place[:, None] > place[..., None] - c.window
    rotary = other.model.language_model.rotary_emb
    positions = rotary(x, place) if i == SLIDING else None
    theirs, _ = layer(other, i).self_attn(x, positions, additive(mask, dtype))
    reordered = (undo(run(m, x[..., o]), o) for m, o in reorderings(model, model.config, ORDERINGS))
    assert_within(theirs, run(model, x), reordered)


@DTYPES
def test_output_norm_and_gate_are_bit_equal(dtype: torch.dtype) -> None:
    """Through the attention module, on one token, where attention returns v itself."""
    model = toy.build(dtype)
    x = random(2, 1, SMALL.hidden, dtype=dtype)
    ours, theirs = layer(model, FULL).self_attn, layer(oracle.published(model), FULL).self_attn
    seen = []
    for module in (ours.o_proj, theirs.o_proj):
        module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    cache = muse_spark.cache(model.config, 2, 1, "cpu")
    ours(x, model.step(small.positions(2, 0, 1), cache), cache.layers[FULL])
    theirs(x)
    assert torch.equal(seen[0].flatten(), seen[1].flatten())


@DTYPES
def test_head_is_bit_equal(dtype: torch.dtype) -> None:
    """The published forward's last lines, on the decoder's output; logits stay in its dtype."""
    model = toy.build(dtype)
    other = oracle.published(model)
    x = hidden(dtype) * 8
    other.model.forward = lambda **_: modeling.MuseSparkModelOutputWithPast(last_hidden_state=x)
    theirs = other(input_ids=small.tokens(2, T)).logits
    ours = model.soft_cap(model.lm_head(x))
    assert ours.dtype == dtype
    assert ours.abs().max() > 0.9
    assert torch.equal(ours, theirs)


def test_noise_excludes_an_elided_rounding() -> None:
    """What the gate is for: the rounding of x * (1 + w) left out lies far outside the noise."""
    x = hidden(BF16)
    weight = random(SMALL.hidden, dtype=BF16, seed=4) * 0.25
    eps, ours = SMALL.post_eps, input_scaled_norm(x, weight, SMALL.post_eps)
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(x.shape[-1], generator=generator) for _ in range(ORDERINGS)]
    reordered = [undo(input_scaled_norm(x[..., o], weight[o], eps), o) for o in orders]
    assert within(ours, ours, reordered)
    elided = unit_norm(x.float() * (1 + weight).float(), eps).to(BF16)
    assert not within(elided, ours, reordered)
