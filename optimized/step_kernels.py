"""The first kernel of a decode step's attention; see `optimized.attention_step`, and `step_output`
for what combines the shares.

B sequences of one token, H query heads on Hkv KV heads of d = 2 P columns, S positions. A share of
the sequence leaves sums [B H, SPLITS, d], the numerators, and stats [B H, SPLITS, 2], its maximum
and its denominator, FP32.
"""

import triton
import triton.language as tl

from optimized.decode_attention import HIDDEN, dot
from optimized.qk_norm_kernel import normed_halves, turned
from optimized.triton_support import exp_fp32, let_next_start, previous_is_done


@triton.jit
def prepared(
    a,
    b,
    weight_a,
    weight_b,
    cos,
    sin,
    factor,
    eps,
    P: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROTATION: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Some heads in halves [., P], normed, scaled and turned by their position; FP32 halves."""
    a, b = normed_halves(a, b, weight_a, weight_b, eps, P, WEIGHTED)
    if SCALED:
        a = (a * factor).to(tl.bfloat16).to(tl.float32)
        b = (b * factor).to(tl.bfloat16).to(tl.float32)
    return turned(a, b, cos, sin, ROTATION)


@triton.jit
def new_heads(
    q_row,
    k_row,
    q_weight_a,
    q_weight_b,
    k_weight_a,
    k_weight_b,
    cos,
    sin,
    factor,
    eps,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    P: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROTATION: tl.constexpr,
    SCALED: tl.constexpr,
):
    """The new queries of a KV head, prepared halves [GROUP, P], its new key's halves, and where
    those are: a row after the queries, normed with them, or [1, P] where no row is left."""
    heads, columns = tl.arange(0, GROUP)[:, None], tl.arange(0, P)[None, :]
    is_query = (heads < G) & (columns < P)
    at = heads * (2 * P) + columns
    q_a = tl.load(q_row + at, mask=is_query, other=0.0)
    q_b = tl.load(q_row + P + at, mask=is_query, other=0.0)
    if GROUP > G:
        is_key = (heads == G) & (columns < P)
        at = columns + tl.zeros((GROUP, 1), tl.int32)
        k_a = tl.load(k_row + at, mask=is_key, other=0.0)
        k_b = tl.load(k_row + P + at, mask=is_key, other=0.0)
        q_a = tl.where(is_key, k_a, q_a).to(tl.float32)  # a load into the same register would wait
        q_b = tl.where(is_key, k_b, q_b).to(tl.float32)
        if WEIGHTED:
            q_weight_a = tl.where(is_key, k_weight_a, q_weight_a)
            q_weight_b = tl.where(is_key, k_weight_b, q_weight_b)
        if SCALED:
            factor = tl.where(is_key, 1.0, factor)
        # fmt: off
        q_a, q_b = prepared(
            q_a, q_b, q_weight_a, q_weight_b, cos, sin, factor, eps, P, WEIGHTED, ROTATION, SCALED
        )
        # fmt: on
        return q_a, q_b, q_a, q_b, is_key
    else:
        q_a, q_b = q_a.to(tl.float32), q_b.to(tl.float32)
        k_a = tl.load(k_row + columns).to(tl.float32)
        k_b = tl.load(k_row + P + columns).to(tl.float32)
        # fmt: off
        q_a, q_b = prepared(
            q_a, q_b, q_weight_a, q_weight_b, cos, sin, factor, eps, P, WEIGHTED, ROTATION, SCALED
        )
        k_a, k_b = prepared(
            k_a, k_b, k_weight_a, k_weight_b, cos, sin, factor, eps, P, WEIGHTED, ROTATION, False
        )
        # fmt: on
        return q_a, q_b, k_a, k_b, columns < P


@triton.jit
def store_halves(pointers, a, b, mask, P: tl.constexpr):
    """Write a key's halves [., P], where the mask says that they are it, from [1, P] on."""
    pointers = pointers + tl.zeros((a.shape[0], 1), tl.int32)
    tl.store(pointers, a.to(tl.bfloat16), mask=mask)
    tl.store(pointers + P, b.to(tl.bfloat16), mask=mask)


@triton.jit
def _keys_values(k_rows, v_rows, position, S, k_slot, v_slot, P: tl.constexpr):
    """Keys in halves [BLOCK, P] and values [BLOCK, 2 P] at those positions."""
    half, every = tl.arange(0, P), tl.arange(0, 2 * P)
    inside = (position < S)[:, None]
    position = position.to(tl.int64)[:, None]
    keys = k_rows + position * k_slot + half[None, :]
    k_a = tl.load(keys, mask=inside, other=0.0)
    k_b = tl.load(keys + P, mask=inside, other=0.0)
    return k_a, k_b, tl.load(v_rows + position * v_slot + every[None, :], mask=inside, other=0.0)


@triton.jit
def is_seen(mask_row, position, S, MASKED: tl.constexpr):
    """Which positions the query sees."""
    inside = position < S
    if MASKED:
        return tl.load(mask_row + position, mask=inside, other=0) != 0
    return inside


@triton.jit
def _add_block(
    q_a,
    q_b,
    k_a,
    k_b,
    v,
    seen,
    inside,
    scale,
    highest,
    denominator,
    numerator,
    GROUP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Take a block of positions into a running softmax: those `inside` exist, those `seen` count.
    Heads are columns: tensor cores multiply by as few as eight of them."""
    scores = tl.zeros((inside.shape[0], GROUP), tl.float32)
    scores = dot(k_b, q_b, dot(k_a, q_a, scores, WIDE), WIDE) * scale
    scores = tl.where(seen[:, None], scores, HIDDEN)
    higher = tl.maximum(highest, tl.max(scores, axis=0))
    weights = tl.where(inside[:, None], exp_fp32(scores - higher[None, :]), 0.0)
    kept = exp_fp32(highest - higher)
    denominator = denominator * kept + tl.sum(weights, axis=0)
    numerator = numerator * kept[None, :]
    values = tl.trans(v)
    rest = weights
    for _ in tl.static_range(3):  # pyright: ignore[reportGeneralTypeIssues]
        part = rest.to(tl.bfloat16)
        numerator = dot(values, part, numerator, WIDE)
        rest = rest - part.to(tl.float32)
    return higher, denominator, numerator


@triton.jit
def step_attention_kernel(
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
    MORE: tl.constexpr,
    MASKED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROTATION: tl.constexpr,
    FACTOR: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """`WEIGHTED` are the norms, `ROTATION` is `qk_norm.turned`'s; the queries' `FACTOR` is "table",
    of each sequence at `factor_ptr`, "one", `q_factor` for all, or "none".

    The first block of a share is read before the previous kernel is done: what it holds was written
    by earlier steps, except in the slot of this one, which is read again. `MORE`: there are other
    blocks."""
    let_next_start(PDL)
    split, kv_head = tl.program_id(0), tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    start, end = split * tiles * BLOCK, tl.minimum((split + 1) * tiles * BLOCK, S)
    block = tl.arange(0, BLOCK)
    half = tl.arange(0, P)
    k_rows = k_cache + batch * k_batch + kv_head * k_head
    v_rows = v_cache + batch * v_batch + kv_head * v_head
    k_a, k_b, v = _keys_values(k_rows, v_rows, start + block, S, k_slot, v_slot, P)
    columns = half[None, :]
    q_weight_a, q_weight_b, k_weight_a, k_weight_b = 1.0, 1.0, 1.0, 1.0
    if WEIGHTED:
        q_weight_a, q_weight_b = tl.load(q_weight + columns), tl.load(q_weight + P + columns)
        k_weight_a, k_weight_b = tl.load(k_weight + columns), tl.load(k_weight + P + columns)
    previous_is_done(PDL)

    # All that is read now, before anything waits for it: the compiler puts off, until the sum of a
    # norm is known, what no barrier keeps before it.
    slot = tl.load(slots_ptr + batch)
    cos, sin, factor = 0.0, 0.0, q_factor
    if ROTATION != "none":
        cos = tl.load(cos_ptr + batch * P + columns).to(tl.float32)
        sin = tl.load(sin_ptr + batch * P + columns).to(tl.float32)
    if FACTOR == "table":
        factor = tl.load(factor_ptr + batch)
    mask_row = mask_ptr + batch * mask_batch
    if not MORE:
        seen = is_seen(mask_row, start + block, S, MASKED)
    every = tl.arange(0, 2 * P)[None, :]
    v_row = v_ptr + batch * v_stride + kv_head * (2 * P) + every
    v_new = tl.load(v_row)
    if not MORE:
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
    # The spare slot at the end belongs to the first share.
    if ((slot >= start) & (slot < end)) | ((slot >= S) & (split == 0)):
        key = k_rows + slot * k_slot + columns
        store_halves(key, k_new_a, k_new_b, is_key, P)
        tl.store(v_rows + slot * v_slot + every, v_new)
        tl.debug_barrier()  # all threads of the block read it below
        here = ((start + block == slot) & (start + block < S))[:, None]
        keys = key + tl.zeros((BLOCK, 1), tl.int32)
        k_a = tl.load(keys, mask=here, other=k_a)
        k_b = tl.load(keys + P, mask=here, other=k_b)
        v = tl.load(v_row, mask=here, other=v)
    q_a, q_b = tl.trans(q_a.to(tl.bfloat16)), tl.trans(q_b.to(tl.bfloat16))
    if MORE:  # three blocks an SM have no registers for it earlier
        seen = is_seen(mask_row, start + block, S, MASKED)
    highest = tl.full((GROUP,), HIDDEN, tl.float32)
    denominator = tl.zeros((GROUP,), tl.float32)
    numerator = tl.zeros((2 * P, GROUP), tl.float32)
    # fmt: off
    highest, denominator, numerator = _add_block(
        q_a, q_b, k_a, k_b, v, seen, start + block < S, scale,
        highest, denominator, numerator, GROUP, WIDE,
    )
    if MORE:
        for first in tl.range(start + BLOCK, end, BLOCK, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
            k_a, k_b, v = _keys_values(k_rows, v_rows, first + block, S, k_slot, v_slot, P)
            seen = is_seen(mask_row, first + block, S, MASKED)
            highest, denominator, numerator = _add_block(
                q_a, q_b, k_a, k_b, v, seen, first + block < S, scale,
                highest, denominator, numerator, GROUP, WIDE,
            )
    # fmt: on

    first_row = (batch * tl.num_programs(1) + kv_head) * G
    rows = (first_row + heads) * SPLITS + split
    valid = heads < G
    sums = sums_ptr + rows[None, :] * (2 * P) + tl.arange(0, 2 * P)[:, None]
    tl.store(sums, numerator, mask=valid[None, :])
    tl.store(stats_ptr + rows * 2, highest, mask=valid)
    tl.store(stats_ptr + rows * 2 + 1, denominator, mask=valid)
