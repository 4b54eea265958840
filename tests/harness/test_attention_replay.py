"""Attention replayed by its equation against the library's own."""

import torch
import torch.nn.functional as F
from torch import Tensor

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
