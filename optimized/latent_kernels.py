"""Device code of `latent_moe`: what stands between a layer's boundary and its experts."""

import triton
import triton.language as tl

from optimized.norms import norm_factor
from optimized.router_choose import choose_experts
from optimized.triton_support import let_next_start, previous_is_done


@triton.jit
def _rows_times(
    x_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    count,
    first,
    D: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """`ROWS` rows of weight [O, D] from `first` on, held, times every row of x [count, D]."""
    row = first + tl.arange(0, ROWS)
    in_rows = (row < O)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    held = ()
    for start in tl.static_range(0, D, BLOCK):  # pyright: ignore[reportGeneralTypeIssues]
        inside = in_rows & (start + column < D)
        pointers = weight_ptr + row.to(tl.int64)[:, None] * D + start + column
        held = held + (tl.load(pointers, mask=inside, other=0.0),)
    previous_is_done(PDL)
    for token in range(count):
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in tl.static_range(0, D, BLOCK):  # pyright: ignore[reportGeneralTypeIssues]
            x_row = x_ptr + token * x_stride + start + column
            x = tl.load(x_row, mask=start + column < D, other=0.0).to(tl.float32)
            weight = held[start // BLOCK].to(tl.float32)  # pyright: ignore[reportAttributeAccessIssue]
            total = tl.fma(weight, x.broadcast_to(ROWS, BLOCK), total)
        y = tl.sum(total, axis=1).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token * O + row, y, mask=row < O)


@triton.jit
def route_pool_kernel(
    x_ptr,
    router_ptr,
    pool_ptr,
    logits_ptr,
    pooled_ptr,
    x_stride,
    count,
    first,
    W: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    POOL_ROWS: tl.constexpr,
    POOL_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """logits [N, E] FP32 of the whole x [N, W], and pooled [N, D] BF16 of R of its columns, from
    `first` on."""
    let_next_start(PDL)
    PROGRAMS: tl.constexpr = (E + ROWS - 1) // ROWS
    program = tl.program_id(0)
    if program < PROGRAMS:
        _rows_times(
            x_ptr, router_ptr, logits_ptr, x_stride, count, program * ROWS, W, E, ROWS, BLOCK, PDL
        )
    else:
        row = (program - PROGRAMS) * POOL_ROWS
        _rows_times(
            x_ptr + first, pool_ptr, pooled_ptr, x_stride, count, row,
            R, D, POOL_ROWS, POOL_BLOCK, PDL,
        )  # fmt: skip


@triton.jit
def choose_norm_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    pooled_ptr,
    norm_ptr,
    z_ptr,
    count,
    logit_scale,
    floor,
    eps,
    E: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token's first program chooses its experts, the others norm its pooled row."""
    let_next_start(PDL)
    token, part = tl.program_id(0), tl.program_id(1)
    if part == 0:
        choose_experts(
            logits_ptr, bias_ptr, weights_ptr, experts_ptr, token, count, logit_scale, floor,
            E, GROUPS, TOP_GROUPS, TOP_K, SLOTS, 1, PDL,
        )  # fmt: skip
    else:
        column = tl.arange(0, COLUMNS)
        mine = (part - 1) * COLUMNS + column
        norm = tl.load(norm_ptr + mine, mask=mine < D, other=0.0)
        previous_is_done(PDL)
        row = pooled_ptr + token * D
        squares = tl.zeros([COLUMNS], tl.float32)
        for start in tl.static_range(0, D, COLUMNS):  # pyright: ignore[reportGeneralTypeIssues]
            x = tl.load(row + start + column, mask=start + column < D, other=0.0).to(tl.float32)
            squares += x * x
        inverse = tl.rsqrt(tl.sum(squares, axis=0) * (1.0 / D) + eps)
        x = tl.load(row + mine, mask=mine < D, other=0.0).to(tl.float32)
        z = x * inverse * norm_factor(norm, True)
        tl.store(z_ptr + token * D + mine, z.to(tl.bfloat16), mask=mine < D)
