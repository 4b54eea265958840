"""Kernels of one decode step's attention; see `optimized.attention_step`.

B sequences of one token, H query heads on Hkv KV heads of d = 2 P columns, S positions. A share of
the sequence leaves sums [B H, SPLITS, d], the numerators, and stats [B H, SPLITS, 2], its maximum
and its denominator, FP32.
"""

import triton
import triton.language as tl

from optimized.decode_attention import HIDDEN, add_block, dot
from optimized.qk_norm import copy_heads, normed_heads, store_heads
from optimized.triton_support import (
    begin,
    exp_fp32,
    let_next_start,
    previous_is_done,
    sigmoid_fp32,
)


@triton.jit
def _prepared(
    row_ptr,
    weight_ptr,
    heads,
    in_heads,
    columns,
    cos,
    sin,
    factor,
    eps,
    P: tl.constexpr,
    ROTATED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Some heads of a row, normed and turned by their position, or scaled; FP32 halves [., P]."""
    a, b = normed_heads(row_ptr, weight_ptr, heads, columns, in_heads, eps, P)
    if ROTATED:
        first = a
        a = first * cos - b * sin
        b = b * cos + first * sin
    if SCALED:
        a, b = a * factor, b * factor
    return a, b


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
    G: tl.constexpr,
    GROUP: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
    ROTATED: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    split, kv_head = tl.program_id(0), tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    columns = tl.arange(0, P)[None, :]
    cos, sin, factor = 0.0, 0.0, 1.0
    if ROTATED:
        cos = tl.load(cos_ptr + batch * P + columns)
        sin = tl.load(sin_ptr + batch * P + columns)
    else:
        factor = tl.load(factor_ptr + batch)
    slot = tl.load(slots_ptr + batch)
    start, end = split * tiles * BLOCK, tl.minimum((split + 1) * tiles * BLOCK, S)

    # The spare slot at the end belongs to the first share.
    if ((slot >= start) & (slot < end)) | ((slot >= S) & (split == 0)):
        one = kv_head + tl.arange(0, 1)[:, None]
        whole = (one >= 0) & (columns < P)
        a, b = _prepared(
            k_ptr + batch * k_stride,
            k_weight,
            one,
            whole,
            columns,
            cos,
            sin,
            factor,
            eps,
            P,
            ROTATED,
            False,
        )
        store_heads(k_cache + batch * k_batch + slot * k_slot, a, b, one, columns, whole, k_head, P)
        v_row = v_cache + batch * v_batch + slot * v_slot
        copy_heads(v_ptr + batch * v_stride, v_row, one, columns, whole, v_head, P)
        tl.debug_barrier()  # all threads of the block read it below

    heads = tl.arange(0, GROUP)
    in_group = (heads < G)[:, None] & (columns < P)
    q_a, q_b = _prepared(
        q_ptr + batch * q_stride,
        q_weight,
        (kv_head * G + heads)[:, None],
        in_group,
        columns,
        cos,
        sin,
        factor,
        eps,
        P,
        ROTATED,
        not ROTATED,
    )
    q_a, q_b = q_a.to(tl.bfloat16), q_b.to(tl.bfloat16)
    half = tl.arange(0, P)[:, None]
    every = tl.arange(0, 2 * P)[None, :]
    block = tl.arange(0, BLOCK)
    k_base = k_cache + batch * k_batch + kv_head * k_head + half
    v_base = v_cache + batch * v_batch + kv_head * v_head + every
    highest = tl.full((GROUP,), HIDDEN, tl.float32)
    denominator = tl.zeros((GROUP,), tl.float32)
    numerator = tl.zeros((GROUP, 2 * P), tl.float32)
    for first in tl.range(start, end, BLOCK, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        position = (first + block).to(tl.int64)
        inside = position < S
        keys = k_base + position[None, :] * k_slot
        k_a = tl.load(keys, mask=inside[None, :], other=0.0)
        k_b = tl.load(keys + P, mask=inside[None, :], other=0.0)
        v = tl.load(v_base + position[:, None] * v_slot, mask=inside[:, None], other=0.0)
        scores = dot(q_a, k_a, tl.zeros((GROUP, BLOCK), tl.float32), WIDE)
        scores = dot(q_b, k_b, scores, WIDE) * scale
        seen = inside
        if MASKED:
            seen = tl.load(mask_ptr + batch * mask_batch + position, mask=inside, other=0) != 0
        scores = tl.where(seen[None, :], scores, HIDDEN)
        highest, denominator, numerator = add_block(
            scores, v, inside, highest, denominator, numerator, WIDE
        )

    first_row = (batch * tl.num_programs(1) + kv_head) * G
    rows = (first_row + heads) * SPLITS + split
    valid = heads < G
    tl.store(sums_ptr + rows[:, None] * (2 * P) + every, numerator, mask=valid[:, None])
    tl.store(stats_ptr + rows * 2, highest, mask=valid)
    tl.store(stats_ptr + rows * 2 + 1, denominator, mask=valid)


@triton.jit
def _gated(a, gate, bias):
    """R(a * R(sigmoid(R(gate + bias)))) of the rounded a, as FP32."""
    a = a.to(tl.bfloat16).to(tl.float32)
    biased = (gate.to(tl.float32) + bias.to(tl.float32)).to(tl.bfloat16).to(tl.float32)
    share = sigmoid_fp32(biased).to(tl.bfloat16).to(tl.float32)
    return (a * share).to(tl.bfloat16).to(tl.float32)


@triton.jit
def combine_gate_kernel(
    sums_ptr,
    stats_ptr,
    gate_ptr,
    bias_ptr,
    out_ptr,
    gate_stride,
    H,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    splits = tl.arange(0, SPLIT_BLOCK)
    inside = splits < SPLITS
    stats = stats_ptr + (row * SPLITS + splits) * 2
    highest = tl.load(stats, mask=inside, other=HIDDEN)
    sums = sums_ptr + (row * SPLITS + splits)[:, None] * DIM + columns[None, :]
    numerators = tl.load(sums, mask=inside[:, None], other=0.0)
    denominators = tl.load(stats + 1, mask=inside, other=0.0)
    head = row % H
    gate = tl.load(gate_ptr + (row // H) * gate_stride + head * DIM + columns)
    bias = tl.load(bias_ptr + head)
    factors = exp_fp32(highest - tl.max(highest, axis=0))
    total = tl.sum(factors * denominators, axis=0)
    a = tl.sum(numerators * factors[:, None], axis=0) / total
    tl.store(out_ptr + row * DIM + columns, _gated(a, gate, bias).to(tl.bfloat16))


@triton.jit
def gated_projection_kernel(
    sums_ptr,
    stats_ptr,
    gate_ptr,
    bias_ptr,
    weight_ptr,
    out_ptr,
    O,  # noqa: E741
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One sequence: W = H d gated columns, combined from `SPLITS` shares, times `ROWS` rows."""
    let_next_start(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < W
    pointers = weight_ptr + row[:, None] * W + column[None, :]
    weight = tl.load(pointers, mask=(row < O)[:, None] & inside[None, :], other=0.0)
    head = tl.minimum(column, W - 1) // DIM
    bias = tl.load(bias_ptr + head)
    previous_is_done(PDL)
    gate = tl.load(gate_ptr + column, mask=inside, other=0.0)
    share = head * SPLITS
    highest = tl.load(stats_ptr + share * 2)
    for split in tl.static_range(1, SPLITS):  # pyright: ignore[reportGeneralTypeIssues]
        highest = tl.maximum(highest, tl.load(stats_ptr + (share + split) * 2))
    total = tl.zeros([BLOCK], tl.float32)
    a = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):  # pyright: ignore[reportGeneralTypeIssues]
        factor = exp_fp32(tl.load(stats_ptr + (share + split) * 2) - highest)
        total = tl.fma(tl.load(stats_ptr + (share + split) * 2 + 1), factor, total)
        sums = sums_ptr + (share + split) * DIM + column % DIM
        a = tl.fma(tl.load(sums, mask=inside, other=0.0), factor, a)
    x = _gated(a / total, gate, bias)
    products = weight.to(tl.float32) * x[None, :]
    tl.store(out_ptr + row, tl.sum(products, axis=1).to(tl.bfloat16), mask=row < O)
