"""The two kernels of `optimized.routed_experts` for one token in CuTe DSL: the chosen experts'
weights come to shared memory by the card's copy engine. The equations and roundings are there.

K experts, D hidden, F feed-forward width. `optimized.experts_cute` compiles and launches; the
library is imported with this file.

Up: all K F rows of hidden are shared out evenly over the programs, consecutive ones to each. A warp
multiplies its share of the columns of every one of a program's rows, x in registers. Its weights
pass through a ring of `STAGES` of its own, a gate row and the up row to it in each, so that warps
do not wait for each other and the ring is full from the first row to the last. The warps' sums are
added, and activated, once at the end.

Down: a program has `ROWS` rows of all K experts, which lie side by side: one copy each, asked for
before the wait for the kernel above. Eight threads share a row of an expert.

Partial sums are FP32. Products of BF16 are exact in FP32.
"""

from typing import Any

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32

from optimized.experts_cute import SHARING, down_shared, up_shared
from optimized.gemv_cute_kernels import GLOBAL, WORDS, bf16_at, read, widened, words_of
from optimized.gemv_engines import PIECE


@cute.jit
def kept_if(words: cute.Tensor, inside: Any):
    """The words, or zeros."""
    mask = cutlass.select_(inside, Uint32(0xFFFFFFFF), Uint32(0))
    for i in cutlass.range_constexpr(WORDS):
        words[i] = words[i] & mask


@cute.jit
def pieces_of(
    place: cute.Pointer,
    member: Int32,
    members: cutlass.Constexpr,
    pieces: cutlass.Constexpr,
    values: cute.Tensor,  # [8, pieces a member] FP32
):
    """Every `members`-th piece of BF16 at `place` from `member` on, widened; zeros past the end."""
    words = cute.make_rmem_tensor((WORDS,), Uint32)
    for j in cutlass.range_constexpr(values.shape[1]):
        piece = member + j * members
        read(place, cutlass.min(piece, pieces - 1) * PIECE, words)
        if cutlass.const_expr((j + 1) * members > pieces):
            kept_if(words, piece < pieces)
        values[None, j].store(widened(words))


@cute.jit
def add_products(
    kept: cute.Tensor,  # [4, pieces] in shared memory
    member: Int32,
    members: cutlass.Constexpr,
    values: cute.Tensor,
    total: Float32,
):
    """`total` and the products of a member's pieces of a row with its `values`."""
    pieces = kept.shape[1]
    for j in cutlass.range_constexpr(values.shape[1]):
        piece = member + j * members
        words = words_of(kept[None, cutlass.min(piece, pieces - 1)])
        if cutlass.const_expr((j + 1) * members > pieces):
            kept_if(words, piece < pieces)
        weights = widened(words)
        for k in cutlass.range_constexpr(PIECE):
            total = total + weights[k] * values[k, j]
    return total


