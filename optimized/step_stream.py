"""Attention of a decode step over a long sequence, as a stream; see `optimized.attention_step`.

Writes the new position and leaves a share's numerators, maximum and denominator, as `step_kernels`
does. Each warp has positions of its own in every block, `BLOCK` of them in all, with a maximum and
numerators of its own: a batch of products, a warp each. So warps meet once a block, where its keys
and values have arrived, and add up what they have once, at the end. Keys and values go straight to
shared memory, STAGES - 1 blocks at a time; heads are columns, eight of them a product of a warp.

Bytes: 4 S Hkv d. An H200 has 33 KB an SM and us: two thread blocks of an SM with three blocks of 32
KB each have six times that on its way. Before the previous kernel is done, the first `AHEAD` blocks
are called into the L2 cache: nothing of them changes but the new position, which is written before
it is read.

B sequences of one token, H query heads on Hkv KV heads of d = 2 P columns, S positions. Rounding
points are `attention_step`'s; P's three BF16 terms are its upper, middle and lower 8 bits.
"""

import triton
import triton.language as tl

from optimized.decode_attention import HIDDEN, dot
from optimized.step_kernels import is_seen, new_heads, store_halves
from optimized.triton_support import exp_fp32, let_next_start, previous_is_done


@triton.jit
def _ask_for(rows, BYTES: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr):
    """Let `BYTES` from `rows` on come to the L2 cache; each warp asks for a part, at once."""
    if PDL:
        PART: tl.constexpr = BYTES // WARPS
        warp = tl.arange(0, 32 * WARPS) // 32
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, $2;",
            "=r,l,r",
            [warp.to(tl.int64) * PART + rows.to(tl.int64), tl.full([32 * WARPS], PART, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _term(x):
    """The BF16 number of x's upper 16 bits, and the exact rest."""
    bits = x.to(tl.int32, bitcast=True)
    upper = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return upper, x - (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _over_warps(x, WARPS: tl.constexpr, N: tl.constexpr, M: tl.constexpr):
    """The sums of x [WARPS, N, M] over its first dimension: pairs, which a thread holds once x has
    moved, where a reduction would exchange every one."""
    x = tl.permute(x, (1, 2, 0))
    for i in tl.static_range(5):  # pyright: ignore[reportGeneralTypeIssues]
        if WARPS >> i > 1:
            a, b = tl.split(tl.reshape(x, [N, M, WARPS >> (i + 1), 2]))
            x = a + b
    return tl.reshape(x, [N, M])


@triton.jit
def step_stream_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight,
    k_weight,
    cos_ptr,
    sin_ptr,
    factor_ptr,
    k_cache,
    v_cache,
    slots_ptr,
    mask_ptr,
    sums_ptr,
    stats_ptr,
    q_stride,
    k_stride,
    v_stride,
    k_batch,
    k_slot,
    k_head,
    v_batch,
    v_slot,
    v_head,
    mask_batch,
    S,
    tiles,
    scale,
    eps,
    q_factor,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROTATION: tl.constexpr,
    FACTOR: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `step_attention_kernel`, for shares of several blocks. With `AHEAD`, the KV heads of a
    position follow one another, and so do positions."""
    let_next_start(PDL)
    split, kv_head = tl.program_id(0), tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    start, end = split * tiles * BLOCK, tl.minimum((split + 1) * tiles * BLOCK, S)
    k_rows, v_rows = k_cache + batch * k_batch, v_cache + batch * v_batch
    k_step, v_step = k_slot.to(tl.int64), v_slot.to(tl.int64)
    if AHEAD > 0:  # of all KV heads, each program as much as it reads itself
        READ: tl.constexpr = AHEAD * BLOCK * P * 4
        if start + AHEAD * BLOCK <= S:
            ours = kv_head * (AHEAD * BLOCK * 2 * P)
            _ask_for(k_rows + start * k_step + ours, READ, WARPS, PDL)
            _ask_for(v_rows + start * v_step + ours, READ, WARPS, PDL)
    half = tl.arange(0, P)
    columns = half[None, :]
    q_weight_a, q_weight_b, k_weight_a, k_weight_b = 1.0, 1.0, 1.0, 1.0
    if WEIGHTED:
        q_weight_a, q_weight_b = tl.load(q_weight + columns), tl.load(q_weight + P + columns)
        k_weight_a, k_weight_b = tl.load(k_weight + columns), tl.load(k_weight + P + columns)
    previous_is_done(PDL)

    # All that is read now, before anything waits for it; see `step_attention_kernel`.
    slot = tl.load(slots_ptr + batch)
    cos, sin, factor = 0.0, 0.0, q_factor
    if ROTATION != "none":
        cos = tl.load(cos_ptr + batch * P + columns).to(tl.float32)
        sin = tl.load(sin_ptr + batch * P + columns).to(tl.float32)
    if FACTOR == "table":
        factor = tl.load(factor_ptr + batch)
    every = tl.arange(0, 2 * P)[None, :]
    v_new = tl.load(v_ptr + batch * v_stride + kv_head * (2 * P) + every)
    EACH: tl.constexpr = BLOCK // WARPS
    block = tl.arange(0, WARPS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    mask_row = mask_ptr + batch * mask_batch
    next_seen = is_seen(mask_row, start + block, S, MASKED)
    tl.debug_barrier()
    heads = tl.arange(0, GROUP)
    q_row = q_ptr + batch * q_stride + kv_head * (G * 2 * P)
    k_row = k_ptr + batch * k_stride + kv_head * (2 * P)
    # fmt: off
    q_a, q_b, k_new_a, k_new_b, is_key = new_heads(
        q_row, k_row, q_weight_a, q_weight_b, k_weight_a, k_weight_b, cos, sin, factor, eps,
        G, GROUP, P, WEIGHTED, ROTATION, FACTOR != "none",
    )
    # fmt: on
    k_rows, v_rows = k_rows + kv_head * k_head, v_rows + kv_head * v_head
    # The spare slot at the end belongs to the first share.
    if ((slot >= start) & (slot < end)) | ((slot >= S) & (split == 0)):
        store_halves(k_rows + slot * k_step + columns, k_new_a, k_new_b, is_key, P)
        tl.store(v_rows + slot * v_step + every, v_new)
        tl.debug_barrier()  # all threads of the block read it below
    q_a = tl.broadcast_to(q_a.to(tl.bfloat16)[None], [WARPS, GROUP, P])
    q_b = tl.broadcast_to(q_b.to(tl.bfloat16)[None], [WARPS, GROUP, P])
    q_a, q_b = tl.permute(q_a, (0, 2, 1)), tl.permute(q_b, (0, 2, 1))
    k_at = block[:, :, None] * k_slot + half[None, None, :]
    v_at = block[:, None, :] * v_slot + tl.arange(0, 2 * P)[None, :, None]
    highest = tl.full((WARPS, GROUP), HIDDEN, tl.float32)
    denominators = tl.zeros((WARPS, EACH, GROUP), tl.float32)
    numerator = tl.zeros((WARPS, 2 * P, GROUP), tl.float32)
    for first in tl.range(start, end, BLOCK, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        inside = first + block < S
        keys = k_rows + first * k_step + k_at
        values = v_rows + first * v_step + v_at
        k_a = tl.load(keys, mask=inside[:, :, None], other=0.0)
        k_b = tl.load(keys + P, mask=inside[:, :, None], other=0.0)
        v = tl.load(values, mask=inside[:, None, :], other=0.0)
        seen = next_seen
        next_seen = is_seen(mask_row, first + BLOCK + block, S, MASKED)
        scores = tl.zeros((WARPS, EACH, GROUP), tl.float32)
        scores = dot(k_b, q_b, dot(k_a, q_a, scores, WIDE), WIDE) * scale
        scores = tl.where(seen[:, :, None], scores, HIDDEN)
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        rest = tl.where(inside[:, :, None], exp_fp32(scores - higher[:, None, :]), 0.0)
        kept = exp_fp32(highest - higher)[:, None, :]
        denominators = denominators * kept + rest
        numerator = numerator * kept
        for _ in tl.static_range(3):  # pyright: ignore[reportGeneralTypeIssues]
            part, rest = _term(rest)
            numerator = dot(v, part, numerator, WIDE)
        highest = higher

    top = tl.max(highest, axis=0)
    share = exp_fp32(highest - top[None, :])
    denominator = tl.sum(tl.sum(denominators, axis=1) * share, axis=0)
    numerator = _over_warps(numerator * share[:, None, :], WARPS, 2 * P, GROUP)
    first_row = (batch * tl.num_programs(1) + kv_head) * G
    rows = (first_row + heads) * SPLITS + split
    valid = heads < G
    sums = sums_ptr + rows[None, :] * (2 * P) + tl.arange(0, 2 * P)[:, None]
    tl.store(sums, numerator, mask=valid[None, :])
    tl.store(stats_ptr + rows * 2, top, mask=valid)
    tl.store(stats_ptr + rows * 2 + 1, denominator, mask=valid)
