"""y = x W^T for a handful of rows in CuTe DSL: BF16 in and out, FP32 accumulation, one rounding.

    y[m, o] = R(sum over d of x[m, d] W[o, d])

x [M, D], rows evenly spaced; W [O, D] contiguous; y [M, O]. Bytes moved: 2 O D for the weight, and
little else. `optimized.gemv_cute` compiles and launches; the library is imported with this file.

What a thread multiplies of the weight is on its way to registers before the thread waits for the
previous kernel, in pieces of 16 bytes. x goes to shared memory, so that no load of it is put
off until a sum needs it.

M = 1, CUDA cores: `BLOCK` / 8 threads share a row of W, each with every `BLOCK` / 8-th piece of it.
`optimized.gemv_cute_shared` has another kernel for it.

M = 2 to 16, tensor cores: a tile is 16 rows of W times 8 of x, and the warps of a thread block
share out the columns; `BLOCK` of a warp's are in flight, or all that it has. The order of columns
inside a product is free while W's and x's are permuted alike, so that the eight values of a piece,
as they lie, are operands of two instructions.

Partial sums are FP32, added in shared memory. Products of BF16 are exact in FP32.
"""

from typing import Any

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32

from optimized.gemv_engines import CHUNK, PIECE, TILE, TOKENS, few_rows_shared

WORDS = 4  # of 32 bits in a piece of 16 bytes
GLOBAL = cute.AddressSpace.gmem


@cute.jit
def bf16_at(address: Int64):
    return cute.make_ptr(BFloat16, address, GLOBAL, assumed_align=16)


@cute.jit
def read(base: cute.Pointer, element: Any, kept: cute.Tensor):
    """The 16 bytes from `element` of `base` on, BF16, to the four words of `kept`."""
    place = cute.make_ptr(Uint32, base.toint() + element * 2, GLOBAL, assumed_align=16)
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Uint32, num_bits_per_copy=128)
    cute.copy(atom, cute.make_tensor(place, cute.make_layout((WORDS,))), kept)


@cute.jit
def fetch(base: cute.Pointer, element: Any, kept: cute.Tensor):
    """The same to shared memory, on its way while the thread goes on."""
    place = cute.make_ptr(Uint32, base.toint() + element * 2, GLOBAL, assumed_align=16)
    atom = cute.make_copy_atom(cute.nvgpu.cpasync.CopyG2SOp(), Uint32, num_bits_per_copy=128)
    cute.copy(atom, cute.make_tensor(place, cute.make_layout((WORDS,))), kept)


@cute.jit
def words_of(shared: cute.Tensor):
    words = cute.make_rmem_tensor((WORDS,), Uint32)
    cute.autovec_copy(shared, words)
    return words


@cute.jit
def widened(words: cute.Tensor):
    """Four words of two BF16 values each as eight FP32 values, in order."""
    bits = cute.make_rmem_tensor((PIECE,), Uint32)
    for i in cutlass.range_constexpr(WORDS):
        bits[2 * i] = words[i] << 16
        bits[2 * i + 1] = words[i] & Uint32(0xFFFF0000)
    return cute.recast_tensor(bits, Float32).load()


