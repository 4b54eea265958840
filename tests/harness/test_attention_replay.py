"""Attention replayed by its equation against the library's own."""

import torch
import torch.nn.functional as F
from torch import Tensor

from harness import substitutes
from harness.replay import GOLDEN, NATIVE, Plan, replay


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    """As from the library; a plain softmax makes NaN of it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 16, generator=generator).bfloat16() for _ in "qkv")
    mask = torch.ones(5, 5).tril().bool()
    mask[2] = False
    first = replay(attend, (q, k, v, mask), NATIVE)
    assert not first.outputs["out"][:, :, 2].any()
    rounds = Plan(add=frozenset({"attention_probabilities_bf16"}))
    for plan in (GOLDEN, rounds):
        found = replay(attend, (q, k, v, mask), plan, first).outputs["out"]
        assert not found[:, :, 2].any()
        wide = (x.double() for x in (q, k, v))
        expected = attend(*wide, mask)
        assert (found - expected).norm() < 0.01 * expected.norm()


def test_some_queries_at_a_time_give_what_all_at_once_do(monkeypatch) -> None:
    """A long prefill's scores do not fit in memory; masks are cut along with the queries."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 7, 16, generator=generator)
    k, v = (torch.randn(2, 2, 9, 16, generator=generator) for _ in "kv")
    own = torch.rand(2, 1, 7, 9, generator=generator) < 0.7
    masks = (None, own[0, 0], own, own[:, :, :1], torch.randn(7, 9, generator=generator))
    seen: list[int] = []

    def halved(p: Tensor) -> Tensor:
        seen.append(p.shape[-2])
        return p / 2

    for mask in masks:
        for causal in (False, True) if mask is None else (False,):
            arguments = q, k, v, mask, causal, 0.25, halved
            whole = substitutes.attention(*arguments)
            with monkeypatch.context() as patch:
                patch.setattr(substitutes, "SCORES", 2 * 4 * 9 * 3 + 1)
                parts = substitutes.attention(*arguments)
            assert seen[-4:] == [7, 3, 3, 1]
            assert (parts - whole).abs().max() < 1e-6
            if mask is own:
                wide = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, scale=0.25, enable_gqa=True
                )
                assert (2 * parts - wide).abs().max() < 1e-5
