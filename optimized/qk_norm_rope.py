"""Per-head RMSNorm of q and k, RoPE and the KV-cache write in one kernel.

    q' = R(rope(R(rms_norm(q) * w_q)))    rope(a, b) = (a cos - b sin, b cos + a sin), halves a, b
    k' = R(rope(R(rms_norm(k) * w_k)))
    k_cache[b, slot] = k',  v_cache[b, slot] = v

q [B, T, H, d], k, v [B, T, Hkv, d] BF16, rows evenly spaced (slices of a packed projection);
cos, sin [B, T, d / 2] FP32; caches [B, S + 1, Hkv, d]; slots [B, T] int64. Each value crosses
memory once: (2 H + 5 Hkv) d BF16 values a token, 4.9 KB for a TP8 rank of Beam. All four rounding
points are kept, none is added, and no product and sum are fused.

Of several tokens written to one slot (padding, in the spare slot) any may be the last, as in the
reference.
"""

from typing import Any

import torch
from torch import Tensor

from optimized.change import Change, Contract, Implementation
from optimized.inductor import inductor_implementation
from optimized.qk_norm import Extras, QKKnobs, cases, outside_layout, prepare_heads, sizes
from optimized.triton_support import OfflineCase


def guard(node: Any, q, k, v, q_weight, k_weight, cos, sin, k_cache, v_cache, slots) -> str | None:
    """Why the kernel does not take this call, or None."""
    half, width = (*q.shape[:2], q.shape[3] // 2), q.shape[3:]
    tables = {
        "q_weight": (q_weight, width, torch.bfloat16),
        "k_weight": (k_weight, width, torch.bfloat16),
        "cos": (cos, half, torch.float32),
        "sin": (sin, half, torch.float32),
    }
    return outside_layout(q, k, v, k_cache, v_cache, slots, tables)


def build(node: Any, knobs: QKKnobs | None):
    """The function of `reference.beam.QKNormRope.forward`; q and k come back contiguous."""

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor]:
        extras = Extras(weights=(q_weight, k_weight), tables=(cos, sin))
        return prepare_heads(q, k, v, k_cache, v_cache, slots, node.eps, knobs, extras)

    return forward


def offline_cases() -> list[OfflineCase]:
    """Beam's TP8 rank: 6 query heads, 1 KV head of 128."""
    return cases(6, 1, 128, WEIGHTED=True, SCALED="none", ROTATION="once")


CHANGE = Change(
    name="qk_norm_rope",
    region="qk_norm_rope",
    summary="Q/K norm, RoPE and the KV-cache write in one kernel",
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
        # On CUDA, Inductor of PyTorch 2.11 leaves a rounding of the normed q out.
        inductor_implementation(devices=("cpu",)),
    ),
)
