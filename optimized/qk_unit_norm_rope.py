"""Weightless per-head norm of q and k, q's factor, RoPE and the KV-cache write in one kernel.

    q' = rope(R(R(unit_norm(q)) * c))
    k' = rope(R(unit_norm(k)))
    rope(a, b) = R(R(a cos) - R(b sin)), R(R(b cos) + R(a sin))  for halves a, b
    k_cache[b, slot] = k',  v_cache[b, slot] = v

R rounds to BF16. q [B, T, H, d], k, v [B, T, Hkv, d] BF16, rows evenly spaced (slices of a packed
projection); cos, sin [B, T, d / 2] BF16; caches [B, S + 1, Hkv, d]; slots [B, T] int64. Each value
crosses memory once: (2 H + 5 Hkv) d BF16 values a token, 5.4 KB for 16 heads on 2 of 64. All
rounding points are kept, the rotation's products and sums among them; none is added.
"""

from typing import Any

import torch
from torch import Tensor

from optimized.change import Change, Contract, Implementation
from optimized.inductor import inductor_implementation
from optimized.qk_norm import Extras, QKKnobs, cases, outside_layout, prepare_heads, sizes
from optimized.triton_support import OfflineCase


def guard(node: Any, q, k, v, cos, sin, k_cache, v_cache, slots) -> str | None:
    """Why the kernel does not take this call, or None."""
    half = (*q.shape[:2], q.shape[3] // 2)
    tables = {"cos": (cos, half, torch.bfloat16), "sin": (sin, half, torch.bfloat16)}
    return outside_layout(q, k, v, k_cache, v_cache, slots, tables)


def build(node: Any, knobs: QKKnobs | None):
    """The function of the node's forward; q and k come back contiguous."""

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor]:
        extras = Extras(factor=node.q_factor, tables=(cos, sin))
        return prepare_heads(q, k, v, k_cache, v_cache, slots, node.eps, knobs, extras)

    return forward


def offline_cases() -> list[OfflineCase]:
    """One of eight tensor-parallel ranks: 16 query heads on 2 KV heads of 64."""
    return cases(16, 2, 64, WEIGHTED=False, SCALED="all", ROTATION="stepped")


CHANGE = Change(
    name="qk_unit_norm_rope",
    region="qk_unit_norm_rope",
    summary="weightless Q/K norm, q's factor, RoPE and the KV-cache write in one kernel",
    contract=Contract(numerics="reduction"),
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build,
            guard=guard,
            knobs=QKKnobs,
            shape=sizes,
        ),
        inductor_implementation(),
    ),
)
