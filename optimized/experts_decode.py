"""The routed SwiGLU experts of a few tokens, read in place: two kernels, no gathered weights.

    gate, up = R(W_gate x), R(W_up x)      per chosen expert
    hidden   = R(silu(gate) * up)
    y        = R(W_down hidden)

R rounds to BF16; sums are FP32. N tokens, K experts a token, P = N K pairs, E experts, D hidden, F
feed-forward width. Moves 3 F D BF16 weights a pair: 79 MB for the 8 pairs of a token at D = 5120,
F = 320, 18 us at an H200's 4.33 TB/s (2026-11-29); the reference's gather writes and reads them
once more. All three rounding points are kept; none is added.

Every weight is used once a pair, so what counts is how many loads are in flight: rows of the two
matrices are spread over several thread blocks an SM, and the loop over the summed dimension is
unrolled so that its 16-byte loads are issued ahead of the sums.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.change import Change, Contract, Implementation, KnobValue
from optimized.triton_support import (
    OfflineCase,
    launch,
    let_next_start,
    outside_domain,
    previous_is_done,
    silu_fp32,
)

MAX_PAIRS = 64  # beyond, pairs share experts and a grouped matrix product reads less
MAX_UNROLL = 20  # steps of the unrolled loops; more run out of registers and compile slowly
MAX_TILE = 8192  # partial sums a program holds, of each matrix


@dataclass(frozen=True, kw_only=True)
class ExpertsKnobs:
    """Per kernel: `rows` of outputs a program, the `block` of the sum at a time, `warps`."""

    up_rows: int
    up_block: int
    up_warps: int
    down_rows: int
    down_block: int
    down_warps: int

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "ExpertsKnobs":
        up_block, down_block = _block(shape["D"], 1024), _block(shape["F"], 64)
        return cls(
            up_rows=2,
            up_block=up_block,
            up_warps=4,
            down_rows=min(4096 // down_block, 64 if shape["D"] >= 2048 else 16),
            down_block=down_block,
            down_warps=4,
        )

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        return {
            "up_rows": (1, 2, 4, 8),
            "up_block": (256, 512, 1024, 2048),
            "up_warps": (2, 4, 8),
            "down_rows": (8, 16, 32, 64, 128),
            "down_block": (64, 128, 256, 512),
            "down_warps": (2, 4, 8),
        }

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        sizes = (
            (self.up_rows, self.up_block, shape["D"]),
            (self.down_rows, self.down_block, shape["F"]),
        )
        return all(
            triton.cdiv(width, block) <= MAX_UNROLL
            and block < 2 * width
            and rows * block <= MAX_TILE
            for rows, block, width in sizes
        )


def _block(width: int, start: int) -> int:
    """The smallest power of two from `start` up that covers `width` in ten steps or fewer."""
    block = min(start, triton.next_power_of_2(width))
    while triton.cdiv(width, block) > 10:
        block *= 2
    return block


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
    PDL: tl.constexpr,
):
    previous_is_done(PDL)
    let_next_start(PDL)  # so the next kernel may read what this one waited for
    pair = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_rows = (row < F)[:, None]
    x_row = x_ptr + (pair // TOP_K).to(tl.int64) * x_stride
    expert = tl.load(experts_ptr + pair)
    gate_rows = weight_ptr + expert * (2 * F * D) + row[:, None] * D
    # Both sums in one loop: the loads of the second need not wait until the first is reduced.
    gates, ups = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.static_range(0, D, BLOCK):  # pyright: ignore[reportGeneralTypeIssues]
        column = first + tl.arange(0, BLOCK)[None, :]
        inside = column < D
        x = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32).broadcast_to(ROWS, BLOCK)
        inside = inside & in_rows
        gate = tl.load(gate_rows + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_rows + F * D + column, mask=inside, other=0.0).to(tl.float32)
        gates, ups = tl.fma(gate, x, gates), tl.fma(up, x, ups)
    gate, up = tl.sum(gates, axis=1), tl.sum(ups, axis=1)
    gate, up = gate.to(tl.bfloat16).to(tl.float32), up.to(tl.bfloat16).to(tl.float32)
    hidden = (silu_fp32(gate) * up).to(tl.bfloat16)
    tl.store(hidden_ptr + pair * F + row, hidden, mask=row < F)


@triton.jit
def experts_down_kernel(
    hidden_ptr,
    experts_ptr,
    weight_ptr,
    y_ptr,
    D: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    pair = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_rows = (row < D)[:, None]
    expert = tl.load(experts_ptr + pair)  # chosen before `experts_up_kernel` let this one start
    weight_rows = weight_ptr + expert * (D * F) + row[:, None] * F
    columns = tl.arange(0, BLOCK)[None, :]
    held = ()
    for first in tl.static_range(0, F, BLOCK):  # pyright: ignore[reportGeneralTypeIssues]
        inside = in_rows & (first + columns < F)
        held = held + (tl.load(weight_rows + first + columns, mask=inside, other=0.0),)
    previous_is_done(PDL)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.static_range(0, F, BLOCK):  # pyright: ignore[reportGeneralTypeIssues]
        column = first + columns
        x = tl.load(hidden_ptr + pair * F + column, mask=column < F, other=0.0).to(tl.float32)
        weight = held[first // BLOCK].to(tl.float32)
        total = tl.fma(weight, x.broadcast_to(ROWS, BLOCK), total)
    y = tl.sum(total, axis=1)
    tl.store(y_ptr + pair * D + row, y.to(tl.bfloat16), mask=row < D)


def shape(node: Any, x: Tensor, experts: Tensor) -> dict[str, int]:
    """P pairs, D hidden and F feed-forward width of a call."""
    return {"P": experts.numel(), "D": node.down_proj.shape[1], "F": node.down_proj.shape[2]}


def guard(node: Any, x: Tensor, experts: Tensor) -> str | None:
    """Why the kernels do not take this call, or None."""
    if x.dim() != 2 or experts.dim() != 2 or len(x) != len(experts):
        return f"x is {tuple(x.shape)}, experts {tuple(experts.shape)}; they do not fit together"
    if experts.numel() > MAX_PAIRS:
        return f"{experts.numel()} token-expert pairs, the kernels take up to {MAX_PAIRS}"
    if experts.dtype != torch.int64 or not experts.is_contiguous():
        return f"experts are {experts.dtype} with strides {experts.stride()}"
    count, width, inner = node.down_proj.shape
    if node.gate_up_proj.shape != (count, 2 * inner, width) or x.shape[1] != width:
        return f"weights {tuple(node.gate_up_proj.shape)}, {tuple(node.down_proj.shape)} do not fit"
    if x.stride(1) != 1 or not (
        node.gate_up_proj.is_contiguous() and node.down_proj.is_contiguous()
    ):
        return "x or the weights are not contiguous"
    return outside_domain(x=x, gate_up_proj=node.gate_up_proj, down_proj=node.down_proj)


def build(node: Any, knobs: ExpertsKnobs | None):
    """(x [N, D] BF16, experts [N, K] int64) -> [N, K, D] BF16."""

    def forward(x: Tensor, experts: Tensor) -> Tensor:
        sizes = shape(node, x, experts)
        pairs, width, inner = sizes["P"], sizes["D"], sizes["F"]
        chosen = knobs or ExpertsKnobs.heuristic(sizes)
        hidden = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
        y = torch.empty((*experts.shape, width), dtype=x.dtype, device=x.device)
        if pairs == 0:
            return y
        launch(
            experts_up_kernel,
            (pairs, triton.cdiv(inner, chosen.up_rows)),
            x,
            experts,
            node.gate_up_proj,
            hidden,
            x.stride(0),
            TOP_K=experts.shape[1],
            D=width,
            F=inner,
            ROWS=chosen.up_rows,
            BLOCK=chosen.up_block,
            num_warps=chosen.up_warps,
        )
        launch(
            experts_down_kernel,
            (pairs, triton.cdiv(width, chosen.down_rows)),
            hidden,
            experts,
            node.down_proj,
            y,
            D=width,
            F=inner,
            ROWS=chosen.down_rows,
            BLOCK=chosen.down_block,
            num_warps=chosen.down_warps,
        )
        return y

    return forward


def offline_cases() -> list[OfflineCase]:
    """Beam whole, and on one of two and one of eight tensor-parallel ranks."""
    up = dict.fromkeys(("x_ptr", "weight_ptr", "hidden_ptr"), "*bf16")
    up |= {"experts_ptr": "*i64", "x_stride": "i32:16"}
    up |= dict.fromkeys(("TOP_K", "D", "F", "ROWS", "BLOCK"), "constexpr")
    down = dict.fromkeys(("hidden_ptr", "weight_ptr", "y_ptr"), "*bf16")
    down |= {"experts_ptr": "*i64", **dict.fromkeys(("D", "F", "ROWS", "BLOCK"), "constexpr")}
    up = {name: up[name] for name in experts_up_kernel.arg_names if name in up}
    down = {name: down[name] for name in experts_down_kernel.arg_names if name in down}
    cases = []
    for inner in (320, 1280, 2560):
        knobs = ExpertsKnobs.heuristic({"P": 8, "D": 5120, "F": inner})
        sizes = {"D": 5120, "F": inner}
        values = {"TOP_K": 8, **sizes, "ROWS": knobs.up_rows, "BLOCK": knobs.up_block}
        cases.append(OfflineCase(experts_up_kernel, up, values, knobs.up_warps))
        values = {**sizes, "ROWS": knobs.down_rows, "BLOCK": knobs.down_block}
        cases.append(OfflineCase(experts_down_kernel, down, values, knobs.down_warps))
    return cases


CHANGE = Change(
    name="experts_decode",
    region="experts",
    summary="the chosen experts' weights read in place, SwiGLU in the first kernel's epilogue",
    # Knobs are tuned by the number of pairs, and with them the order of the sums.
    contract=Contract(numerics="reduction", batch_invariant=False),
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build,
            guard=guard,
            knobs=ExpertsKnobs,
            shape=shape,
        ),
    ),
)
