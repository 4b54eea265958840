"""Token-expert pairs sorted by expert: a counting sort, stable.

A stable order has one answer, so these integers equal a stable sort's. Blocks of pairs count their
experts (a histogram in shared memory), the counts are summed up to offsets, and each pair's place
is its expert's start, plus its expert's pairs in earlier blocks, plus those before it in its own. N
tokens, K experts a token, P = N K pairs, E experts. Moves 24 P bytes.

The sorted rows are cut into tiles of one expert each, for grouped matrix products.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.triton_support import OfflineCase, begin, launch, row_stride

PAIRS = 128  # pairs a program; they are compared with each other, PAIRS^2 comparisons
CHUNK = 32  # pairs compared with all others at a time; every thread holds these
SCAN = 1024  # counts that the scan takes at a time
WARPS = 4


class SortedPairs(NamedTuple):
    """int32: `tokens` [P] of the sorted rows, `places` [P] of the pairs among them, `tiles` [T, 3]:
    expert, first row and the expert's end, of which the first `used` [1] are filled."""

    tokens: Tensor
    places: Tensor
    tiles: Tensor
    used: Tensor


@triton.jit
def _experts_of(experts_ptr, pair, pairs, stride, TOP_K: tl.constexpr):
    """The experts of some pairs, -1 beyond the last."""
    index = (pair // TOP_K).to(tl.int64) * stride + pair % TOP_K
    return tl.load(experts_ptr + index, mask=pair < pairs, other=-1).to(tl.int32)


@triton.jit
def count_experts_kernel(
    experts_ptr,
    narrow_ptr,
    counts_ptr,
    pairs,
    stride,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """counts [E, blocks]: how many pairs of each block an expert has; and the pairs' experts in
    int32, in whole blocks, -1 beyond the last."""
    begin(PDL)
    block = tl.program_id(0)
    every = tl.arange(0, EXPERTS)
    pair = block * PAIRS + tl.arange(0, PAIRS)
    expert = _experts_of(experts_ptr, pair, pairs, stride, TOP_K)
    tl.store(narrow_ptr + pair, expert)
    counts = tl.histogram(expert, EXPERTS, mask=pair < pairs)
    tl.store(counts_ptr + every * tl.num_programs(0) + block, counts, mask=every < E)


@triton.jit
def scan_counts_kernel(counts_ptr, totals_ptr, blocks, SCAN: tl.constexpr, PDL: tl.constexpr):
    """An expert's counts become those of the blocks before; their sum goes to totals [E]."""
    begin(PDL)
    expert = tl.program_id(0)
    total = tl.zeros([], tl.int32)
    for first in tl.range(0, blocks, SCAN):  # pyright: ignore[reportGeneralTypeIssues]
        block = first + tl.arange(0, SCAN)
        counts_row = counts_ptr + expert * blocks + block
        counts = tl.load(counts_row, mask=block < blocks, other=0)
        tl.store(counts_row, total + tl.cumsum(counts, axis=0) - counts, mask=block < blocks)
        total += tl.sum(counts, axis=0)
    tl.store(totals_ptr + expert, total)


@triton.jit
def cut_tiles_kernel(
    totals_ptr,
    starts_ptr,
    tiles_ptr,
    used_ptr,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """starts [E]: an expert's first row; and its tiles of up to ROWS rows."""
    begin(PDL)
    expert = tl.program_id(0)
    every = tl.arange(0, EXPERTS)
    totals = tl.load(totals_ptr + every, mask=every < E, other=0)
    before = every < expert
    start = tl.sum(tl.where(before, totals, 0), axis=0)
    mine = tl.sum(tl.where(every == expert, totals, 0), axis=0)
    tile = tl.sum(tl.where(before, (totals + ROWS - 1) // ROWS, 0), axis=0)
    count = (mine + ROWS - 1) // ROWS
    tl.store(starts_ptr + expert, start)
    if expert == E - 1:
        tl.store(used_ptr, tile + count)
    for first in tl.range(0, count, 32):  # pyright: ignore[reportGeneralTypeIssues]
        step = first + tl.arange(0, 32)
        entry = tiles_ptr + (tile + step) * 3
        tl.store(entry, tl.zeros([32], tl.int32) + expert, mask=step < count)
        tl.store(entry + 1, start + step * ROWS, mask=step < count)
        tl.store(entry + 2, tl.zeros([32], tl.int32) + start + mine, mask=step < count)


@triton.jit
def place_pairs_kernel(
    narrow_ptr,
    counts_ptr,
    starts_ptr,
    tokens_ptr,
    places_ptr,
    pairs,
    TOP_K: tl.constexpr,
    PAIRS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    block = tl.program_id(0)
    pair = block * PAIRS + tl.arange(0, PAIRS)
    expert = tl.load(narrow_ptr + pair)
    step = tl.arange(0, PAIRS)
    start_key = (expert * PAIRS)[None, :]
    earlier = tl.zeros([CHUNK, PAIRS], tl.int32)
    for first in tl.range(0, PAIRS, CHUNK):  # pyright: ignore[reportGeneralTypeIssues]
        other = first + tl.arange(0, CHUNK)
        theirs = tl.load(narrow_ptr + block * PAIRS + other)
        # Of the same expert and before: 0 <= their key - this expert's first < this place.
        distance = (theirs * PAIRS + other)[:, None] - start_key
        earlier += (distance.to(tl.uint32, bitcast=True) < step.to(tl.uint32)[None, :]).to(tl.int32)
    rank = tl.sum(earlier, axis=0)
    inside = pair < pairs
    start = tl.load(starts_ptr + expert, mask=inside, other=0)
    earlier_blocks = counts_ptr + expert * tl.num_programs(0) + block
    place = start + tl.load(earlier_blocks, mask=inside, other=0) + rank
    tl.store(places_ptr + pair, place, mask=inside)
    tl.store(tokens_ptr + place, pair // TOP_K, mask=inside)


def sort_pairs(experts: Tensor, count: int, rows: int) -> SortedPairs:
    """experts [N, K] int64 below `count` -> the pairs in their stable order, in tiles of `rows`."""
    pairs, top_k = experts.numel(), experts.shape[1]
    stride = row_stride(experts)
    if stride is None:
        experts, stride = experts.contiguous(), top_k
    blocks = triton.cdiv(pairs, PAIRS)
    most = pairs // rows + min(pairs, count)  # tiles

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=experts.device)

    counts, totals, starts = empty(count, blocks), empty(count), empty(count)
    narrow = empty(blocks * PAIRS)
    found = SortedPairs(
        tokens=empty(pairs), places=empty(pairs), tiles=empty(most, 3), used=empty(1)
    )
    bound: dict[str, Any] = {"E": count, "EXPERTS": max(2, triton.next_power_of_2(count))}
    block: dict[str, Any] = {"TOP_K": top_k, "PAIRS": PAIRS}
    launch(
        count_experts_kernel,
        (blocks,),
        experts,
        narrow,
        counts,
        pairs,
        stride,
        **bound,
        **block,
        num_warps=WARPS,
    )
    launch(scan_counts_kernel, (count,), counts, totals, blocks, SCAN=SCAN, num_warps=WARPS)
    tiles = found.tiles, found.used
    launch(cut_tiles_kernel, (count,), totals, starts, *tiles, **bound, ROWS=rows, num_warps=1)
    launch(
        place_pairs_kernel,
        (blocks,),
        narrow,
        counts,
        starts,
        found.tokens,
        found.places,
        pairs,
        **block,
        CHUNK=CHUNK,
        num_warps=WARPS,
    )
    return found


def offline_cases() -> list[OfflineCase]:
    """Beam's top-8 of 256 experts."""
    block = {"TOP_K": 8, "PAIRS": PAIRS}
    bound = {"E": 256, "EXPERTS": 256}
    values: dict[Any, dict[str, int]] = {
        count_experts_kernel: {**block, **bound},
        scan_counts_kernel: {"SCAN": SCAN},
        cut_tiles_kernel: {**bound, "ROWS": 128},
        place_pairs_kernel: {**block, "CHUNK": CHUNK},
    }
    cases = []
    for kernel, constants in values.items():
        kinds = {"experts_ptr": "*i64", "pairs": "i32:16", "stride": "i32", "blocks": "i32:16"}
        kinds |= dict.fromkeys(constants, "constexpr")
        names = [name for name in kernel.arg_names if name != "PDL"]
        signature = {name: kinds.get(name, "*i32") for name in names}
        warps = 1 if kernel is cut_tiles_kernel else WARPS
        cases.append(OfflineCase(kernel, signature, constants, warps))
    return cases
