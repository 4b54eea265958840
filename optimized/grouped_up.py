"""The first grouped product of `grouped_experts`: gate and up of tiles of rows of one expert."""

import triton
import triton.language as tl

from optimized.triton_support import begin, dot_fp32, silu_fp32


@triton.jit
def grouped_up_kernel(
    x_ptr,
    tokens_ptr,
    tiles_ptr,
    used_ptr,
    weight_ptr,
    weight_box,
    extra_box,
    hidden_ptr,
    x_stride,
    D: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXTRA: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SPAN: tl.constexpr,
    ROUNDED: tl.constexpr,
    BULK: tl.constexpr,
    PDL: tl.constexpr,
):
    """hidden [P, F] = R(silu(R(x W_gate^T)) * R(x W_up^T)) of sorted rows of x, silu rounded too if
    `ROUNDED`; a program makes `SPAN` tiles of columns one after the other, or one of `COLUMNS` and
    beside it one of `EXTRA`, from the same tiles of x. With `BULK` the copy engine fetches the
    weight, by boxes of gate and up rows of `COLUMNS` and `EXTRA`."""
    begin(PDL)
    WIDTH: tl.constexpr = (COLUMNS + EXTRA) * SPAN
    PARTS: tl.constexpr = (F + WIDTH - 1) // WIDTH
    REST: tl.constexpr = F - (PARTS - 1) * WIDTH
    ALONE: tl.constexpr = SPAN == 1 and EXTRA == 0 and not BULK
    NARROW: tl.constexpr = ALONE and COLUMNS > 16 and 2 * REST <= COLUMNS
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    # Read ahead of the test, though it may mean nothing: four loads at once.
    expert = tl.load(tiles_ptr + tile * 3)
    first, end = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
    if tile < tl.load(used_ptr):
        weight = weight_ptr + expert.to(tl.int64) * (2 * F * D)
        column = part * WIDTH
        if (ROWS > 16) & (end - first <= ROWS // 2):
            _up_tiles(
                x_ptr, tokens_ptr, weight, weight_box, extra_box, hidden_ptr, x_stride,
                expert, first, end, column,
                D, F, ROWS // 2 if ROWS > 16 else ROWS, COLUMNS, EXTRA,
                BLOCK, STAGES, SPAN, ROUNDED, BULK, PDL,
            )  # fmt: skip
        elif NARROW & (part == PARTS - 1):
            _up_tiles(
                x_ptr, tokens_ptr, weight, weight_box, extra_box, hidden_ptr, x_stride,
                expert, first, end, column,
                D, F, ROWS, COLUMNS // 2 if NARROW else COLUMNS, 0,
                BLOCK, STAGES, SPAN, ROUNDED, BULK, PDL,
            )  # fmt: skip
        else:
            _up_tiles(
                x_ptr, tokens_ptr, weight, weight_box, extra_box, hidden_ptr, x_stride,
                expert, first, end, column,
                D, F, ROWS, COLUMNS, EXTRA, BLOCK, STAGES, SPAN, ROUNDED, BULK, PDL,
            )  # fmt: skip


@triton.jit
def _gate_and_up(
    weight_ptr,
    box,
    expert,
    first_column,
    k,
    D: tl.constexpr,
    F: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BULK: tl.constexpr,
):
    """[BLOCK, 2 COLUMNS] of the weight from input `k` on: gate and up rows in turns, or, with
    `BULK`, the ones after the others."""
    if BULK:
        return box.load([2 * expert, first_column, k]).reshape(2 * COLUMNS, BLOCK).T
    else:
        both, depth = tl.arange(0, 2 * COLUMNS), k + tl.arange(0, BLOCK)
        row = tl.minimum(first_column + both // 2, F - 1) + both % 2 * F
        tile = weight_ptr + row[None, :] * D + depth[:, None]
        if D % BLOCK == 0:
            return tl.load(tile)
        else:
            return tl.load(tile, mask=(depth < D)[:, None], other=0.0)


@triton.jit
def _up_tiles(
    x_ptr,
    tokens_ptr,
    weight_ptr,
    weight_box,
    extra_box,
    hidden_ptr,
    x_stride,
    expert,
    first,
    end,
    first_column,
    D: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXTRA: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SPAN: tl.constexpr,
    ROUNDED: tl.constexpr,
    BULK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = first + tl.arange(0, ROWS)
    # Rows beyond the end are computed on real values and not stored, so no load needs a mask.
    token = tl.load(tokens_ptr + tl.minimum(row, end - 1)).to(tl.int64)
    depth = tl.arange(0, BLOCK)
    x_tile = x_ptr + token[:, None] * x_stride + depth[None, :]
    STEPS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    total = tl.zeros([ROWS, 2 * COLUMNS], tl.float32)
    if EXTRA > 0:
        beside = tl.zeros([ROWS, 2 * EXTRA], tl.float32)
    # One loop over all tiles: the next one's loads are under way while this one is stored.
    for step in tl.range(0, STEPS * SPAN, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        k, column = step * BLOCK, first_column
        if SPAN > 1:
            k, column = step % STEPS * BLOCK, first_column + step // STEPS * COLUMNS
        if D % BLOCK == 0:
            x = tl.load(x_tile + k)
        else:
            x = tl.load(x_tile + k, mask=(k + depth < D)[None, :], other=0.0)
        weight = _gate_and_up(
            weight_ptr, weight_box, expert, column, k, D, F, COLUMNS, BLOCK, BULK
        )  # fmt: skip
        total = dot_fp32(x, weight, total)
        if EXTRA > 0:
            weight = _gate_and_up(
                weight_ptr, extra_box, expert, column + COLUMNS, k, D, F, EXTRA, BLOCK, BULK
            )  # fmt: skip
            beside = dot_fp32(x, weight, beside)
        if SPAN > 1:
            if step % STEPS == STEPS - 1:
                _store_hidden(
                    hidden_ptr, first, row, end, column, total,
                    F, ROWS, COLUMNS, ROUNDED, BULK, PDL,
                )  # fmt: skip
                total = tl.zeros([ROWS, 2 * COLUMNS], tl.float32)
    if EXTRA > 0:  # first, because its registers are needed for the others
        column = first_column + COLUMNS
        _store_hidden(
            hidden_ptr, first, row, end, column, beside, F, ROWS, EXTRA, ROUNDED, BULK, PDL
        )
    if SPAN == 1:
        _store_hidden(
            hidden_ptr, first, row, end, first_column, total,
            F, ROWS, COLUMNS, ROUNDED, BULK, PDL,
        )  # fmt: skip


@triton.jit
def _store_hidden(
    hidden_ptr,
    first,
    row,
    end,
    first_column,
    total,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROUNDED: tl.constexpr,
    APART: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gate and up alternate in the columns of `total`, or half of them lie between the two of an
    output if they are `APART`: they are in the same thread."""
    if APART:
        gate, up = total.reshape(ROWS, 2, COLUMNS).permute(0, 2, 1).split()
    else:
        gate, up = total.reshape(ROWS, COLUMNS, 2).split()
    gate, up = gate.to(tl.bfloat16).to(tl.float32), up.to(tl.bfloat16).to(tl.float32)
    opened = silu_fp32(gate, PDL)
    if ROUNDED:
        opened = opened.to(tl.bfloat16).to(tl.float32)
    hidden = (opened * up).to(tl.bfloat16)
    column = first_column + tl.arange(0, COLUMNS)
    stored = (row < end)[:, None] & (column < F)[None, :]
    tile = hidden_ptr + first.to(tl.int64) * F
    offset = (row - first)[:, None] * F + column[None, :]
    tl.store(tile + offset, hidden, mask=stored)