@cute.jit
def fetch_row(
    x: cute.Pointer,
    given: cute.Tensor,
    thread: Int32,
    pieces: cutlass.Constexpr,
    threads: cutlass.Constexpr,
):
    """All pieces of a row to shared memory, by all threads of the block and for all of them."""
    for k in cutlass.range_constexpr(-(-pieces // threads)):
        piece = k * threads + thread
        if piece < pieces:
            fetch(x, piece * PIECE, given[None, piece])
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()


@cute.jit
def store_sums(
    sums: cute.Tensor,
    y: cute.Pointer,
    outputs: Int32,
    ROWS: cutlass.Constexpr,
    BLOCK: cutlass.Constexpr,
    WARPS: cutlass.Constexpr,
):
    """Rounded sums over the threads that share a row, of each thread's `sums`."""
    sharing = BLOCK // PIECE
    together = 32 * WARPS // sharing
    mine = ROWS // together
    thread, _, _ = cute.arch.thread_idx()
    program, _, _ = cute.arch.block_idx()
    slot = thread // sharing
    for i in cutlass.range_constexpr(mine):
        for step in cutlass.range_constexpr(5):
            sums[i] = sums[i] + cute.arch.shuffle_sync_bfly(sums[i], offset=16 >> step)
    out = cute.make_tensor(y, cute.make_layout((outputs,)))
    if cutlass.const_expr(sharing == 32):
        if thread % 32 == 0:
            for i in cutlass.range_constexpr(mine):
                row = program * ROWS + slot + i * together
                if row < outputs:
                    out[row] = sums[i].to(BFloat16)
    else:
        parts = sharing // 32
        shared = cute.arch.alloc_smem(Float32, parts * ROWS, alignment=16)
        partial = cute.make_tensor(shared, cute.make_layout((parts, ROWS)))
        if thread % 32 == 0:
            for i in cutlass.range_constexpr(mine):
                partial[thread % sharing // 32, slot + i * together] = sums[i]
        cute.arch.sync_threads()
        row = program * ROWS + thread
        if thread < ROWS and row < outputs:
            total = Float32(0.0)
            for k in cutlass.range_constexpr(parts):
                total = total + partial[k, thread]
            out[row] = total.to(BFloat16)


@cute.kernel
def gemv_cute_kernel(
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
    column = thread % sharing * PIECE
    slot = thread // sharing
    held = cute.make_rmem_tensor((WORDS, pieces, mine), Uint32)
    for i in cutlass.range_constexpr(mine):
        row = cutlass.min(program * ROWS + slot + i * together, outputs - 1)
        for j in cutlass.range_constexpr(pieces):
            read(w, Int64(row) * D + column + j * BLOCK, held[None, j, i])
    if cutlass.const_expr(PDL):
        cute.arch.griddepcontrol_wait()
    given = cute.make_tensor(
        cute.arch.alloc_smem(Uint32, D // 2, alignment=16), cute.make_layout((WORDS, D // PIECE))
    )
    fetch_row(x, given, thread, D // PIECE, 32 * WARPS)
    sums = cute.make_rmem_tensor((mine,), Float32)
    sums.fill(0.0)
    for j in cutlass.range_constexpr(pieces):
        values = widened(words_of(given[None, thread % sharing + j * sharing]))
        for i in cutlass.range_constexpr(mine):
            weights = widened(held[None, j, i])
            for k in cutlass.range_constexpr(PIECE):
                sums[i] = sums[i] + weights[k] * values[k]
    store_sums(sums, y, outputs, ROWS, BLOCK, WARPS)


@cute.jit
def read_chunk(
    w: cute.Pointer,
    first: Int32,
    outputs: Int32,
    column: Int32,
    D: cutlass.Constexpr,
    chunk: cutlass.Constexpr,
    ahead: cutlass.Constexpr,
    held: cute.Tensor,  # [8, 2 halves of a tile, ahead, tiles]
):
    """A thread's pieces of a chunk of columns: of row `first` and every eighth after it."""
    for i in cutlass.range_constexpr(held.shape[3]):
        for half in cutlass.range_constexpr(2):
            row = cutlass.min(first + i * TILE + half * (TILE // 2), outputs - 1)
            kept = cute.recast_tensor(held[None, half, chunk % ahead, i], Uint32)
            read(w, Int64(row) * D + column + chunk * CHUNK, kept)


@cute.kernel
def few_rows_cute_kernel(
    x: cute.Pointer,
    w: cute.Pointer,
    y: cute.Pointer,
    x_stride: Int32,
    tokens: Int32,
    outputs: Int32,
    D: cutlass.Constexpr,
    ROWS: cutlass.Constexpr,
    WARPS: cutlass.Constexpr,
    BLOCK: cutlass.Constexpr,
    TILES: cutlass.Constexpr,  # of `TOKENS` rows of x
    PDL: cutlass.Constexpr,
):
    if cutlass.const_expr(PDL):
        cute.arch.griddepcontrol_launch_dependents()
    tiles, chunks = ROWS // TILE, D // (CHUNK * WARPS)
    ahead = min(chunks, BLOCK // CHUNK)
    thread, _, _ = cute.arch.thread_idx()
    program, _, _ = cute.arch.block_idx()
    warp, lane = thread // 32, thread % 32
    inner, member = lane // 4, lane % 4  # the row, and which of the four threads on it
    column = warp * (D // WARPS) + member * PIECE
    held = cute.make_rmem_tensor((PIECE, 2, ahead, tiles), BFloat16)
    first = program * ROWS + inner
    for j in cutlass.range_constexpr(ahead):
        read_chunk(w, first, outputs, column, D, j, ahead, held)
    if cutlass.const_expr(PDL):
        cute.arch.griddepcontrol_wait()
    sums = cute.make_rmem_tensor((4, tiles, TILES), Float32)
    sums.fill(0.0)
    atom = cute.make_mma_atom(cute.nvgpu.warp.MmaF16BF16Op(BFloat16, Float32, (TILE, TOKENS, 16)))
    # Each thread fetches what it reads itself, so that it need not wait for another.
    shared = cute.arch.get_dyn_smem(Uint32, alignment=16)
    given = cute.make_tensor(shared, cute.make_layout((WORDS, 32 * WARPS, chunks, TILES)))
    for j in cutlass.range_constexpr(chunks):
        for n in cutlass.range_constexpr(TILES):
            token = cutlass.min(n * TOKENS + inner, tokens - 1)  # sums of more are not kept
            start = Int64(token) * x_stride + column + j * CHUNK
            fetch(x, start, given[None, thread, j, n])
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    # Of the rows r and r + 8 the values 4 s to 4 s + 3 of a piece: pairs, rows, pairs of pairs.
    order = cute.make_layout(((2, 2, 2), 1, 1), stride=((1, PIECE, 2), 0, 0))
    plain = cute.make_layout(((2, 2), 1, 1), stride=((1, 2), 0, 0))
    for j in cutlass.range_constexpr(chunks):
        for n in cutlass.range_constexpr(TILES):
            values = cute.recast_tensor(words_of(given[None, thread, j, n]), BFloat16)
            for i in cutlass.range_constexpr(tiles):
                product = cute.make_tensor(sums[None, i, n].iterator, plain)
                for s in cutlass.range_constexpr(2):
                    a = cute.make_tensor(held[None, None, j % ahead, i].iterator + 4 * s, order)
                    b = cute.make_tensor(values.iterator + 4 * s, plain)
                    cute.gemm(atom, product, a, b, product)
        if cutlass.const_expr(j + ahead < chunks):
            read_chunk(w, first, outputs, column, D, j + ahead, ahead, held)
    width = TILES * TOKENS
    after = cute.recast_ptr(shared + D // 2 * width, dtype=Float32)
    partial = cute.make_tensor(after, cute.make_layout((width, ROWS, WARPS)))
    for i in cutlass.range_constexpr(tiles):
        for n in cutlass.range_constexpr(TILES):
            for k in cutlass.range_constexpr(4):
                row = i * TILE + k // 2 * (TILE // 2) + inner
                partial[n * TOKENS + member * 2 + k % 2, row, warp] = sums[k, i, n]
    cute.arch.sync_threads()
    out = cute.make_tensor(y, cute.make_layout((outputs, tokens)))
    size, threads = ROWS * width, 32 * WARPS
    for k in cutlass.range_constexpr((size + threads - 1) // threads):
        place = k * threads + thread
        row, token = program * ROWS + place % ROWS, place // ROWS
        if place < size and row < outputs and token < tokens:
            total = Float32(0.0)
            for part in cutlass.range_constexpr(WARPS):
                total = total + partial[token, place % ROWS, part]
            out[row, token] = total.to(BFloat16)


@cute.jit
def start_row(
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
    gemv_cute_kernel(
        bf16_at(x), bf16_at(w), bf16_at(y), outputs, D, ROWS, WARPS, BLOCK, PDL
    ).launch(  # pyright: ignore[reportAttributeAccessIssue]
        grid=((outputs + ROWS - 1) // ROWS, 1, 1),
        block=(32 * WARPS, 1, 1),
        stream=stream,
        use_pdl=PDL,
    )


@cute.jit
def start_few_rows(
    x: Int64,
    w: Int64,
    y: Int64,
    outputs: Int32,
    x_stride: Int32,
    tokens: Int32,
    stream: driver.CUstream,
    D: cutlass.Constexpr,
    ROWS: cutlass.Constexpr,
    WARPS: cutlass.Constexpr,
    BLOCK: cutlass.Constexpr,
    TILES: cutlass.Constexpr,
    PDL: cutlass.Constexpr,
):
    few_rows_cute_kernel(
        bf16_at(x),
        bf16_at(w),
        bf16_at(y),
        x_stride,
        tokens,
        outputs,
        D,
        ROWS,
        WARPS,
        BLOCK,
        TILES,
        PDL,
    ).launch(  # pyright: ignore[reportAttributeAccessIssue]
        grid=((outputs + ROWS - 1) // ROWS, 1, 1),
        block=(32 * WARPS, 1, 1),
        smem=few_rows_shared(D, ROWS, WARPS, TILES),
        stream=stream,
        use_pdl=PDL,
    )
