"""y = x W^T for one row in CuTe DSL, weights held in shared memory; BF16, FP32 sums, one rounding.

x [D], W [O, D] contiguous, y [O]. As `optimized.gemv_cute_kernels` for one row, but the rows of W
come to shared memory by the card's copy engine, a copy and a barrier each, all asked for before
the wait for the previous kernel. A thread needs few registers, so that blocks of this kernel find
room beside those that hold much in registers.
"""

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from optimized.gemv_cute_kernels import (
    GLOBAL,
    WORDS,
    bf16_at,
    fetch_row,
    store_sums,
    widened,
    words_of,
)
from optimized.gemv_engines import PIECE, held_shared


@cute.jit
def copy_rows(
    w: cute.Pointer,
    first: Int32,
    outputs: Int32,
    shared: cute.Pointer,
    barriers: cute.Pointer,
    D: cutlass.Constexpr,
    ROWS: cutlass.Constexpr,
):
    """Rows `first` and on to shared memory; by one thread. Past the last row it is that again."""
    for i in cutlass.range_constexpr(ROWS):
        cute.arch.mbarrier_init(barriers + i, 1)
    cute.arch.mbarrier_init_fence()
    copy = cute.nvgpu.cpasync.CopyBulkG2SOp()
    atom = cute.make_copy_atom(copy, Uint32, num_bits_per_copy=16 * D)
    layout = cute.make_layout((D // 2,))
    for i in cutlass.range_constexpr(ROWS):
        row = cutlass.min(first + i, outputs - 1)
        place = cute.make_ptr(Uint32, w.toint() + Int64(row) * (2 * D), GLOBAL, assumed_align=16)
        kept = cute.make_tensor(shared + D // 2 * i, layout)
        cute.arch.mbarrier_arrive_and_expect_tx(barriers + i, 2 * D)
        cute.copy(atom, cute.make_tensor(place, layout), kept, mbar_ptr=barriers + i)


@cute.kernel
def gemv_cute_shared_kernel(
    x: cute.Pointer,
    w: cute.Pointer,
    y: cute.Pointer,
    outputs: Int32,
    D: cutlass.Constexpr,
    ROWS: cutlass.Constexpr,
    WARPS: cutlass.Constexpr,
    BLOCK: cutlass.Constexpr,
    PDL: cutlass.Constexpr,
):
    if cutlass.const_expr(PDL):
        cute.arch.griddepcontrol_launch_dependents()
    sharing = BLOCK // PIECE  # threads on one row
    together = 32 * WARPS // sharing  # rows at a time
    mine, pieces = ROWS // together, D // BLOCK
    thread, _, _ = cute.arch.thread_idx()
    program, _, _ = cute.arch.block_idx()
    slot = thread // sharing
    shared = cute.arch.get_dyn_smem(Uint32, alignment=128)
    held = cute.make_tensor(shared, cute.make_layout((WORDS, D // PIECE, ROWS)))
    given = cute.make_tensor(shared + D // 2 * ROWS, cute.make_layout((WORDS, D // PIECE)))
    barriers = cute.recast_ptr(shared + D // 2 * (ROWS + 1), dtype=Int64)
    if thread == 0:
        copy_rows(w, program * ROWS, outputs, shared, barriers, D, ROWS)
    if cutlass.const_expr(PDL):
        cute.arch.griddepcontrol_wait()
    fetch_row(x, given, thread, D // PIECE, 32 * WARPS)  # after it all threads see the barriers
    sums = cute.make_rmem_tensor((mine,), Float32)
    sums.fill(0.0)
    for i in cutlass.range_constexpr(mine):
        cute.arch.mbarrier_wait(barriers + (slot + i * together), 0)
    for j in cutlass.range_constexpr(pieces):
        piece = thread % sharing + j * sharing
        values = widened(words_of(given[None, piece]))
        for i in cutlass.range_constexpr(mine):
            weights = widened(words_of(held[None, piece, slot + i * together]))
            for k in cutlass.range_constexpr(PIECE):
                sums[i] = sums[i] + weights[k] * values[k]
    store_sums(sums, y, outputs, ROWS, BLOCK, WARPS)


@cute.jit
def start_row_shared(
    x: Int64,  # addresses
    w: Int64,
    y: Int64,
    outputs: Int32,
    stream: driver.CUstream,
    D: cutlass.Constexpr,
    ROWS: cutlass.Constexpr,
    WARPS: cutlass.Constexpr,
    BLOCK: cutlass.Constexpr,
    PDL: cutlass.Constexpr,
):
    gemv_cute_shared_kernel(
        bf16_at(x), bf16_at(w), bf16_at(y), outputs, D, ROWS, WARPS, BLOCK, PDL
    ).launch(  # pyright: ignore[reportAttributeAccessIssue]
        grid=((outputs + ROWS - 1) // ROWS, 1, 1),
        block=(32 * WARPS, 1, 1),
        smem=held_shared(D, ROWS),
        stream=stream,
        use_pdl=PDL,
    )
