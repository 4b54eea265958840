"""A norm of whole rows in one kernel; see `optimized.norms` for the ways in which a weight enters.

x [..., D] -> [..., D], BF16. N rows; a program holds whole rows in registers, so that each value
crosses memory once: 2 D BF16 values a row. All rounding points are kept; none is added.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.change import KnobValue
from optimized.norms import norm_factor, scaled_input
from optimized.triton_support import (
    OfflineCase,
    launch,
    let_next_start,
    previous_is_done,
    row_stride,
)

MAX_WIDTH = 16384  # a row has to fit into the registers of one thread block
FEW_ROWS = 256  # fewer thread blocks than two per SM of an H200: latency counts


@dataclass(frozen=True, kw_only=True)
class RowNormKnobs:
    """`warps` of a thread block and the `rows` it works through."""

    warps: int
    rows: int

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "RowNormKnobs":
        most = max(1, triton.next_power_of_2(shape["D"]) // 256)  # a 16-byte load for each thread
        few = shape["N"] <= FEW_ROWS
        return cls(warps=min(16 if few else 8, most), rows=1 if few else 4)

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        return {
            "warps": (4, 8, 16, 32),
            "rows": (1,) if shape["N"] <= FEW_ROWS else (1, 2, 4, 8),
        }

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        width = triton.next_power_of_2(shape["D"])
        return (self.warps == 1 or width >= 32 * self.warps) and width <= 2048 * self.warps


@triton.jit
def row_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    count,
    eps,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    """`KIND` is "weighted", "centred", "input_scaled" or "unit"."""
    let_next_start(PDL)
    column = tl.arange(0, WIDTH)
    inside = column < D
    if KIND != "unit":
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    previous_is_done(PDL)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for row in range(first, tl.minimum(first + ROWS, count)):
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        if KIND == "input_scaled":
            x = scaled_input(x, weight)
        y = x * tl.rsqrt(tl.sum(x * x, axis=0) * (1.0 / D) + eps)
        if (KIND == "weighted") or (KIND == "centred"):
            y = y * norm_factor(weight, KIND == "centred")
        tl.store(out_ptr + row * D + column, y.to(tl.bfloat16), mask=inside)


def outside_norm(width: int, weight: Tensor) -> str | None:
    """Why the kernel cannot norm rows of `width` by `weight` [D], or None."""
    if weight.shape != (width,) or not weight.is_contiguous():
        return f"the norm's weight is {tuple(weight.shape)}, no contiguous one of {width}"
    if not 0 < width <= MAX_WIDTH:
        return f"rows have width {width}, the kernel takes 1 to {MAX_WIDTH}"
    return None


def row_norm(
    x: Tensor, weight: Tensor | None, eps: float, kind: str, knobs: RowNormKnobs | None = None
) -> Tensor:
    """x [..., D] BF16, weight [D] BF16 or None for a "unit" norm -> [..., D] BF16, contiguous."""
    width = x.shape[-1]
    rows = x.numel() // max(1, width)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    chosen = knobs or RowNormKnobs.heuristic({"N": rows, "D": width})
    launch(
        row_norm_kernel,
        (triton.cdiv(rows, chosen.rows),),
        x,
        x if weight is None else weight,
        out,
        row_stride(x),
        rows,
        eps,
        D=width,
        WIDTH=triton.next_power_of_2(width),
        ROWS=chosen.rows,
        KIND=kind,
        num_warps=chosen.warps,
    )
    return out


def offline_cases() -> list[OfflineCase]:
    """4096 wide: a decode step and a prefill."""
    signature: dict[str, str] = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*bf16")
    signature |= {"x_stride": "i32:16", "count": "i32", "eps": "fp32"}
    cases = []
    for rows in (1, 16384):
        knobs = RowNormKnobs.heuristic({"N": rows, "D": 4096})
        values = {"D": 4096, "WIDTH": 4096, "ROWS": knobs.rows, "KIND": "centred"}
        types = signature | dict.fromkeys(values, "constexpr")
        cases.append(OfflineCase(row_norm_kernel, types, values, knobs.warps))
    return cases
