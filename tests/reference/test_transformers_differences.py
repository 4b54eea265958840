"""The two named differences from transformers: each is real, reproduced exactly by its name, and
nothing else differs. FP32 runs have neither."""

import torch
from torch import Tensor

from tests.reference import oracle, small
from tests.reference.golden import attention_fp64
from tests.reference.noise import assert_within, permutation, within
from tests.reference.oracle import published_beam
from tests.reference.published_rounding import PublishedAttend, PublishedMoE

BF16 = torch.bfloat16
T = 32
MOE, FULL = 2, 1
ORDERINGS = 64


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def test_combine_in_expert_order_gives_transformers_bits() -> None:
    """(a) on our own expert outputs: bit-equal; without it, most rows differ."""
    model = small.build(BF16)
    moe = model.model.layers[MOE].mlp
    x = random(1, T, small.SMALL.hidden, seed=5)
    theirs = oracle.published(model).model.layers[MOE].mlp(x)
    assert torch.equal(PublishedMoE(moe)(x), theirs)
    assert (moe(x) != theirs).any(dim=-1).all()


def test_where_the_routed_scale_goes_is_a_difference_of_its_own() -> None:
    """Rounding before 2.5 as well as after it: not the same as the published order alone."""
    moe = small.build(BF16).model.layers[MOE].mlp
    x = random(1, T, small.SMALL.hidden, seed=5)
    rows = x.flatten(0, 1)
    weights, experts = moe.gate(rows)
    terms = (moe.experts.each(rows, experts).float() * weights[..., None]).unbind(dim=1)
    total = sum(terms[1:], terms[0])
    assert torch.equal((total * moe.experts.combine.scale).to(BF16).view_as(x), moe(x))
    assert not torch.equal((total.to(BF16) * moe.experts.combine.scale).view_as(x), moe(x))


def test_attention_interior_is_the_only_difference_of_attention() -> None:
    """(b) emulated: within self-noise of transformers. The specification's attention is outside it,
    and nearer to FP64."""
    c = small.SMALL
    q = random(1, T, c.query_heads, c.head_dim, seed=1)
    k, v = (random(1, T, c.kv_heads, c.head_dim, seed=s) for s in (2, 3))
    mask = torch.ones(T, T, dtype=torch.bool).tril()[None]
    model = small.build(BF16).model
    spec = model.layers[FULL].self_attn.attend
    published = PublishedAttend(spec.scale)

    def reordered():
        generator = torch.Generator().manual_seed(0)
        for _ in range(ORDERINGS):
            keys, dims = permutation(T, generator), permutation(c.head_dim, generator)
            yield published(q[..., dims], k[:, keys][..., dims], v[:, keys], mask[..., keys])

    theirs, _ = published_beam.eager_attention_forward(
        oracle.published(small.build(BF16)).model.layers[FULL].self_attn,
        *(y.transpose(1, 2) for y in (q, k, v)),
        oracle.additive(mask, BF16),
        spec.scale,
    )
    emulated = published(q, k, v, mask)
    assert_within(theirs, emulated, reordered())
    assert not within(spec(q, k, v, mask), emulated, reordered())
    golden = attention_fp64(q, k, v, mask, spec.scale)
    assert (spec(q, k, v, mask) - golden).norm() < (theirs - golden).norm()
