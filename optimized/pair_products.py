"""Products of a few token-expert pairs with their experts' weights, read in place.

    y_p = R(W_e x_p), or of gate and up rows R(R(silu(R(W_gate x_p))) * R(W_up x_p))

R rounds to BF16; sums are FP32. P pairs of N tokens and K experts a token, D inputs and O outputs
of an expert. All rounding points are kept; none is added. Moves the chosen experts' weights once a
pair: with O = 512 gated outputs of 4096 inputs and 8 pairs 67 MB, 15.5 us at an H200's 4.33 TB/s
(2026-11-29).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.change import KnobValue
from optimized.norm_combine import NormCombineKnobs
from optimized.triton_support import (
    OfflineCase,
    launch,
    let_next_start,
    previous_is_done,
    silu_fp32,
)

MAX_TILE = 8192  # partial sums a program holds, of each matrix
MAX_HELD = 160  # weights that a thread holds, in half as many registers
MAX_STAGED = 100_000  # bytes of shared memory a program, so that two fit an SM


@dataclass(frozen=True, kw_only=True)
class PairKnobs:
    """Per product: `rows` of outputs a program, the `block` of the sum at a time, `stages` of the
    pipelined loop, `warps`. The second, ungated one holds all of its weights before the first is
    done where it has 0 stages. The third kernel's are those of `NormCombineKnobs`."""

    up_rows: int
    up_block: int
    up_stages: int
    up_warps: int
    down_rows: int
    down_block: int
    down_stages: int
    down_warps: int
    sum_columns: int
    sum_warps: int

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "PairKnobs":
        up_block = min(1024, triton.next_power_of_2(shape["D"]))
        down_block = min(512, triton.next_power_of_2(shape["F"]))
        held = 8 * down_block * triton.cdiv(shape["F"], down_block) <= MAX_HELD * 128
        sums = NormCombineKnobs.heuristic({"N": 1, "D": shape["D"]})
        return cls(
            up_rows=2,
            up_block=up_block,
            up_stages=4,
            up_warps=4,
            down_rows=8,
            down_block=down_block,
            down_stages=0 if held else 3,
            down_warps=4,
            sum_columns=sums.columns,
            sum_warps=sums.warps,
        )

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        return {
            "up_rows": (1, 2, 4, 8),
            "up_block": (256, 512, 1024, 2048),
            "up_stages": (2, 3, 4, 6),
            "up_warps": (2, 4, 8),
            "down_rows": (2, 4, 8, 16),
            "down_block": (64, 128, 256, 512),
            "down_stages": (0, 2, 3, 4),
            "down_warps": (2, 4, 8),
            **{f"sum_{name}": n for name, n in NormCombineKnobs.candidates(shape).items()},
        }

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        held = self.down_rows * triton.cdiv(shape["F"], self.down_block) * self.down_block
        products = (
            (2, self.up_rows, self.up_block, self.up_stages, shape["D"]),
            (1, self.down_rows, self.down_block, self.down_stages, shape["F"]),
        )
        return (
            self.up_stages > 0
            and NormCombineKnobs(**self.of("sum")).is_valid(shape)
            and (self.down_stages > 0 or held <= MAX_HELD * 32 * self.down_warps)
            and all(
                block < 2 * width
                and rows * block <= MAX_TILE
                and stages * (matrices * rows + 1) * block * 2 <= MAX_STAGED
                for matrices, rows, block, stages, width in products
            )
        )

    def of(self, product: str) -> dict[str, int]:
        """The knobs of "up", "down" or "sum" by name."""
        names = [f.name for f in fields(self) if f.name.startswith(product)]
        return {name.removeprefix(f"{product}_"): getattr(self, name) for name in names}


@triton.jit
def _piece(rows_ptr, first, in_rows, D: tl.constexpr, BLOCK: tl.constexpr):
    """Columns `first` and on of some rows of a matrix."""
    column = first + tl.arange(0, BLOCK)[None, :]
    return tl.load(rows_ptr + column, mask=in_rows & (column < D), other=0.0)


@triton.jit
def _inputs(x_row, first, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = first + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_row + column, mask=column < D, other=0.0)
    return x.to(tl.float32).broadcast_to(ROWS, BLOCK)


