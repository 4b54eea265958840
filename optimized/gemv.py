"""y = x W^T for a handful of rows: BF16 in and out, FP32 accumulation, one rounding.

x [M, D], rows evenly spaced; W [O, D] contiguous; y [M, O]. The weight is read once, 2 O D bytes,
and is nearly all the traffic: 18 MB or 4.2 us at H200's 4.33 TB/s for 1792 x 5120, where cuBLAS
takes 8.9 us (2026-11-29). So what counts is how many loads are in flight, not arithmetic.

M = 1: a program sums `rows` outputs on CUDA cores, loads of 16 bytes a thread, the loop over D
unrolled so that all of them can be issued ahead. M = 2 to 16: tensor cores, the rows padded to 16,
the loop pipelined.

The knob `engine` has another kernel compute the product (`optimized.gemv_engines`).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized import gemv_engines
from optimized.gemv_engines import OWN
from optimized.gemv_knobs import GemvKnobs, held_blocks
from optimized.triton_support import (
    INTERPRETED,
    OfflineCase,
    launch,
    let_next_start,
    prefetch,
    prefetch_chunks,
    previous_is_done,
    row_stride,
)

MAX_ROWS = 16  # of x; more fill the tensor cores well enough for a library's kernel


@triton.jit
def gemv_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    O,  # noqa: E741
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first `HELD` blocks of weights are loaded before the previous kernel is done."""
    let_next_start(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    in_rows = (rows < O)[:, None]
    w_rows = w_ptr + rows.to(tl.int64)[:, None] * D
    held = ()
    for first in tl.static_range(0, HELD * BLOCK, BLOCK):  # pyright: ignore[reportGeneralTypeIssues]
        held = held + (_weights(w_rows, first, columns, in_rows, D, BLOCK),)
    previous_is_done(PDL)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.static_range(0, D, BLOCK):  # pyright: ignore[reportGeneralTypeIssues]
        if first < HELD * BLOCK:
            w = held[first // BLOCK]
        else:
            w = _weights(w_rows, first, columns, in_rows, D, BLOCK)
        if first + BLOCK <= D:
            x = tl.load(x_ptr + first + columns)
        else:
            x = tl.load(x_ptr + first + columns, mask=first + columns < D, other=0.0)
        total += w.to(tl.float32) * x.to(tl.float32)[None, :]
    tl.store(y_ptr + rows, tl.sum(total, axis=1).to(tl.bfloat16), mask=rows < O)


@triton.jit
def _weights(w_rows, first, columns, in_rows, D: tl.constexpr, BLOCK: tl.constexpr):
    """Columns `first` and on of some rows."""
    column = first + columns
    if first + BLOCK <= D:
        return tl.load(w_rows + column[None, :], mask=in_rows, other=0.0)
    return tl.load(w_rows + column[None, :], mask=in_rows & (column < D)[None, :], other=0.0)


@triton.jit
def few_rows_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    x_stride,
    M,
    O,  # noqa: E741
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """`WIDE` multiplies in FP32, for the interpreter, whose BF16 products are wrong."""
    let_next_start(PDL)
    program = tl.program_id(0).to(tl.int64)
    if (program + 1) * ROWS <= O:
        prefetch(w_ptr + program * ROWS * D, ROWS * D * 2, CHUNKS, PDL)
    previous_is_done(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    tokens = tl.arange(0, 16)
    in_rows, in_tokens = (rows < O)[:, None], (tokens < M)[None, :]
    w_rows = w_ptr + rows.to(tl.int64)[:, None] * D
    x_rows = x_ptr + tokens.to(tl.int64)[None, :] * x_stride
    total = tl.zeros((ROWS, 16), tl.float32)
    for first in tl.range(0, D, BLOCK, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        column = first + columns
        inside = column < D
        w = tl.load(w_rows + column[None, :], mask=in_rows & inside[None, :], other=0.0)
        x = tl.load(x_rows + column[:, None], mask=in_tokens & inside[:, None], other=0.0)
        if WIDE:
            total += tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="ieee")
        else:
            total = tl.dot(w, x, total)
    y_pointers = y_ptr + tokens.to(tl.int64)[None, :] * O + rows[:, None]
    tl.store(y_pointers, total.to(tl.bfloat16), mask=in_rows & in_tokens)


def sizes(x: Tensor, outputs: int) -> dict[str, int]:
    """M rows, O outputs, D inputs of a product."""
    return {"M": x.numel() // max(1, x.shape[-1]), "O": outputs, "D": x.shape[-1]}


def check(knobs: GemvKnobs | None) -> None:
    """ValueError in one line where this machine lacks the knobs' engine."""
    if knobs is not None:
        gemv_engines.check(knobs.engine)


def outside_rows(x: Tensor) -> str | None:
    """Why the kernels cannot read `x` [..., D], or None."""
    if row_stride(x) is None:
        return f"x has strides {x.stride()}, the kernel takes evenly spaced rows"
    if x.shape[-1] % 8 or x.data_ptr() % 16:
        return f"x has width {x.shape[-1]}, the kernel takes multiples of 8, 16-byte aligned"
    return None


def multiply(x: Tensor, weight: Tensor, knobs: GemvKnobs | None = None) -> Tensor:
    """x [..., D] times weight [O, D] transposed -> [..., O] BF16; at most `MAX_ROWS` rows of x."""
    outputs, width = weight.shape
    shape = sizes(x, outputs)
    y = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    aligned = not (x.data_ptr() | weight.data_ptr()) % 16  # as other engines take it
    chosen = knobs or (GemvKnobs.heuristic if aligned else GemvKnobs.own)(shape)
    if chosen.engine != OWN:
        if not chosen.is_valid(shape):
            raise ValueError(f"{chosen} do not fit a product of {shape}; tune it again")
        gemv_engines.multiply(x, weight, y, chosen)
        return y
    grid = (triton.cdiv(outputs, chosen.rows),)
    blocks: dict[str, Any] = {"D": width, "ROWS": chosen.rows, "BLOCK": chosen.block}
    blocks |= {"num_warps": chosen.warps, "exact": False}  # products of BF16 are exact in FP32
    if shape["M"] == 1:
        blocks["HELD"] = held_blocks(chosen, width)
        launch(gemv_kernel, grid, x, weight, y, outputs, **blocks)
    else:
        blocks |= {"STAGES": chosen.stages, "WIDE": INTERPRETED}
        blocks |= {"CHUNKS": prefetch_chunks(chosen.rows * width * 2)}
        stride = row_stride(x)
        launch(few_rows_kernel, grid, x, weight, y, stride, shape["M"], outputs, **blocks)
    return y


def offline_cases() -> list[OfflineCase]:
    """The packed projection of a TP8 rank of Beam, for one row and for eight."""
    pointers = dict.fromkeys(("x_ptr", "w_ptr", "y_ptr"), "*bf16")
    found = []
    for rows in (1, 8):
        knobs = GemvKnobs.own({"M": rows, "O": 1792, "D": 5120})
        values: dict[str, Any] = {"D": 5120, "ROWS": knobs.rows, "BLOCK": knobs.block}
        signature = {**pointers}
        if rows > 1:
            signature |= {"x_stride": "i32:16", "M": "i32"}
            values |= {"STAGES": knobs.stages, "WIDE": False}
            values |= {"CHUNKS": prefetch_chunks(knobs.rows * 5120 * 2)}
        else:
            values["HELD"] = held_blocks(knobs, 5120)
        signature |= {"O": "i32:16", **dict.fromkeys(values, "constexpr")}
        kernel = gemv_kernel if rows == 1 else few_rows_kernel
        found.append(OfflineCase(kernel, signature, values, knobs.warps))
    return found
