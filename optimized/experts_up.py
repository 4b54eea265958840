"""Gate and up projections of the chosen experts with SwiGLU, for few pairs; used by
`routed_experts`, whose docstring has the equations, and `normed_experts`.

P pairs of a token and an expert, D hidden, F feed-forward width. A tile is `ROWS` rows of a pair's
gate and of its up matrix. With a program for every tile each starts and ends with nothing in
flight. In a loop over all pieces of several tiles the weights of the next tile are on their way
while one is summed up. Both add in the same order and give the same bits.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.triton_support import launch, let_next_start, previous_is_done, silu_fp32


@triton.jit
def _once(pointer, inside):
    """Weights that no other program reads: first to leave the caches, where the loop is unrolled. A
    pipelined one's asynchronous copies take no such mark."""
    return tl.load(pointer, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _multiply(
    x_row,
    gate_rows,
    first,
    in_rows,
    gates,
    ups,
    D: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the products of columns `first` and on to the sums of gate and up rows."""
    column = first + tl.arange(0, BLOCK)[None, :]
    inside = column < D
    x = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32).broadcast_to(ROWS, BLOCK)
    inside = inside & in_rows
    gate = _once(gate_rows + column, inside).to(tl.float32)
    up = _once(gate_rows + F * D + column, inside).to(tl.float32)
    return tl.fma(gate, x, gates), tl.fma(up, x, ups)


@triton.jit
def _activated(gates, ups, ROUNDED: tl.constexpr):
    """R(silu(gate) up) of the sums [ROWS, BLOCK], each rounded first; [ROWS] BF16. `ROUNDED` rounds
    silu(gate), too."""
    gate, up = tl.sum(gates, axis=1), tl.sum(ups, axis=1)
    gate, up = gate.to(tl.bfloat16).to(tl.float32), up.to(tl.bfloat16).to(tl.float32)
    opened = silu_fp32(gate)
    if ROUNDED:
        opened = opened.to(tl.bfloat16).to(tl.float32)
    return (opened * up).to(tl.bfloat16)


@triton.jit
def experts_up_kernel(
    x_ptr,
    experts_ptr,
    weight_ptr,
    hidden_ptr,
    x_stride,
    TOP_K: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    ROUNDED: tl.constexpr = False,  # pyright: ignore[reportArgumentType]
):
    """A tile a program; `STAGES` of a pipelined loop over D, or 0 for an unrolled one."""
    previous_is_done(PDL)
    let_next_start(PDL)  # only now: the next kernel reads what this one has waited for
    pair = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_rows = (row < F)[:, None]
    x_row = x_ptr + (pair // TOP_K).to(tl.int64) * x_stride
    expert = tl.load(experts_ptr + pair)
    gate_rows = weight_ptr + expert * (2 * F * D) + row[:, None] * D
    # Both sums in one loop: the loads of the second need not wait until the first is reduced.
    gates, ups = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    if STAGES == 0:
        for first in tl.static_range(0, D, BLOCK):  # pyright: ignore[reportGeneralTypeIssues]
            gates, ups = _multiply(x_row, gate_rows, first, in_rows, gates, ups, D, F, ROWS, BLOCK)
    else:
        for first in tl.range(0, D, BLOCK, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
            gates, ups = _multiply(x_row, gate_rows, first, in_rows, gates, ups, D, F, ROWS, BLOCK)
    tl.store(hidden_ptr + pair * F + row, _activated(gates, ups, ROUNDED), mask=row < F)


@triton.jit
def experts_up_loop_kernel(
    x_ptr,
    experts_ptr,
    weight_ptr,
    hidden_ptr,
    x_stride,
    pairs,
    TOP_K: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    ROUNDED: tl.constexpr = False,  # pyright: ignore[reportArgumentType]
):
    """Every tile that is this program's number plus a multiple of the number of programs."""
    previous_is_done(PDL)
    let_next_start(PDL)  # only now: the next kernel reads what this one has waited for
    TILES: tl.constexpr = (F + ROWS - 1) // ROWS
    PIECES: tl.constexpr = (D + BLOCK - 1) // BLOCK
    program, programs = tl.program_id(0), tl.num_programs(0)
    steps = tl.cdiv(pairs * TILES - program, programs) * PIECES
    gates, ups = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        tile, piece = program + step // PIECES * programs, step % PIECES
        pair = tile // TILES
        row = tile % TILES * ROWS + tl.arange(0, ROWS)
        x_row = x_ptr + (pair // TOP_K).to(tl.int64) * x_stride
        gate_rows = weight_ptr + tl.load(experts_ptr + pair) * (2 * F * D) + row[:, None] * D
        in_rows = (row < F)[:, None]
        first = piece * BLOCK
        gates, ups = _multiply(x_row, gate_rows, first, in_rows, gates, ups, D, F, ROWS, BLOCK)
        if piece == PIECES - 1:
            tl.store(hidden_ptr + pair * F + row, _activated(gates, ups, ROUNDED), mask=row < F)
            gates = tl.zeros([ROWS, BLOCK], tl.float32)
            ups = tl.zeros([ROWS, BLOCK], tl.float32)


def experts_up(
    x: Tensor, experts: Tensor, weight: Tensor, knobs: Mapping[str, int], *, rounded: bool
) -> Tensor:
    """x [N, D] BF16 with contiguous rows, experts [N, K] int64, weight [E, 2 F, D] -> [P, F] BF16.

    `knobs` are the `rows` of a tile, the `block` of D at a time, `stages`, `warps`, and how many
    `programs` loop over the tiles, or 0; with `rounded` silu(gate) is rounded, too."""
    inner, width = weight.shape[1] // 2, weight.shape[2]
    pairs, top_k = experts.numel(), experts.shape[1]
    hidden = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    if pairs == 0:
        return hidden
    tiles, programs = triton.cdiv(inner, knobs["rows"]), knobs["programs"]
    blocks: dict[str, Any] = {"TOP_K": top_k, "D": width, "F": inner, "ROWS": knobs["rows"]}
    blocks |= {"BLOCK": knobs["block"], "STAGES": knobs["stages"], "ROUNDED": rounded}
    given = x, experts, weight, hidden, x.stride(0)
    if programs:
        grid, given = (min(programs, pairs * tiles),), (*given, pairs)
        launch(experts_up_loop_kernel, grid, *given, num_warps=knobs["warps"], **blocks)
    else:
        launch(experts_up_kernel, (pairs, tiles), *given, num_warps=knobs["warps"], **blocks)
    return hidden