@cute.jit
def copy_to(place: Int64, kept: cute.Pointer, barrier: cute.Pointer, values: cutlass.Constexpr):
    """`values` of BF16 from an address to shared memory; by one thread."""
    copy = cute.nvgpu.cpasync.CopyBulkG2SOp()
    atom = cute.make_copy_atom(copy, Uint32, num_bits_per_copy=16 * values)
    layout = cute.make_layout((values // 2,))
    source = cute.make_ptr(Uint32, place, GLOBAL, assumed_align=16)
    cute.copy(
        atom, cute.make_tensor(source, layout), cute.make_tensor(kept, layout), mbar_ptr=barrier
    )


@cute.jit
def ask(
    w: cute.Pointer,
    line: Int64,  # gate row among the rows of all experts
    warp: Int32,
    kept: cute.Pointer,
    barrier: cute.Pointer,
    D: cutlass.Constexpr,
    F: cutlass.Constexpr,
    WARPS: cutlass.Constexpr,
):
    """A warp's columns of a gate row and of the up row to it; by one thread."""
    columns = D // WARPS
    cute.arch.mbarrier_arrive_and_expect_tx(barrier, 4 * columns)
    for half in cutlass.range_constexpr(2):
        place = w.toint() + ((line + half * F) * D + warp * columns) * 2
        copy_to(place, kept + columns // 2 * half, barrier, columns)


@cute.jit
def activated(gate: Float32, up: Float32):
    """R(silu(gate) up), each of them rounded first. `exp` is CUDA's `expf`, as PyTorch's."""
    gate = gate.to(BFloat16).to(Float32)
    up = up.to(BFloat16).to(Float32)
    opened = gate / (Float32(1.0) + cute.math.exp(-gate))
    return (opened * up).to(BFloat16)


@cute.kernel
def experts_up_cute_kernel(
    x: cute.Pointer,
    experts: cute.Pointer,
    w: cute.Pointer,
    hidden: cute.Pointer,
    K: cutlass.Constexpr,
    D: cutlass.Constexpr,
    F: cutlass.Constexpr,
    WARPS: cutlass.Constexpr,
    STAGES: cutlass.Constexpr,
    PROGRAMS: cutlass.Constexpr,
    PDL: cutlass.Constexpr,
):
    rows, columns = K * F, D // WARPS
    pieces, most = columns // PIECE, -(-rows // PROGRAMS)
    thread, _, _ = cute.arch.thread_idx()
    program, _, _ = cute.arch.block_idx()
    warp, lane = thread // 32, thread % 32
    first = program * rows // PROGRAMS
    count = (program + 1) * rows // PROGRAMS - first
    shared = cute.arch.get_dyn_smem(Uint32, alignment=128)
    ring = shared + warp * (STAGES * columns)  # 2 `columns` of BF16 a stage
    after = shared + WARPS * STAGES * columns
    barriers = cute.recast_ptr(after, dtype=Int64) + warp * STAGES
    place = cute.recast_ptr(after + 2 * WARPS * STAGES, dtype=Float32)
    partial = cute.make_tensor(place, cute.make_layout((2, WARPS, most)))
    if lane == 0:
        for i in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(barriers + i, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_warp()
    if cutlass.const_expr(PDL):
        cute.arch.griddepcontrol_wait()
        # Only now: the next kernel reads what this one has waited for.
        cute.arch.griddepcontrol_launch_dependents()
    chosen = cute.make_tensor(experts, cute.make_layout((K,)))[cutlass.min(lane, K - 1)].to(Int32)
    for i in cutlass.range_constexpr(STAGES):
        row = cutlass.min(first + i, rows - 1)
        expert = cute.arch.shuffle_sync(chosen, row // F)
        if lane == 0 and i < count:
            line = Int64(expert) * (2 * F) + row % F
            ask(w, line, warp, ring + i * columns, barriers + i, D, F, WARPS)
    values = cute.make_rmem_tensor((PIECE, -(-pieces // 32)), Float32)
    start = cute.make_ptr(BFloat16, x.toint() + warp * (2 * columns), GLOBAL, assumed_align=16)
    pieces_of(start, lane, 32, pieces, values)
    for step in cutlass.range(count, unroll=1):
        stage = step % STAGES
        cute.arch.mbarrier_wait(barriers + stage, step // STAGES % 2)
        kept = cute.make_tensor(ring + stage * columns, cute.make_layout((WORDS, pieces, 2)))
        gate = add_products(kept[None, None, 0], lane, 32, values, Float32(0.0))
        up = add_products(kept[None, None, 1], lane, 32, values, Float32(0.0))
        for i in cutlass.range_constexpr(5):
            gate = gate + cute.arch.shuffle_sync_bfly(gate, offset=16 >> i)
            up = up + cute.arch.shuffle_sync_bfly(up, offset=16 >> i)
        cute.arch.sync_warp()  # every thread has read the stage
        row = cutlass.min(first + step + STAGES, rows - 1)
        expert = cute.arch.shuffle_sync(chosen, row // F)
        if lane == 0:
            partial[0, warp, step] = gate
            partial[1, warp, step] = up
            if step + STAGES < count:
                line = Int64(expert) * (2 * F) + row % F
                ask(w, line, warp, ring + stage * columns, barriers + stage, D, F, WARPS)
    cute.arch.sync_threads()
    out = cute.make_tensor(hidden, cute.make_layout((rows,)))
    for t in cutlass.range_constexpr(-(-most // (32 * WARPS))):
        mine = t * 32 * WARPS + thread
        if mine < count:
            gates, ups = Float32(0.0), Float32(0.0)
            for i in cutlass.range_constexpr(WARPS):
                gates = gates + partial[0, i, mine]
                ups = ups + partial[1, i, mine]
            out[first + mine] = activated(gates, ups)


@cute.kernel
def experts_down_cute_kernel(
    hidden: cute.Pointer,
    weights: cute.Pointer,
    experts: cute.Pointer,
    w: cute.Pointer,
    y: cute.Pointer,
    scale: Float32,
    K: cutlass.Constexpr,
    D: cutlass.Constexpr,
    F: cutlass.Constexpr,
    ROWS: cutlass.Constexpr,
    WARPS: cutlass.Constexpr,
    PDL: cutlass.Constexpr,
):
    if cutlass.const_expr(PDL):
        cute.arch.griddepcontrol_launch_dependents()
    together = 32 * WARPS // SHARING // K  # rows of each expert at a time
    pieces = F // PIECE
    thread, _, _ = cute.arch.thread_idx()
    program, _, _ = cute.arch.block_idx()
    member, slot = thread % SHARING, thread // SHARING % K
    inner = thread // SHARING // K
    first = cutlass.min(program * ROWS, D - ROWS)  # the last may make some rows again
    shared = cute.arch.get_dyn_smem(Uint32, alignment=128)
    barrier = cute.recast_ptr(shared + K * ROWS * F // 2, dtype=Int64)
    place = cute.recast_ptr(shared + K * ROWS * F // 2 + 2, dtype=Float32)
    weighted = cute.make_tensor(place, cute.make_layout((K, ROWS)))
    if thread == 0:
        # The choice of experts was done before the kernel above let this one start.
        chosen = cute.make_rmem_tensor((K,), Int64)
        for k in cutlass.range_constexpr(K):
            chosen[k] = cute.make_tensor(experts, cute.make_layout((K,)))[k]
        cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, 2 * K * ROWS * F)
        for k in cutlass.range_constexpr(K):
            start = w.toint() + (chosen[k] * D + first) * (2 * F)
            copy_to(start, shared + ROWS * F // 2 * k, barrier, ROWS * F)
    cute.arch.sync_threads()
    if cutlass.const_expr(PDL):
        cute.arch.griddepcontrol_wait()
    values = cute.make_rmem_tensor((PIECE, -(-pieces // SHARING)), Float32)
    start = cute.make_ptr(BFloat16, hidden.toint() + slot * (2 * F), GLOBAL, assumed_align=16)
    pieces_of(start, member, SHARING, pieces, values)
    share = cute.make_tensor(weights, cute.make_layout((K,)))[slot]
    held = cute.make_tensor(shared, cute.make_layout((WORDS, pieces, ROWS, K)))
    cute.arch.mbarrier_wait(barrier, 0)
    for i in cutlass.range_constexpr(ROWS // together):
        row = inner + i * together
        total = add_products(held[None, None, row, slot], member, SHARING, values, Float32(0.0))
        for step in cutlass.range_constexpr(3):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=SHARING // 2 >> step)
        if member == 0:
            weighted[slot, row] = total.to(BFloat16).to(Float32) * share
    cute.arch.sync_threads()
    out = cute.make_tensor(y, cute.make_layout((D,)))
    if thread < ROWS:
        total = weighted[0, thread]
        for k in cutlass.range_constexpr(1, K):
            total = total + weighted[k, thread]
        out[first + thread] = (total * scale).to(BFloat16)


@cute.jit
def start_up(
    x: Int64,  # addresses
    experts: Int64,
    w: Int64,
    hidden: Int64,
    stream: driver.CUstream,
    K: cutlass.Constexpr,
    D: cutlass.Constexpr,
    F: cutlass.Constexpr,
    WARPS: cutlass.Constexpr,
    STAGES: cutlass.Constexpr,
    PROGRAMS: cutlass.Constexpr,
    PDL: cutlass.Constexpr,
):
    ids = cute.make_ptr(Int64, experts, GLOBAL, assumed_align=8)
    given = bf16_at(x), ids, bf16_at(w), bf16_at(hidden)
    experts_up_cute_kernel(*given, K, D, F, WARPS, STAGES, PROGRAMS, PDL).launch(  # pyright: ignore[reportAttributeAccessIssue]
        grid=(PROGRAMS, 1, 1),
        block=(32 * WARPS, 1, 1),
        smem=up_shared(K * F, D, WARPS, STAGES, PROGRAMS),
        stream=stream,
        use_pdl=PDL,
    )


@cute.jit
def start_down(
    hidden: Int64,
    weights: Int64,
    experts: Int64,
    w: Int64,
    y: Int64,
    scale: Float32,
    stream: driver.CUstream,
    K: cutlass.Constexpr,
    D: cutlass.Constexpr,
    F: cutlass.Constexpr,
    ROWS: cutlass.Constexpr,
    WARPS: cutlass.Constexpr,
    PDL: cutlass.Constexpr,
):
    shares = cute.make_ptr(Float32, weights, GLOBAL, assumed_align=4)
    ids = cute.make_ptr(Int64, experts, GLOBAL, assumed_align=8)
    experts_down_cute_kernel(
        bf16_at(hidden), shares, ids, bf16_at(w), bf16_at(y), scale, K, D, F, ROWS, WARPS, PDL
    ).launch(  # pyright: ignore[reportAttributeAccessIssue]
        grid=((D + ROWS - 1) // ROWS, 1, 1),
        block=(32 * WARPS, 1, 1),
        smem=down_shared(K, F, ROWS),
        stream=stream,
        use_pdl=PDL,
    )
