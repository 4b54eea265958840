"""Kernels that combine the shares of a decode step's attention and gate them; one multiplies them
by the output projection too. See `optimized.attention_step`.

B sequences of one token, H query heads of d = DIM columns. What `step_kernels` leaves of a share:
sums [B H, SPLITS, d], the numerators, and stats [B H, SPLITS, 2], maximum and denominator; FP32.
"""

import triton
import triton.language as tl

from optimized.decode_attention import HIDDEN
from optimized.triton_support import exp_fp32, let_next_start, previous_is_done, sigmoid_fp32


@triton.jit
def _gated(a, gate, bias, eps, DIM: tl.constexpr, NORMED: tl.constexpr):
    """R(a * R(sigmoid(R(gate + bias)))) of the rounded a [..., DIM], as FP32; `NORMED`, of
    R(unit_norm(a)) and without a bias."""
    a = a.to(tl.bfloat16).to(tl.float32)
    gate = gate.to(tl.float32)
    if NORMED:
        squares = tl.sum(a * a, axis=len(a.shape) - 1, keep_dims=True)
        a = (a * tl.rsqrt(squares * (1.0 / DIM) + eps)).to(tl.bfloat16).to(tl.float32)
    else:
        gate = (gate + bias.to(tl.float32)).to(tl.bfloat16).to(tl.float32)
    share = sigmoid_fp32(gate).to(tl.bfloat16).to(tl.float32)
    return (a * share).to(tl.bfloat16).to(tl.float32)


@triton.jit
def combine_gate_kernel(
    sums_ptr,
    stats_ptr,
    gate_ptr,
    bias_ptr,
    out_ptr,
    gate_stride,
    eps,
    H: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some `COLUMNS` of a head, all of them where it is `NORMED`."""
    let_next_start(PDL)
    row = tl.program_id(0)
    head, batch = row % H, (row // H).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    share = tl.arange(0, SPLIT_BLOCK)
    inside = share < SPLITS
    first = row.to(tl.int64) * SPLITS
    sums = sums_ptr + first * DIM + (share[:, None] * DIM + columns[None, :])
    stats = stats_ptr + first * 2 + share * 2
    bias = 0.0
    if not NORMED:
        bias = tl.load(bias_ptr + head)
    previous_is_done(PDL)
    numerators = tl.load(sums, mask=inside[:, None], other=0.0)
    gate = tl.load(gate_ptr + batch * gate_stride + head * DIM + columns)
    tl.debug_barrier()  # the compiler puts them off until the maximum is known otherwise
    highest = tl.load(stats, mask=inside, other=HIDDEN)
    denominators = tl.load(stats + 1, mask=inside, other=0.0)
    factors = exp_fp32(highest - tl.max(highest, axis=0))
    total = tl.sum(factors * denominators, axis=0)
    a = tl.sum(numerators * factors[:, None], axis=0) / total
    out = out_ptr + row.to(tl.int64) * DIM + columns
    tl.store(out, _gated(a, gate, bias, eps, DIM, NORMED).to(tl.bfloat16))


@triton.jit
def _float(bits):
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _combined(
    sums_ptr,
    stats_ptr,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The attention [HEADS, DIM], FP32, of `SPLITS` shares, `CHUNK` at a time.

    Every thread reads the stats of its head for itself, both of a share as one 64-bit word, so that
    no thread waits for another."""
    head, dim = tl.arange(0, HEADS)[:, None], tl.arange(0, DIM)[None, :]
    inside = head < H
    stats = stats_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    top = tl.full([HEADS, 1], HIDDEN, tl.float32)
    total = tl.zeros([HEADS, 1], tl.float32)
    a = tl.zeros([HEADS, DIM], tl.float32)
    for start in tl.static_range(0, SPLITS, CHUNK):  # pyright: ignore[reportGeneralTypeIssues]
        highest, denominators, numerators = (), (), ()
        higher = top
        for i in tl.static_range(CHUNK):  # pyright: ignore[reportGeneralTypeIssues]
            if start + i < SPLITS:
                share = head * SPLITS + (start + i)
                pair = tl.load(stats + share, mask=inside, other=0)
                numerators = numerators + (
                    tl.load(sums_ptr + (share * DIM + dim), mask=inside, other=0.0),
                )
                highest = highest + (_float(pair & 0xFFFFFFFF),)
                denominators = denominators + (_float(pair >> 32),)
                higher = tl.maximum(higher, highest[i])
        if start > 0:
            kept = exp_fp32(top - higher)
            a, total = a * kept, total * kept
        for i in tl.static_range(CHUNK):  # pyright: ignore[reportGeneralTypeIssues]
            if start + i < SPLITS:
                factor = exp_fp32(highest[i] - higher)
                a += numerators[i] * factor
                total += denominators[i] * factor
        top = higher
    return a / tl.where(inside, total, 1.0)


@triton.jit
def gated_projection_kernel(
    sums_ptr,
    stats_ptr,
    gate_ptr,
    bias_ptr,
    weight_ptr,
    out_ptr,
    O,  # noqa: E741
    eps,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    NORMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One sequence: its H heads, combined from `SPLITS` shares, `CHUNK` at a time, and gated, times
    `TILES` tiles of `ROWS` rows of the weight, held in registers. A tile is in pieces of as many
    columns as a warp reads at once: with a row for each warp, a warp sums up whole rows."""
    let_next_start(PDL)
    WIDTH: tl.constexpr = HEADS * DIM
    PIECE: tl.constexpr = WIDTH if WIDTH < 256 else 256
    PIECES: tl.constexpr = WIDTH // PIECE
    first = tl.program_id(0) * (ROWS * TILES)
    line = tl.arange(0, PIECES * ROWS)[:, None]
    column = line // ROWS * PIECE + tl.arange(0, PIECE)[None, :]
    held = ()
    for i in tl.static_range(TILES):  # pyright: ignore[reportGeneralTypeIssues]
        row = first + i * ROWS + line % ROWS
        pointers = weight_ptr + row * (H * DIM) + column
        held = held + (tl.load(pointers, mask=(row < O) & (column < H * DIM), other=0.0),)
    head, dim = tl.arange(0, HEADS)[:, None], tl.arange(0, DIM)[None, :]
    bias = 0.0
    if not NORMED:
        bias = tl.load(bias_ptr + head, mask=head < H, other=0.0)
    previous_is_done(PDL)
    gate = tl.load(gate_ptr + (head * DIM + dim), mask=head < H, other=0.0)
    a = _combined(sums_ptr, stats_ptr, H, HEADS, DIM, SPLITS, CHUNK)
    x = _gated(a, gate, bias, eps, DIM, NORMED).to(tl.bfloat16)
    x = tl.reshape(x, [PIECES, PIECE])[:, None, :]
    for i in tl.static_range(TILES):  # pyright: ignore[reportGeneralTypeIssues]
        row = first + i * ROWS + tl.arange(0, ROWS)
        weight = tl.reshape(held[i], [PIECES, ROWS, PIECE]).to(tl.float32)
        y = tl.sum(tl.sum(weight * x.to(tl.float32), axis=0), axis=1)
        tl.store(out_ptr + row, y.to(tl.bfloat16), mask=row < O)
