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
import triton
import triton.language as tl
from torch import Tensor

from optimized.change import Change, Contract, Implementation
from optimized.inductor import inductor_implementation
from optimized.qk_norm import (
    QKKnobs,
    cases,
    copy_heads,
    launch_sizes,
    normed_heads,
    outside_layout,
    sizes,
    store_heads,
)
from optimized.triton_support import (
    OfflineCase,
    begin,
    launch,
)


@triton.jit
def _rotate(a, b, cos, sin):
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def qk_norm_rope_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight,
    k_weight,
    cos_ptr,
    sin_ptr,
    k_cache,
    v_cache,
    slots,
    q_out,
    k_out,
    q_stride,
    k_stride,
    v_stride,
    k_batch,
    k_slot,
    k_head,
    v_batch,
    v_slot,
    v_head,
    steps,
    eps,
    H: tl.constexpr,
    HKV: tl.constexpr,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    columns = tl.arange(0, P)[None, :]
    cos = tl.load(cos_ptr + row * P + columns)
    sin = tl.load(sin_ptr + row * P + columns)
    query_groups: tl.constexpr = (H + HEADS - 1) // HEADS
    if group < query_groups:
        heads = group * HEADS + tl.arange(0, HEADS)[:, None]
        mask = (heads < H) & (columns < P)
        a, b = normed_heads(q_ptr + row * q_stride, q_weight, heads, columns, mask, eps, P)
        a, b = _rotate(a, b, cos, sin)
        store_heads(q_out + row * (H * 2 * P), a, b, heads, columns, mask, 2 * P, P)
    else:
        kv_heads = (group - query_groups) * KV_HEADS + tl.arange(0, KV_HEADS)[:, None]
        kv_mask = (kv_heads < HKV) & (columns < P)
        batch, slot = row // steps, tl.load(slots + row)
        k_row_in = k_ptr + row * k_stride
        k_a, k_b = normed_heads(k_row_in, k_weight, kv_heads, columns, kv_mask, eps, P)
        k_a, k_b = _rotate(k_a, k_b, cos, sin)
        k_target = k_out + row * (HKV * 2 * P)
        store_heads(k_target, k_a, k_b, kv_heads, columns, kv_mask, 2 * P, P)
        k_row = k_cache + batch * k_batch + slot * k_slot
        store_heads(k_row, k_a, k_b, kv_heads, columns, kv_mask, k_head, P)
        v_row = v_cache + batch * v_batch + slot * v_slot
        copy_heads(v_ptr + row * v_stride, v_row, kv_heads, columns, kv_mask, v_head, P)


def guard(node: Any, q, k, v, q_weight, k_weight, cos, sin, k_cache, v_cache, slots) -> str | None:
    """Why the kernel does not take this call, or None."""
    half = (*q.shape[:2], q.shape[3] // 2)
    tables = {"cos": (cos, half), "sin": (sin, half)}
    return outside_layout(q, k, v, q_weight, k_weight, k_cache, v_cache, slots, tables)


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
        chosen = knobs or QKKnobs.heuristic(sizes(node, q, k))
        q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
        if q.numel() == 0:
            return q_out, k_out
        grid, arguments = launch_sizes(q, k, v, k_cache, v_cache, chosen)
        launch(
            qk_norm_rope_kernel,
            grid,
            q,
            k,
            v,
            q_weight,
            k_weight,
            cos,
            sin,
            k_cache,
            v_cache,
            slots,
            q_out,
            k_out,
            eps=node.eps,
            **arguments,
        )
        return q_out, k_out

    return forward


def offline_cases() -> list[OfflineCase]:
    return cases(qk_norm_rope_kernel, ("cos_ptr", "sin_ptr"))


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
        inductor_implementation(),
    ),
)
