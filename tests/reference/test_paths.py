"""Two ways to one result: gathered and grouped experts, causal and masked attention, blocks of
scores, and the library's attention kernel with its declared rounding."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from reference import beam
from reference.beam import Attend, Attention, Experts
from tests.reference import small
from tests.reference.golden import attention_fp64
from tests.reference.noise import assert_within, distance, permutation, reorderings, undo, within

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
T = 20
ORDERINGS = 64


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def experts_of(model: Any) -> Experts:
    return model.model.layers[2].mlp.experts


@DTYPES
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_gathered_and_grouped_experts_agree(dtype: torch.dtype, tokens: int) -> None:
    model = small.build(dtype)
    c = model.config
    experts = experts_of(model)
    x = random(tokens, c.hidden, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    chosen = torch.stack([permutation(c.experts, generator)[: c.top_k] for _ in range(tokens)])

    def run(m: beam.Beam, x: Tensor, limit: int) -> Tensor:
        part = experts_of(m)
        part.gather_limit = limit
        return part.each(x, chosen)

    assert experts.gather_limit == c.gather_limit
    gathered, grouped = run(model, x, tokens * c.top_k), run(model, x, 0)
    reordered = (undo(run(m, x[:, o], 0), o) for m, o in reorderings(model, c, ORDERINGS))
    assert_within(gathered, grouped, reordered)


def test_grouped_experts_without_tokens_for_some() -> None:
    """All pairs on the first and the last expert: the empty groups between them are skipped."""
    model = small.build(torch.bfloat16)
    experts = experts_of(model)
    x = random(40, small.SMALL.hidden, dtype=torch.bfloat16)
    chosen = torch.tensor([[0, 15, 0, 15]]).expand(40, -1)
    y = experts.each(x, chosen)
    assert torch.equal(y[:, :2], y[:, 2:])
    one = experts.each(x[:1], chosen[:1])
    assert torch.equal(one[0, 0], y[0, 0]) and torch.equal(one[0, 1], y[0, 1])


@DTYPES
def test_ends_aligned_gives_the_bits_of_the_mask(dtype: torch.dtype) -> None:
    """Prefill in two chunks over a cache that promises aligned ends, and one that doesn't."""
    model, ids = small.build(dtype), small.tokens(2, T)
    logits = []
    for promised in (True, False):
        cache = beam.cache(model.config, 2, T, "cpu")
        cache.ends_aligned = promised
        cache.extent = T - 7
        first = model(ids[:, : T - 7], small.positions(2, 0, T - 7), cache, "all")
        cache.extent = T
        second = model(ids[:, T - 7 :], small.positions(2, T - 7, T), cache, "all")
        logits.append(torch.cat((first, second), dim=1))
    assert torch.equal(*logits)


@DTYPES
def test_blocks_of_scores_agree_with_one(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, q, k, v, mask = attention_case(dtype)
    whole = attend(q, k, v, mask)
    per_query = q.shape[0] * q.shape[2] * k.shape[1]
    monkeypatch.setattr("reference.attend.SCORES_PER_BLOCK", 3 * per_query)
    assert_within(attend(q, k, v, mask), whole, reordered_keys(attend, q, k, v, mask))


def attention_case(dtype: torch.dtype) -> tuple[Attend, Tensor, Tensor, Tensor, Tensor]:
    c = small.SMALL
    q = random(2, T, c.query_heads, c.head_dim, dtype=dtype, seed=1)
    k, v = (random(2, T, c.kv_heads, c.head_dim, dtype=dtype, seed=s) for s in (2, 3))
    mask = torch.ones(T, T, dtype=torch.bool).tril().expand(2, T, T)
    return Attend(c.head_dim**-0.5), q, k, v, mask


def reordered_keys(attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor):
    generator = torch.Generator().manual_seed(0)
    for _ in range(ORDERINGS):
        keys, dims = permutation(k.shape[1], generator), permutation(q.shape[-1], generator)
        yield attend(q[..., dims], k[:, keys][..., dims], v[:, keys], mask[..., keys])


def test_attention_in_bf16_rounds_nothing_but_its_result() -> None:
    """Within its own noise of FP64 rounded once; with rounded probabilities it isn't."""
    attend, q, k, v, mask = attention_case(torch.bfloat16)
    golden = attention_fp64(q, k, v, mask, attend.scale).bfloat16()
    noise = list(reordered_keys(attend, q, k, v, mask))
    ours = attend(q, k, v, mask)
    assert_within(golden, ours, noise)
    assert not within(RoundedProbabilities(attend.scale)(q, k, v, mask), ours, noise)


def library_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    c = replace(small.SMALL, prefill_attention="sdpa")
    with torch.device("meta"):
        node = Attention(c, 1).prefill_attend
    assert node is not None
    return node(q, k, v, mask)


class RoundedProbabilities(Attend):
    """The reference's attention with one rounding more: exp(score - row maximum), to BF16, before
    the product with v. The normaliser sums what was not rounded."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        share = q.shape[2] // k.shape[2]
        wide_k, wide_v = (y.float().repeat_interleave(share, dim=2) for y in (k, v))
        scores = torch.einsum("bthd,bshd->bhts", q.float(), wide_k) * self.scale
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
        weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()
        mixed = torch.einsum("bhts,bshd->bthd", weights.to(v.dtype).float(), wide_v)
        return (mixed / weights.sum(dim=-1).transpose(1, 2)[..., None]).to(q.dtype)


def test_library_attention_in_fp32_is_the_reference() -> None:
    attend, q, k, v, mask = attention_case(torch.float32)
    ours = attend(q, k, v, mask)
    noise = list(reordered_keys(attend, q, k, v, mask))
    assert_within(library_attention(q, k, v, mask), ours, noise)
    assert_within(library_attention(q, k, v, None), ours, noise)


@pytest.mark.parametrize("masked", [True, False], ids=["mask", "causal"])
def test_library_attention_in_bf16_adds_the_declared_rounding(masked: bool) -> None:
    """It is nearer to the reference with that rounding added than to the reference itself.

    Not equal to it: PyTorch's BF16 kernel for CPUs takes its exponential from a cubic with an error
    of about 1e-4 (204 of 5120 elements differ here, 1444 without the declared rounding), which
    moves some probabilities across a rounding boundary.
    """
    attend, q, k, v, mask = attention_case(torch.bfloat16)
    found = library_attention(q, k, v, mask if masked else None)
    declared = distance(found, RoundedProbabilities(attend.scale)(q, k, v, mask))
    plain = distance(found, attend(q, k, v, mask))
    assert declared.count < plain.count and declared.rows < plain.rows


@pytest.mark.parametrize("masked", [True, False], ids=["mask", "causal"])
def test_library_attention_in_bf16_is_off_by_no_more_than_that(masked: bool) -> None:
    """Element by element: one rounding of each probability, and one of the result."""
    attend, q, k, v, mask = attention_case(torch.bfloat16)
    found = library_attention(q, k, v, mask if masked else None).double()
    wide = q.double(), k.double(), v.double()
    golden = attention_fp64(*wide, mask, attend.scale)
    magnitude = attention_fp64(*wide[:2], v.double().abs(), mask, attend.scale)
    rounding = torch.finfo(torch.bfloat16).eps / 2
    assert ((found - golden).abs() <= rounding * (magnitude + golden.abs())).all()
