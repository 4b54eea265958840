"""The router's logits for many tokens: an FP32 weight on tensor cores that multiply BF16.

    logits = float(x) W^T        FP32

x is BF16 already. Each FP32 weight is the exact sum of three BF16 terms, a product of two BF16
values is exact in FP32, so three products on tensor cores lose nothing that one in FP32 keeps. Only
sums round. Tensor cores cut off what a sum's largest term does not reach, always towards zero, so
sums over `block` columns are made there, smallest terms first, and added up outside, to nearest.
N tokens, D hidden, E experts; 6 N D E operations, 129 GFLOP for 16384 x 5120 x 256, 0.16 ms at an
H200's 793 TFLOP/s (2026-11-29), where FP32 units need 0.64. The terms are made in each call (13 MB
moved, 3 us), so that no copy of a weight can be stale.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.change import KnobValue
from optimized.triton_support import OfflineCase, begin, dot_fp32, launch

PROGRAMS = 132  # SMs of an H200
MAX_SPLITS = 16
MAX_SHARED = 220_000  # bytes of shared memory that staged tiles may take
SPLIT_BLOCK = 1024  # weights a program cuts into terms
SPLIT_WARPS = 4


@dataclass(frozen=True, kw_only=True)
class MatmulKnobs:
    """`row_tile` tokens and `columns` of experts a program, the `block` of D it takes at a time,
    the `splits` of D between programs, `stages` of its loads, `warps`."""

    row_tile: int
    columns: int
    block: int
    splits: int
    stages: int
    warps: int

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "MatmulKnobs":
        block = max(16, min(64, triton.next_power_of_2(shape["D"])))
        tile, columns = (128, 128) if shape["N"] >= 8192 else (64, 64)
        columns = max(16, min(columns, triton.next_power_of_2(shape["E"])))
        programs = triton.cdiv(shape["N"], tile) * triton.cdiv(shape["E"], columns)
        splits = 1
        while 2 * splits * programs <= PROGRAMS and splits < MAX_SPLITS:
            splits *= 2
        return cls(
            row_tile=tile,
            columns=columns,
            block=block,
            splits=min(splits, triton.cdiv(shape["D"], block)),
            stages=3,
            warps=8 if tile == 128 else 4,
        )

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        return {
            "row_tile": (64, 128, 256),
            "columns": (64, 128, 256),
            "block": (32, 64, 128),
            "splits": (1, 2, 4, 8, 16),
            "stages": (2, 3, 4),
            "warps": (4, 8),
        }

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        sums = self.row_tile * self.columns
        return (
            self.splits <= triton.cdiv(shape["D"], self.block)
            and 2 * (self.row_tile + 3 * self.columns) * self.block * self.stages <= MAX_SHARED
            and sums <= 2048 * self.warps  # 64 a thread, twice
        )


@triton.jit
def split_weight_kernel(weight_ptr, terms_ptr, elements, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """terms [3, E, D] BF16, the smallest first: their sum is weight [E, D] FP32."""
    begin(PDL)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < elements
    rest = tl.load(weight_ptr + index, mask=inside, other=0.0)
    for term in tl.static_range(3):  # pyright: ignore[reportGeneralTypeIssues]
        part = rest.to(tl.bfloat16)
        tl.store(terms_ptr + (2 - term) * elements + index, part, mask=inside)
        rest = rest - part.to(tl.float32)


@triton.jit
def router_matmul_kernel(
    x_ptr,
    terms_ptr,
    logits_ptr,
    x_stride,
    count,
    D: tl.constexpr,
    E: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    PARTS: tl.constexpr = (E + COLUMNS - 1) // COLUMNS
    row = tl.program_id(0) // PARTS * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(1)
    depth = tl.arange(0, BLOCK)
    # Rows and columns beyond the last are computed on real values and not stored.
    x_row = tl.minimum(row, count - 1).to(tl.int64)
    x_tile = x_ptr + x_row[:, None] * x_stride + depth[None, :]
    terms_tile = terms_ptr + tl.minimum(column, E - 1)[None, :] * D + depth[:, None]
    start, end = split * SPAN, tl.minimum((split + 1) * SPAN, D)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in tl.range(start, end, BLOCK, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        if D % BLOCK == 0:
            x = tl.load(x_tile + k)
            low = tl.load(terms_tile + k)
            middle = tl.load(terms_tile + E * D + k)
            high = tl.load(terms_tile + 2 * E * D + k)
        else:
            inside = k + depth < D
            x = tl.load(x_tile + k, mask=inside[None, :], other=0.0)
            low = tl.load(terms_tile + k, mask=inside[:, None], other=0.0)
            middle = tl.load(terms_tile + E * D + k, mask=inside[:, None], other=0.0)
            high = tl.load(terms_tile + 2 * E * D + k, mask=inside[:, None], other=0.0)
        part = dot_fp32(x, low, tl.zeros([ROWS, COLUMNS], tl.float32))
        part = dot_fp32(x, middle, part)
        total += dot_fp32(x, high, part)
    out = logits_ptr + (split * count + row).to(tl.int64)[:, None] * E + column[None, :]
    tl.store(out, total, mask=(row < count)[:, None] & (column < E)[None, :])


def router_logits(x: Tensor, weight: Tensor, knobs: MatmulKnobs | None) -> Tensor:
    """x [N, D] BF16 with contiguous rows, weight [E, D] FP32 -> [splits, N, E] FP32, whose sum over
    the splits are the logits. N may not be 0."""
    tokens, width = x.shape
    count = len(weight)
    chosen = knobs or MatmulKnobs.heuristic({"N": tokens, "D": width, "E": count})
    span = triton.cdiv(triton.cdiv(width, chosen.block), chosen.splits) * chosen.block
    splits = triton.cdiv(width, span)
    terms = torch.empty((3, count, width), dtype=x.dtype, device=x.device)
    logits = torch.empty((splits, tokens, count), device=x.device)
    elements = weight.numel()
    launch(
        split_weight_kernel,
        (triton.cdiv(elements, SPLIT_BLOCK),),
        weight,
        terms,
        elements,
        BLOCK=SPLIT_BLOCK,
        num_warps=SPLIT_WARPS,
    )
    tiles = triton.cdiv(tokens, chosen.row_tile) * triton.cdiv(count, chosen.columns)
    launch(
        router_matmul_kernel,
        (tiles, splits),
        x,
        terms,
        logits,
        x.stride(0),
        tokens,
        D=width,
        E=count,
        SPAN=span,
        ROWS=chosen.row_tile,
        COLUMNS=chosen.columns,
        BLOCK=chosen.block,
        STAGES=chosen.stages,
        num_warps=chosen.warps,
    )
    return logits


def offline_cases() -> list[OfflineCase]:
    """Beam's 256 experts: a prefill of 16384 tokens, a decode of 128."""
    signature = {"weight_ptr": "*fp32", "terms_ptr": "*bf16", "elements": "i32:16"}
    split = {**signature, "BLOCK": "constexpr"}
    cases = [OfflineCase(split_weight_kernel, split, {"BLOCK": SPLIT_BLOCK}, SPLIT_WARPS)]
    signature = {"x_ptr": "*bf16", "terms_ptr": "*bf16", "logits_ptr": "*fp32"}
    signature |= {"x_stride": "i32:16", "count": "i32:16"}
    for tokens in (16384, 128):
        knobs = MatmulKnobs.heuristic({"N": tokens, "D": 5120, "E": 256})
        values: dict[str, Any] = {"D": 5120, "E": 256, "SPAN": 5120 // knobs.splits}
        values |= {"ROWS": knobs.row_tile, "COLUMNS": knobs.columns}
        values |= {"BLOCK": knobs.block, "STAGES": knobs.stages}
        kinds = {**signature, **dict.fromkeys(values, "constexpr")}
        cases.append(OfflineCase(router_matmul_kernel, kinds, values, knobs.warps))
    return cases
