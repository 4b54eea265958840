"""The second grouped product of `grouped_experts`, of tiles of rows of one expert each."""

import triton
import triton.language as tl

from optimized.triton_support import begin, dot_fp32


@triton.jit
def grouped_down_kernel(
    hidden_ptr,
    hidden_box,
    tiles_ptr,
    used_ptr,
    weight_ptr,
    weight_box,
    y_ptr,
    y_box,
    D: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SPAN: tl.constexpr,
    BULK: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [P, D] = R(hidden W_down^T); a program makes `SPAN` tiles of columns, one after another.
    With `BULK` the copy engine moves all of a full tile, by the tensor descriptors called boxes."""
    begin(PDL)
    PARTS: tl.constexpr = (D + COLUMNS * SPAN - 1) // (COLUMNS * SPAN)
    tile = tl.program_id(0) // PARTS
    column = tl.program_id(0) % PARTS * (COLUMNS * SPAN)
    expert = tl.load(tiles_ptr + tile * 3)
    first, end = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
    if tile < tl.load(used_ptr):
        weight = weight_ptr + expert.to(tl.int64) * (D * F)
        if BULK & (end - first >= ROWS):
            if BULK:
                _full_tiles(
                    hidden_box, weight_box, y_box, first, expert * D, column,
                    F, ROWS, COLUMNS, BLOCK, STAGES, SPAN,
                )  # fmt: skip
        elif (ROWS > 16) & (end - first <= ROWS // 2):
            _down_tiles(
                hidden_ptr, weight, y_ptr, first, end, column,
                D, F, ROWS // 2 if ROWS > 16 else ROWS, COLUMNS, BLOCK, STAGES, SPAN,
            )  # fmt: skip
        else:
            _down_tiles(
                hidden_ptr, weight, y_ptr, first, end, column,
                D, F, ROWS, COLUMNS, BLOCK, STAGES, SPAN,
            )  # fmt: skip


@triton.jit
def _full_tiles(
    hidden_box,
    weight_box,
    y_box,
    first,
    first_weight,
    first_column,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Boxes end where their tensors do: beyond that, zeros are read and nothing is written."""
    STEPS: tl.constexpr = (F + BLOCK - 1) // BLOCK
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in tl.range(0, STEPS * SPAN, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        k, column = step % STEPS * BLOCK, first_column + step // STEPS * COLUMNS
        hidden = hidden_box.load([first, k])
        weight = weight_box.load([first_weight + column, k])
        total = dot_fp32(hidden, weight.T, total)
        if step % STEPS == STEPS - 1:
            y_box.store([first, column], total.to(tl.bfloat16))
            total = tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def _down_tiles(
    hidden_ptr,
    weight_ptr,
    y_ptr,
    first,
    end,
    first_column,
    D: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SPAN: tl.constexpr,
):
    row = first + tl.arange(0, ROWS)
    columns = first_column + tl.arange(0, COLUMNS)
    depth = tl.arange(0, BLOCK)
    hidden_tile = hidden_ptr + tl.minimum(row, end - 1).to(tl.int64)[:, None] * F + depth[None, :]
    STEPS: tl.constexpr = (F + BLOCK - 1) // BLOCK
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    # One loop over all tiles: the next one's loads are under way while this one is stored.
    for step in tl.range(0, STEPS * SPAN, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        k, column = step * BLOCK, columns
        if SPAN > 1:
            k, column = step % STEPS * BLOCK, columns + step // STEPS * COLUMNS
        weight_tile = weight_ptr + tl.minimum(column, D - 1)[None, :] * F + depth[:, None]
        if F % BLOCK == 0:
            hidden = tl.load(hidden_tile + k)
            weight = tl.load(weight_tile + k)
        else:
            inside = k + depth < F
            hidden = tl.load(hidden_tile + k, mask=inside[None, :], other=0.0)
            weight = tl.load(weight_tile + k, mask=inside[:, None], other=0.0)
        total = dot_fp32(hidden, weight, total)
        if SPAN > 1:
            if step % STEPS == STEPS - 1:
                _store_tile(y_ptr, row, end, column, total, D)
                total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if SPAN == 1:
        _store_tile(y_ptr, row, end, columns, total, D)


@triton.jit
def _store_tile(y_ptr, row, end, column, total, D: tl.constexpr):
    stored = (row < end)[:, None] & (column < D)[None, :]
    y = y_ptr + row.to(tl.int64)[:, None] * D + column[None, :]
    tl.store(y, total.to(tl.bfloat16), mask=stored)
