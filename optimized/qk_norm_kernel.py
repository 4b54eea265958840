"""Device code of `qk_norm` and its pieces: heads as two halves of P = d / 2 columns."""

import triton
import triton.language as tl

from optimized.triton_support import begin, loads_are_asked_for


@triton.jit
def normed_heads(
    row_ptr,
    weight_ptr,
    heads,
    columns,
    mask,
    eps,
    P: tl.constexpr,
    WEIGHTED: tl.constexpr = True,
):
    """R(rms_norm(x) * w) of `heads` [HEADS, 1] of one row, as FP32 halves [HEADS, P]; w is one
    where nothing is `WEIGHTED`."""
    a, b = halves(row_ptr, heads, columns, mask, P)
    weight_a, weight_b = 1.0, 1.0
    if WEIGHTED:
        weight_a, weight_b = tl.load(weight_ptr + columns), tl.load(weight_ptr + P + columns)
    return normed_halves(a, b, weight_a, weight_b, eps, P, WEIGHTED)


@triton.jit
def halves(row_ptr, heads, columns, mask, P: tl.constexpr):
    """`heads` [HEADS, 1] of a row, or each of its own row, as FP32 halves [HEADS, P]."""
    a, b = stored_halves(row_ptr, heads, columns, mask, P)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def stored_halves(row_ptr, heads, columns, mask, P: tl.constexpr):
    """The same as they are in memory."""
    pointers = row_ptr + heads * (2 * P) + columns
    return tl.load(pointers, mask=mask, other=0.0), tl.load(pointers + P, mask=mask, other=0.0)


@triton.jit
def normed_halves(a, b, weight_a, weight_b, eps, P: tl.constexpr, WEIGHTED: tl.constexpr):
    """R(rms_norm(x) * w) of heads in halves [HEADS, P] and w in halves [1, P], FP32."""
    squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
    inverse = tl.rsqrt(squares * (0.5 / P) + eps)[:, None]
    a, b = a * inverse, b * inverse
    if WEIGHTED:
        a, b = a * weight_a.to(tl.float32), b * weight_b.to(tl.float32)
    return _rounded(a), _rounded(b)


@triton.jit
def _rounded(x):
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def turned(a, b, cos, sin, ROTATION: tl.constexpr):
    """RoPE of halves: "once" is rounded by whoever stores it, "stepped" rounds products and sums,
    "none" leaves them."""
    if ROTATION == "once":
        return a * cos - b * sin, b * cos + a * sin
    elif ROTATION == "stepped":
        first = _rounded(a * cos) - _rounded(b * sin)
        second = _rounded(b * cos) + _rounded(a * sin)
        return _rounded(first), _rounded(second)
    else:
        return a, b


@triton.jit
def store_heads(row_ptr, a, b, heads, columns, mask, head_stride, P: tl.constexpr):
    """Write halves [HEADS, P] as BF16, heads `head_stride` elements apart."""
    pointers = row_ptr + heads * head_stride + columns
    tl.store(pointers, a.to(tl.bfloat16), mask=mask)
    tl.store(pointers + P, b.to(tl.bfloat16), mask=mask)


@triton.jit
def rows_and_heads(first, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """A program's rows [ROWS * HEADS, 1], int64, or the only one; and its heads, `first` and on."""
    start = tl.program_id(0).to(tl.int64) * ROWS
    if ROWS == 1:
        return start, first + tl.arange(0, HEADS)[:, None]
    else:
        step = tl.arange(0, ROWS * HEADS)[:, None]
        return start + step // HEADS, first + step % HEADS


@triton.jit
def angles(cos_ptr, sin_ptr, row, columns, inside, P: tl.constexpr, ROTATION: tl.constexpr):
    """cos and sin of rows, FP32."""
    if ROTATION == "none":
        return 0.0, 0.0
    else:
        place = row * P + columns
        cos = tl.load(cos_ptr + place, mask=inside, other=0.0).to(tl.float32)
        return cos, tl.load(sin_ptr + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def qk_norm_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight,
    k_weight,
    factors_ptr,
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
    count,
    steps,
    eps,
    factor,
    H: tl.constexpr,
    HKV: tl.constexpr,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SCALED: tl.constexpr,
    ROTATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norms, q times its factor, RoPE, and the cache write. `SCALED` is "row" where each row has a
    factor, "all" where `factor` is that of all, or "none"."""
    begin(PDL)
    group = tl.program_id(1)
    columns = tl.arange(0, P)[None, :]
    query_groups: tl.constexpr = (H + HEADS - 1) // HEADS
    if group < query_groups:
        row, heads = rows_and_heads(group * HEADS, HEADS, ROWS)
        mask = (heads < H) & (row < count) & (columns < P)
        cos, sin = angles(cos_ptr, sin_ptr, row, columns, row < count, P, ROTATION)
        shares = factor
        if SCALED == "row":
            shares = tl.load(factors_ptr + row, mask=row < count, other=0.0)
        loads_are_asked_for(PDL and ROWS > 1)
        q_row = q_ptr + row * q_stride
        a, b = normed_heads(q_row, q_weight, heads, columns, mask, eps, P, WEIGHTED)
        if SCALED != "none":
            a, b = _rounded(a * shares), _rounded(b * shares)
        a, b = turned(a, b, cos, sin, ROTATION)
        store_heads(q_out + row * (H * 2 * P), a, b, heads, columns, mask, 2 * P, P)
    else:
        token, kv_heads = rows_and_heads((group - query_groups) * KV_HEADS, KV_HEADS, ROWS)
        there = token < count
        kv_mask = (kv_heads < HKV) & there & (columns < P)
        batch, slot = token // steps, tl.load(slots + token, mask=there, other=0)
        v_a, v_b = stored_halves(v_ptr + token * v_stride, kv_heads, columns, kv_mask, P)
        k_cos, k_sin = angles(cos_ptr, sin_ptr, token, columns, there, P, ROTATION)
        loads_are_asked_for(PDL and ROWS > 1)
        k_row_in = k_ptr + token * k_stride
        k_a, k_b = normed_heads(k_row_in, k_weight, kv_heads, columns, kv_mask, eps, P, WEIGHTED)
        k_a, k_b = turned(k_a, k_b, k_cos, k_sin, ROTATION)
        k_target = k_out + token * (HKV * 2 * P)
        store_heads(k_target, k_a, k_b, kv_heads, columns, kv_mask, 2 * P, P)
        k_row = k_cache + batch * k_batch + slot * k_slot
        store_heads(k_row, k_a, k_b, kv_heads, columns, kv_mask, k_head, P)
        v_row = v_cache + batch * v_batch + slot * v_slot
        store_heads(v_row, v_a, v_b, kv_heads, columns, kv_mask, v_head, P)
