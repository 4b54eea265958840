"""Per-head RMSNorm of q and k, SSMax's query factor and the KV-cache write in one kernel.

    q' = R(R(rms_norm(q) * w_q) * q_scale)
    k' = R(rms_norm(k) * w_k)
    k_cache[b, slot] = k',  v_cache[b, slot] = v

q [B, T, H, d], k, v [B, T, Hkv, d] BF16, rows evenly spaced (slices of a packed projection);
q_scale [B, T] FP32; caches [B, S + 1, Hkv, d]; slots [B, T] int64. Each value crosses memory once:
(2 H + 5 Hkv) d BF16 values a token, 4.4 KB for a TP8 rank of Beam. All three rounding points are
kept, none is added.

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


def guard(node: Any, q, k, v, q_weight, k_weight, q_scale, k_cache, v_cache, slots) -> str | None:
    """Why the kernel does not take this call, or None."""
    width = q.shape[3:]
    tables = {
        "q_weight": (q_weight, width, torch.bfloat16),
        "k_weight": (k_weight, width, torch.bfloat16),
        "q_scale": (q_scale, q.shape[:2], torch.float32),
    }
    return outside_layout(q, k, v, k_cache, v_cache, slots, tables)


def build(node: Any, knobs: QKKnobs | None):
    """The function of `reference.beam.QKNormScale.forward`; q and k come back contiguous."""

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        q_scale: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor]:
        extras = Extras(weights=(q_weight, k_weight), factors=q_scale)
        return prepare_heads(q, k, v, k_cache, v_cache, slots, node.eps, knobs, extras)

    return forward


def offline_cases() -> list[OfflineCase]:
    """Beam's TP8 rank: 6 query heads, 1 KV head of 128."""
    return cases(6, 1, 128, WEIGHTED=True, SCALED="row", ROTATION="none")


CHANGE = Change(
    name="qk_norm_scale",
    region="qk_norm_scale",
    summary="Q/K norm, SSMax's query factor and the KV-cache write in one kernel",
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
        # On CUDA, Inductor of PyTorch 2.11 rounds once where q is normed and then scaled.
        inductor_implementation(devices=("cpu",)),
    ),
)