@triton.jit
def pair_product_kernel(
    x_ptr,
    experts_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    SHARE: tl.constexpr,
    D: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """`SHARE` pairs have a row of x in common. Without `STAGES` the choice of experts has to be
    done before the previous kernel lets this one start, and the weights are held by then."""
    if STAGES > 0:
        previous_is_done(PDL)
    let_next_start(PDL)  # after the wait: the next kernel may read what this one has waited for
    pair = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_rows = (row < O)[:, None]
    MATRICES: tl.constexpr = 2 if GATED else 1
    rows_ptr = weight_ptr + tl.load(experts_ptr + pair) * (MATRICES * O * D) + row[:, None] * D
    x_row = x_ptr + pair // SHARE * x_stride
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    ups = tl.zeros([ROWS, BLOCK], tl.float32)
    if STAGES == 0:
        held = ()
        for first in tl.static_range(0, D, BLOCK):  # pyright: ignore[reportGeneralTypeIssues]
            held = held + (_piece(rows_ptr, first, in_rows, D, BLOCK),)
        previous_is_done(PDL)
        for first in tl.static_range(0, D, BLOCK):  # pyright: ignore[reportGeneralTypeIssues]
            x = _inputs(x_row, first, D, ROWS, BLOCK)
            sums = tl.fma(held[first // BLOCK].to(tl.float32), x, sums)
    else:
        for first in tl.range(0, D, BLOCK, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
            x = _inputs(x_row, first, D, ROWS, BLOCK)
            sums = tl.fma(_piece(rows_ptr, first, in_rows, D, BLOCK).to(tl.float32), x, sums)
            if GATED:
                up = _piece(rows_ptr + O * D, first, in_rows, D, BLOCK)
                ups = tl.fma(up.to(tl.float32), x, ups)
    y = tl.sum(sums, axis=1).to(tl.bfloat16)
    if GATED:
        up = tl.sum(ups, axis=1).to(tl.bfloat16).to(tl.float32)
        opened = silu_fp32(y.to(tl.float32)).to(tl.bfloat16).to(tl.float32)
        y = (opened * up).to(tl.bfloat16)
    tl.store(out_ptr + pair * O + row, y, mask=row < O)


def pair_product(
    x: Tensor, experts: Tensor, weight: Tensor, gated: bool, knobs: Mapping[str, int]
) -> Tensor:
    """x [N, D] or [P, D] BF16 with contiguous rows, experts [N, K] int64, weight [E, O, D], or
    [E, 2 O, D] if `gated` -> [P, O] BF16; `knobs` are those of one product of `PairKnobs`."""
    _, outputs, width = weight.shape
    outputs = outputs // 2 if gated else outputs
    out = torch.empty((experts.numel(), outputs), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    launch(
        pair_product_kernel,
        (experts.numel(), triton.cdiv(outputs, knobs["rows"])),
        x,
        experts,
        weight,
        out,
        x.stride(0),
        SHARE=experts.numel() // len(x),
        D=width,
        O=outputs,
        GATED=gated,
        ROWS=knobs["rows"],
        BLOCK=knobs["block"],
        STAGES=knobs["stages"],
        num_warps=knobs["warps"],
    )
    return out


def offline_cases() -> list[OfflineCase]:
    """Eight pairs of experts 4096 wide, whole and one of eight tensor-parallel ranks' parts."""
    kinds: dict[str, str] = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*bf16")
    kinds |= {"experts_ptr": "*i64", "x_stride": "i32:16"}
    cases = []
    for inner in (512, 4096):
        knobs = PairKnobs.heuristic({"P": 8, "K": 8, "D": 4096, "F": inner})
        for product, share, width, outputs in (("up", 8, 4096, inner), ("down", 1, inner, 4096)):
            chosen = knobs.of(product)
            values: dict[str, Any] = {"SHARE": share, "D": width, "O": outputs}
            values |= {"GATED": product == "up", "STAGES": chosen["stages"]}
            values |= {"ROWS": chosen["rows"], "BLOCK": chosen["block"]}
            types = kinds | dict.fromkeys(values, "constexpr")
            ordered = {n: types[n] for n in pair_product_kernel.arg_names if n != "PDL"}
            cases.append(OfflineCase(pair_product_kernel, ordered, values, chosen["warps"]))
    return cases
