"""Down projections of the chosen experts and their weighted sum, for few pairs; used by
`routed_experts`, whose docstring has the equations.

K slots of a token, D hidden, F feed-forward width. A thread with some columns of all slots needs
as many inputs as it has weights, for which no registers are left: they come a few at a time from
the L2 cache. With the slots across the threads, a thread has several rows of one slot, and few
inputs, all asked for at once. Both kernels add in the same order and give the same bits.
"""

import triton
import triton.language as tl

from optimized.triton_support import let_next_start, previous_is_done


@triton.jit
def experts_down_kernel(
    hidden_ptr,
    weights_ptr,
    experts_ptr,
    weight_ptr,
    out_ptr,
    weights_stride,
    scale,
    TOP_K: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    PIECES: tl.constexpr = (F + BLOCK - 1) // BLOCK
    held = ()
    for i in tl.static_range(0, HELD * PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        # The choice of experts was done before `experts_up_kernel` let this kernel start.
        expert = tl.load(experts_ptr + token * TOP_K + i // PIECES)
        held = held + (_piece(weight_ptr, expert, row, (i % PIECES) * BLOCK, D, F, BLOCK),)
    previous_is_done(PDL)
    total = tl.zeros([ROWS], tl.float32)
    for slot in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        pair = token * TOP_K + slot
        expert = tl.load(experts_ptr + pair)
        sums = tl.zeros([ROWS, BLOCK], tl.float32)
        for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
            if slot < HELD:
                weight = held[slot * PIECES + i]
            else:
                weight = _piece(weight_ptr, expert, row, i * BLOCK, D, F, BLOCK)
            column = i * BLOCK + tl.arange(0, BLOCK)[None, :]
            x = tl.load(hidden_ptr + pair * F + column, mask=column < F, other=0.0).to(tl.float32)
            wide = weight.to(tl.float32)  # pyright: ignore[reportAttributeAccessIssue]
            sums = tl.fma(wide, x.broadcast_to(ROWS, BLOCK), sums)
        y = tl.sum(sums, axis=1).to(tl.bfloat16).to(tl.float32)
        weighted = y * tl.load(weights_ptr + token * weights_stride + slot)
        total = weighted if slot == 0 else total + weighted
    tl.store(out_ptr + token * D + row, (total * scale).to(tl.bfloat16), mask=row < D)


@triton.jit
def _piece(weight_ptr, expert, row, first, D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr):
    """Columns `first` and on of some rows of an expert's matrix [D, F]."""
    column = first + tl.arange(0, BLOCK)[None, :]
    inside = (row < D)[:, None] & (column < F)
    place = weight_ptr + expert * (D * F) + row[:, None] * F + column
    return tl.load(place, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _columns(
    lines_ptr,
    present,
    i: tl.constexpr,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    ONCE: tl.constexpr = False,  # pyright: ignore[reportArgumentType]
):
    """Piece `i` of some lines [LINES, 1], of those that are `present`; what is read `ONCE` is first
    to leave the caches."""
    column = i * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = present if (i + 1) * BLOCK <= F else present & (column < F)
    if ONCE:
        return tl.load(lines_ptr + column, mask=inside, other=0.0, eviction_policy="evict_first")
    return tl.load(lines_ptr + column, mask=inside, other=0.0)


@triton.jit
def _in_slots(values, ROWS: tl.constexpr, SLOTS: tl.constexpr):
    """The columns of [ROWS, SLOTS], each [ROWS, 1], as a tuple."""
    parts = (values,)
    for n in tl.static_range(1, SLOTS):  # pyright: ignore[reportGeneralTypeIssues]
        if n & (n - 1) == 0:
            halves = ()
            for i in tl.static_range(n):  # pyright: ignore[reportGeneralTypeIssues]
                pairs = tl.permute(tl.reshape(parts[i], [ROWS, 2, SLOTS // (2 * n)]), [0, 2, 1])
                first, second = tl.split(pairs)
                halves = halves + (first, second)
            parts = halves
    return parts


@triton.jit
def _ask_for_rest(lines_ptr, F: tl.constexpr, FIRST: tl.constexpr, PDL: tl.constexpr):
    """Let the columns from `FIRST` on of some lines [LINES, 1] come to the L2 cache."""
    if PDL:
        for first in tl.static_range(FIRST, F, 128):  # pyright: ignore[reportGeneralTypeIssues]
            sector = tl.minimum(first + tl.arange(0, 8)[None, :] * 16, F - 1)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [(lines_ptr + sector).to(tl.int64)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def experts_down_across_kernel(
    hidden_ptr,
    weights_ptr,
    experts_ptr,
    weight_ptr,
    out_ptr,
    weights_stride,
    scale,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile has a line for each of `ROWS` rows and `SLOTS` slots, the slots of a row one after the
    other; the first `HELD` pieces of F are loaded before the previous kernel is done, and what is
    left is on its way to the L2 cache."""
    let_next_start(PDL)
    PIECES: tl.constexpr = (F + BLOCK - 1) // BLOCK
    token = tl.program_id(0).to(tl.int64)
    line = tl.arange(0, ROWS * SLOTS)[:, None]
    row, slot = tl.program_id(1) * ROWS + line // SLOTS, line % SLOTS
    chosen = slot < TOP_K
    # The choice of experts was done before the first kernel let this one start.
    expert = tl.load(experts_ptr + token * TOP_K + slot, mask=chosen, other=0)
    present = chosen & (row < D)
    if D % ROWS:  # nothing beyond the matrix is asked for
        row = tl.minimum(row, D - 1)
    lines_ptr = weight_ptr + expert * (D * F) + row * F
    if HELD < PIECES:
        _ask_for_rest(lines_ptr, F, HELD * BLOCK, PDL)
    held = ()
    for i in tl.static_range(HELD):  # pyright: ignore[reportGeneralTypeIssues]
        held = held + (_columns(lines_ptr, present, i, F, BLOCK, True),)
    previous_is_done(PDL)
    inputs_ptr = hidden_ptr + (token * TOP_K + slot) * F
    inputs = ()
    for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        inputs = inputs + (_columns(inputs_ptr, chosen, i, F, BLOCK),)
    sums = tl.zeros([ROWS * SLOTS, BLOCK], tl.float32)
    for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        if i < HELD:
            weight = held[i]
        else:
            weight = _columns(lines_ptr, present, i, F, BLOCK, True)
        wide = weight.to(tl.float32)  # pyright: ignore[reportAttributeAccessIssue]
        sums = tl.fma(wide, inputs[i].to(tl.float32), sums)
    share = tl.load(weights_ptr + token * weights_stride + slot, mask=chosen, other=0.0)
    y = tl.sum(sums, axis=1, keep_dims=True).to(tl.bfloat16).to(tl.float32) * share
    parts = _in_slots(tl.reshape(y, [ROWS, SLOTS]), ROWS, SLOTS)
    total = parts[0]
    for i in tl.static_range(1, TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        total += parts[i]
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    total = (total * scale).to(tl.bfloat16)
    tl.store(out_ptr + token * D + rows, total, mask=rows < D)
