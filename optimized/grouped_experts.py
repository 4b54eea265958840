"""The routed SwiGLU experts of many tokens: two grouped matrix products over sorted pairs.

    gate, up = R(W_gate x), R(W_up x)      of each pair's token and expert
    hidden   = R(silu(gate) * up)
    y        = R(W_down hidden)            [P, D], in the sorted order

R rounds to BF16; sums are FP32, on tensor cores. N tokens, K experts a token, P = N K pairs, E
experts, D hidden, F feed-forward width. All rounding points are kept; none is added.

The rows of x are read where they are, through the sorted pairs' tokens. Gate and up rows of the
weight alternate in a tile, so that both values of an output are neighbours in one thread and SwiGLU
needs no exchange. 6 P D F operations: 1.29 TFLOP for 16384 tokens of a TP8 rank of Beam (K = 8, D =
5120, F = 320), 1.6 ms at an H200's 793 TFLOP/s (2026-11-29). Tiles are of one expert, so its last
one is partly empty; the half-empty ones are computed by halves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.change import KnobValue
from optimized.expert_sort import SortedPairs, sort_pairs
from optimized.triton_support import OfflineCase, begin, dot_fp32, launch, silu_fp32

MAX_SHARED = 220_000  # bytes of shared memory that staged tiles may take
MIN_COLUMNS = 16  # of a tensor core's product


@dataclass(frozen=True, kw_only=True)
class GroupedKnobs:
    """`row_tile` pairs a program. Per product: its `columns`, the `block` of the sum at a time,
    `stages` of its loads, `warps`. The first computes gate and up of its columns."""

    row_tile: int
    up_columns: int
    up_block: int
    up_stages: int
    up_warps: int
    down_columns: int
    down_block: int
    down_stages: int
    down_warps: int

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "GroupedKnobs":
        an_expert = shape["P"] // shape["E"]
        up = min(128, _power(shape["F"]))
        down = min(256, _power(shape["D"]))
        up_block, down_block = (min(64, _power(shape[name])) for name in ("D", "F"))
        if an_expert >= 192:
            return cls(
                row_tile=128,
                up_columns=up,
                up_block=up_block,
                up_stages=4,
                up_warps=8,
                down_columns=down,
                down_block=down_block,
                down_stages=3,
                down_warps=8,
            )
        row_tile = min(64, max(16, triton.next_power_of_2(an_expert)))
        return cls(
            row_tile=row_tile,
            up_columns=min(32, up),
            up_block=min(128, _power(shape["D"])),
            up_stages=4,
            up_warps=4,
            down_columns=min(64, down),
            down_block=down_block,
            down_stages=4,
            down_warps=4,
        )

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        return {
            "row_tile": (16, 32, 64, 128),
            "up_columns": (32, 64, 128),
            "up_block": (32, 64, 128),
            "up_stages": (2, 3, 4, 5),
            "up_warps": (4, 8),
            "down_columns": (64, 128, 256),
            "down_block": (32, 64, 128),
            "down_stages": (2, 3, 4),
            "down_warps": (4, 8),
        }

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        products = (
            (2 * self.up_columns, self.up_block, self.up_stages, self.up_warps, shape["D"]),
            (self.down_columns, self.down_block, self.down_stages, self.down_warps, shape["F"]),
        )
        return all(
            columns >= MIN_COLUMNS
            and MIN_COLUMNS <= block < 2 * max(MIN_COLUMNS, depth)
            and 2 * (self.row_tile + columns) * block * stages <= MAX_SHARED
            and self.row_tile * columns <= 4096 * warps  # 128 sums a thread
            for columns, block, stages, warps, depth in products
        )


def _power(width: int) -> int:
    """The smallest power of two that covers `width` and that a tensor core takes."""
    return max(MIN_COLUMNS, triton.next_power_of_2(width))


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
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    PARTS: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    REST: tl.constexpr = F - (PARTS - 1) * COLUMNS
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    if tile < tl.load(used_ptr):
        expert = tl.load(tiles_ptr + tile * 3).to(tl.int64)
        first, end = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
        weight = weight_ptr + expert * (2 * F * D)
        column = part * COLUMNS
        if (ROWS > 16) & (end - first <= ROWS // 2):
            _up_tile(
                x_ptr, tokens_ptr, weight, hidden_ptr, x_stride, first, end, column,
                D, F, ROWS // 2 if ROWS > 16 else ROWS, COLUMNS, BLOCK, STAGES,
            )  # fmt: skip
        elif (2 * REST <= COLUMNS) & (COLUMNS > 16) & (part == PARTS - 1):
            _up_tile(
                x_ptr, tokens_ptr, weight, hidden_ptr, x_stride, first, end, column,
                D, F, ROWS, COLUMNS // 2 if COLUMNS > 16 else COLUMNS, BLOCK, STAGES,
            )  # fmt: skip
        else:
            _up_tile(
                x_ptr, tokens_ptr, weight, hidden_ptr, x_stride, first, end, column,
                D, F, ROWS, COLUMNS, BLOCK, STAGES,
            )  # fmt: skip


@triton.jit
def _up_tile(
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
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = first + tl.arange(0, ROWS)
    # Rows beyond the end are computed on real values and not stored, so no load needs a mask.
    token = tl.load(tokens_ptr + tl.minimum(row, end - 1)).to(tl.int64)
    both = tl.arange(0, 2 * COLUMNS)
    weight_row = tl.minimum(first_column + both // 2, F - 1) + both % 2 * F
    depth = tl.arange(0, BLOCK)
    x_tile = x_ptr + token[:, None] * x_stride + depth[None, :]
    weight_tile = weight_ptr + weight_row[None, :] * D + depth[:, None]
    total = tl.zeros([ROWS, 2 * COLUMNS], tl.float32)
    for k in tl.range(0, D, BLOCK, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        if D % BLOCK == 0:
            x = tl.load(x_tile + k)
            weight = tl.load(weight_tile + k)
        else:
            inside = k + depth < D
            x = tl.load(x_tile + k, mask=inside[None, :], other=0.0)
            weight = tl.load(weight_tile + k, mask=inside[:, None], other=0.0)
        total = dot_fp32(x, weight, total)
    gate, up = total.reshape(ROWS, COLUMNS, 2).split()
    gate, up = gate.to(tl.bfloat16).to(tl.float32), up.to(tl.bfloat16).to(tl.float32)
    hidden = (silu_fp32(gate) * up).to(tl.bfloat16)
    column = first_column + tl.arange(0, COLUMNS)
    stored = (row < end)[:, None] & (column < F)[None, :]
    tl.store(hidden_ptr + row.to(tl.int64)[:, None] * F + column[None, :], hidden, mask=stored)


@triton.jit
def grouped_down_kernel(
    hidden_ptr,
    tiles_ptr,
    used_ptr,
    weight_ptr,
    y_ptr,
    D: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    PARTS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // PARTS
    column = tl.program_id(0) % PARTS * COLUMNS
    if tile < tl.load(used_ptr):
        expert = tl.load(tiles_ptr + tile * 3).to(tl.int64)
        first, end = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
        weight = weight_ptr + expert * (D * F)
        if (ROWS > 16) & (end - first <= ROWS // 2):
            _down_tile(
                hidden_ptr, weight, y_ptr, first, end, column,
                D, F, ROWS // 2 if ROWS > 16 else ROWS, COLUMNS, BLOCK, STAGES,
            )  # fmt: skip
        else:
            _down_tile(
                hidden_ptr, weight, y_ptr, first, end, column, D, F, ROWS, COLUMNS, BLOCK, STAGES
            )


@triton.jit
def _down_tile(
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
):
    row = first + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    depth = tl.arange(0, BLOCK)
    hidden_row = tl.minimum(row, end - 1).to(tl.int64)
    hidden_tile = hidden_ptr + hidden_row[:, None] * F + depth[None, :]
    weight_tile = weight_ptr + tl.minimum(column, D - 1)[None, :] * F + depth[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in tl.range(0, F, BLOCK, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        if F % BLOCK == 0:
            hidden = tl.load(hidden_tile + k)
            weight = tl.load(weight_tile + k)
        else:
            inside = k + depth < F
            hidden = tl.load(hidden_tile + k, mask=inside[None, :], other=0.0)
            weight = tl.load(weight_tile + k, mask=inside[:, None], other=0.0)
        total = dot_fp32(hidden, weight, total)
    stored = (row < end)[:, None] & (column < D)[None, :]
    y = y_ptr + row.to(tl.int64)[:, None] * D + column[None, :]
    tl.store(y, total.to(tl.bfloat16), mask=stored)


def up_product(node: Any, x: Tensor, order: SortedPairs, knobs: GroupedKnobs) -> Tensor:
    """x [N, D] BF16 with contiguous rows -> every pair's hidden values [P, F] BF16, sorted."""
    width, inner = node.down_proj.shape[1:]
    hidden = torch.empty((len(order.tokens), inner), dtype=x.dtype, device=x.device)
    launch(
        grouped_up_kernel,
        (len(order.tiles) * triton.cdiv(inner, knobs.up_columns),),
        x,
        order.tokens,
        order.tiles,
        order.used,
        node.gate_up_proj,
        hidden,
        x.stride(0),
        D=width,
        F=inner,
        ROWS=knobs.row_tile,
        COLUMNS=knobs.up_columns,
        BLOCK=knobs.up_block,
        STAGES=knobs.up_stages,
        num_warps=knobs.up_warps,
    )
    return hidden


