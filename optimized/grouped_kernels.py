"""Device code of `grouped_experts`: two matrix products over tiles of rows of one expert each."""

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
    PDL: tl.constexpr,
):
    """hidden [P, F] = R(silu(R(x W_gate^T)) * R(x W_up^T)) of sorted rows of x, silu rounded too if
    `ROUNDED`; a program makes `SPAN` tiles of columns one after the other, or one of `COLUMNS` and
    beside it one of `EXTRA`, from the same tiles of x."""
    begin(PDL)
    WIDTH: tl.constexpr = (COLUMNS + EXTRA) * SPAN
    PARTS: tl.constexpr = (F + WIDTH - 1) // WIDTH
    REST: tl.constexpr = F - (PARTS - 1) * WIDTH
    NARROW: tl.constexpr = (SPAN == 1 and EXTRA == 0) and (COLUMNS > 16 and 2 * REST <= COLUMNS)
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    # Read ahead of the test, though it may mean nothing: four loads at once.
    expert = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    first, end = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
    if tile < tl.load(used_ptr):
        weight = weight_ptr + expert * (2 * F * D)
        column = part * WIDTH
        if (ROWS > 16) & (end - first <= ROWS // 2):
            _up_tiles(
                x_ptr, tokens_ptr, weight, hidden_ptr, x_stride, first, end, column,
                D, F, ROWS // 2 if ROWS > 16 else ROWS, COLUMNS, EXTRA,
                BLOCK, STAGES, SPAN, ROUNDED,
            )  # fmt: skip
        elif NARROW & (part == PARTS - 1):
            _up_tiles(
                x_ptr, tokens_ptr, weight, hidden_ptr, x_stride, first, end, column,
                D, F, ROWS, COLUMNS // 2 if NARROW else COLUMNS, 0, BLOCK, STAGES, SPAN, ROUNDED,
            )  # fmt: skip
        else:
            _up_tiles(
                x_ptr, tokens_ptr, weight, hidden_ptr, x_stride, first, end, column,
                D, F, ROWS, COLUMNS, EXTRA, BLOCK, STAGES, SPAN, ROUNDED,
            )  # fmt: skip


@triton.jit
def _gate_and_up(
    weight_ptr,
    first_column,
    k,
    D: tl.constexpr,
    F: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[BLOCK, 2 COLUMNS] of the weight from input `k` on: gate and up rows, in turns."""
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
    hidden_ptr,
    x_stride,
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
        total = dot_fp32(x, _gate_and_up(weight_ptr, column, k, D, F, COLUMNS, BLOCK), total)
        if EXTRA > 0:
            weight = _gate_and_up(weight_ptr, column + COLUMNS, k, D, F, EXTRA, BLOCK)
            beside = dot_fp32(x, weight, beside)
        if SPAN > 1:
            if step % STEPS == STEPS - 1:
                _store_hidden(hidden_ptr, first, row, end, column, total, F, ROWS, COLUMNS, ROUNDED)
                total = tl.zeros([ROWS, 2 * COLUMNS], tl.float32)
    if EXTRA > 0:  # first, because its registers are needed for the others
        column = first_column + COLUMNS
        _store_hidden(hidden_ptr, first, row, end, column, beside, F, ROWS, EXTRA, ROUNDED)
    if SPAN == 1:
        _store_hidden(hidden_ptr, first, row, end, first_column, total, F, ROWS, COLUMNS, ROUNDED)


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
):
    """Gate and up alternate in the columns of `total`, so both are in the same thread."""
    gate, up = total.reshape(ROWS, COLUMNS, 2).split()
    gate, up = gate.to(tl.bfloat16).to(tl.float32), up.to(tl.bfloat16).to(tl.float32)
    opened = silu_fp32(gate)
    if ROUNDED:
        opened = opened.to(tl.bfloat16).to(tl.float32)
    hidden = (opened * up).to(tl.bfloat16)
    column = first_column + tl.arange(0, COLUMNS)
    stored = (row < end)[:, None] & (column < F)[None, :]
    tile = hidden_ptr + first.to(tl.int64) * F
    offset = (row - first)[:, None] * F + column[None, :]
    tl.store(tile + offset, hidden, mask=stored)


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
