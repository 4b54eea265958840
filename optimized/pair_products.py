"""Products of a few token-expert pairs with their experts' weights, read in place.

    y_p = R(W_e x_p)

R rounds to BF16; sums are FP32. P pairs, D inputs and O outputs of an expert. All rounding points
are kept; none is added. Moves the chosen experts' weights once a pair: with O = 4096 outputs of 512
inputs and 8 pairs 34 MB, 7.7 us at an H200's 4.33 TB/s (2026-11-29). Gate and up projections are
`experts_up`'s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.change import KnobValue
from optimized.experts_up import experts_up_kernel, experts_up_loop_kernel
from optimized.norm_combine import NormCombineKnobs
from optimized.triton_support import (
    OfflineCase,
    launch,
    let_next_start,
    previous_is_done,
)

MAX_TILE = 8192  # partial sums a program holds, of each matrix
MAX_UNROLL = 20  # steps of the unrolled loop
MAX_HELD = 160  # weights that a thread holds, in half as many registers
MAX_STAGED = 100_000  # bytes of shared memory a program, so that two fit an SM


@dataclass(frozen=True, kw_only=True)
class PairKnobs:
    """Per product: `rows` of outputs a program, the `block` of the sum at a time, `stages` of the
    pipelined loop, `warps`. The first's are `experts_up`'s; the second holds all of its weights
    before the first is done where it has 0 stages. The third kernel's are `NormCombineKnobs`'."""

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
    up_programs: int = 0

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
            "up_stages": (0, 2, 3, 4, 6),
            "up_warps": (2, 4, 8),
            "up_programs": (0, 264, 396, 528, 660),
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
            (self.up_programs == 0 or (self.up_programs > 0 and self.up_stages > 0))
            and (self.up_stages > 0 or triton.cdiv(shape["D"], self.up_block) <= MAX_UNROLL)
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
    D: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Without `STAGES` the choice of experts has to be done before the previous kernel lets this
    one start, and the weights are held by then."""
    if STAGES > 0:
        previous_is_done(PDL)
    let_next_start(PDL)  # after the wait: the next kernel may read what this one has waited for
    pair = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_rows = (row < O)[:, None]
    rows_ptr = weight_ptr + tl.load(experts_ptr + pair) * (O * D) + row[:, None] * D
    x_row = x_ptr + pair * D
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
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
    tl.store(out_ptr + pair * O + row, tl.sum(sums, axis=1).to(tl.bfloat16), mask=row < O)


def pair_product(x: Tensor, experts: Tensor, weight: Tensor, knobs: Mapping[str, int]) -> Tensor:
    """x [P, D] BF16, contiguous, experts [N, K] int64, weight [E, O, D] -> [P, O] BF16; `knobs` are
    those of the second product of `PairKnobs`."""
    _, outputs, width = weight.shape
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
        D=width,
        O=outputs,
        ROWS=knobs["rows"],
        BLOCK=knobs["block"],
        STAGES=knobs["stages"],
        num_warps=knobs["warps"],
    )
    return out


def offline_cases() -> list[OfflineCase]:
    """Eight pairs of experts 4096 wide, whole and one of eight tensor-parallel ranks' parts: both
    ways of the first product, and the second."""
    kinds = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr", "hidden_ptr"), "*bf16")
    kinds |= {"experts_ptr": "*i64", "x_stride": "i32:16", "pairs": "i32"}
    cases = []
    for inner in (512, 4096):
        knobs = PairKnobs.heuristic({"P": 8, "K": 8, "D": 4096, "F": inner})
        up: dict[str, Any] = {"TOP_K": 8, "D": 4096, "F": inner, "ROUNDED": True}
        down: dict[str, Any] = {"D": inner, "O": 4096}
        for kernel, product, values in (
            (experts_up_kernel, "up", up),
            (experts_up_loop_kernel, "up", up),
            (pair_product_kernel, "down", down),
        ):
            chosen = knobs.of(product)
            values = values | {"ROWS": chosen["rows"], "BLOCK": chosen["block"]}
            values |= {"STAGES": chosen["stages"]}
            types = kinds | dict.fromkeys(values, "constexpr")
            ordered = {n: types[n] for n in kernel.arg_names if n != "PDL"}
            cases.append(OfflineCase(kernel, ordered, values, chosen["warps"]))
    return cases