def down_product(node: Any, hidden: Tensor, order: SortedPairs, knobs: GroupedKnobs) -> Tensor:
    """hidden [P, F] BF16, sorted -> every pair's output [P, D] BF16, sorted."""
    width, inner = node.down_proj.shape[1:]
    y = torch.empty((len(hidden), width), dtype=hidden.dtype, device=hidden.device)
    launch(
        grouped_down_kernel,
        (len(order.tiles) * triton.cdiv(width, knobs.down_columns),),
        hidden,
        order.tiles,
        order.used,
        node.down_proj,
        y,
        D=width,
        F=inner,
        ROWS=knobs.row_tile,
        COLUMNS=knobs.down_columns,
        BLOCK=knobs.down_block,
        STAGES=knobs.down_stages,
        num_warps=knobs.down_warps,
    )
    return y


def grouped_experts(
    node: Any, x: Tensor, experts: Tensor, knobs: GroupedKnobs | None
) -> tuple[Tensor, SortedPairs]:
    """x [N, D] BF16 with contiguous rows, experts [N, K] int64 -> every pair's output [P, D] BF16
    in the sorted order, and that order. P may not be 0."""
    count, width, inner = node.down_proj.shape
    sizes = {"P": experts.numel(), "E": count, "D": width, "F": inner}
    chosen = knobs or GroupedKnobs.heuristic(sizes)
    order = sort_pairs(experts, count, chosen.row_tile)
    return down_product(node, up_product(node, x, order, chosen), order, chosen), order


def offline_cases() -> list[OfflineCase]:
    """A TP8 rank of Beam: a prefill of 16384 tokens, a decode of 128."""
    pointers = {f"{name}_ptr": "*bf16" for name in ("x", "weight", "hidden", "y")}
    pointers |= {f"{name}_ptr": "*i32" for name in ("tokens", "tiles", "used")}
    cases = []
    for pairs in (131072, 1024):
        knobs = GroupedKnobs.heuristic({"P": pairs, "E": 256, "D": 5120, "F": 320})
        for kernel, part in ((grouped_up_kernel, "up"), (grouped_down_kernel, "down")):
            values = {"D": 5120, "F": 320, "ROWS": knobs.row_tile}
            for name in ("columns", "block", "stages"):
                values[name.upper()] = getattr(knobs, f"{part}_{name}")
            kinds = {**pointers, "x_stride": "i32:16", **dict.fromkeys(values, "constexpr")}
            signature = {name: kinds[name] for name in kernel.arg_names if name != "PDL"}
            warps = getattr(knobs, f"{part}_warps")
            cases.append(OfflineCase(kernel, signature, values, warps))
    return cases
