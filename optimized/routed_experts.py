"""The routed SwiGLU experts and their weighted sum.

    gate, up = R(W_gate x), R(W_up x)      per chosen expert
    hidden   = R(silu(gate) * up)
    y_k      = R(W_down hidden)
    out      = R(scale * sum_k weight_k y_k), in slot order

R rounds to BF16; sums are FP32. N tokens, K experts a token, P = N K pairs, E experts, D hidden, F
feed-forward width. All rounding points are kept; none is added.

Few pairs: two kernels that read the chosen experts' weights in place, 3 F D BF16 values a pair: 79
MB for the 8 pairs of a token at D = 5120, F = 320, 18 us at an H200's 4.33 TB/s (2026-11-29). What
counts is how many loads are in flight: rows of the matrices are spread over several thread blocks
an SM, and the second kernel holds its weights in registers before the first is done.

Many pairs: sorted by expert for the library's grouped matrix product. Its results are not put back
in order; the weighted sum reads them where they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized import swiglu
from optimized.change import Change, Contract, Implementation, KnobValue
from optimized.combine import weighted_sum
from optimized.triton_support import (
    OfflineCase,
    launch,
    let_next_start,
    outside_domain,
    previous_is_done,
    row_stride,
    silu_fp32,
)

MAX_PAIRS = 64  # beyond, pairs share experts and a grouped matrix product reads less
MAX_UNROLL = 20  # steps of the unrolled loops; more run out of registers and compile slowly
MAX_TILE = 8192  # partial sums a program holds, of each matrix
MAX_HELD = 160  # weights that a thread holds, in half as many registers
MAX_STAGED = 100_000  # bytes of shared memory a program, so that two fit an SM


@dataclass(frozen=True, kw_only=True)
class ExpertsKnobs:
    """Per kernel: `rows` of outputs a program, the `block` of the sum at a time, `warps`. The first
    has `stages` of a pipelined loop, or 0 for an unrolled one; the second holds the weights of its
    first `down_held` slots before the first is done."""

    up_rows: int
    up_block: int
    up_warps: int
    up_stages: int
    down_rows: int
    down_block: int
    down_warps: int
    down_held: int

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "ExpertsKnobs":
        up_block, down_block = _block(shape["D"], 1024), _block(shape["F"], 64)
        rows = 8 if shape["F"] <= 512 else 4
        a_slot = rows * down_block * triton.cdiv(shape["F"], down_block) // 128
        return cls(
            up_rows=2,
            up_block=up_block,
            up_warps=4,
            up_stages=0,
            down_rows=rows,
            down_block=down_block,
            down_warps=4,
            down_held=min(shape["K"], MAX_HELD // max(1, a_slot)),
        )

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        return {
            "up_rows": (1, 2, 4, 8),
            "up_block": (256, 512, 1024, 2048),
            "up_warps": (2, 4, 8),
            "up_stages": (0, 2, 3, 4, 6),
            "down_rows": (2, 4, 8, 16),
            "down_block": (64, 128, 256, 512),
            "down_warps": (2, 4, 8),
            "down_held": tuple(sorted({0, shape["K"] // 4, shape["K"] // 2, shape["K"]})),
        }

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        sizes = (
            (self.up_rows, self.up_block, shape["D"]),
            (self.down_rows, self.down_block, shape["F"]),
        )
        pieces = triton.cdiv(shape["F"], self.down_block)
        staged = self.up_stages * (2 * self.up_rows + 1) * self.up_block * 2  # bytes
        held = self.down_held * pieces * self.down_rows * self.down_block
        return (
            0 <= self.down_held <= shape["K"]
            and staged <= MAX_STAGED
            and held <= MAX_HELD * 32 * self.down_warps
            and all(
                triton.cdiv(width, block) <= MAX_UNROLL
                and block < 2 * width
                and rows * block <= MAX_TILE
                for rows, block, width in sizes
            )
        )


def _block(width: int, start: int) -> int:
    """The smallest power of two from `start` up that covers `width` in ten steps or fewer."""
    block = min(start, triton.next_power_of_2(width))
    while triton.cdiv(width, block) > 10:
        block *= 2
    return block


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
    gate = tl.load(gate_rows + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_rows + F * D + column, mask=inside, other=0.0).to(tl.float32)
    return tl.fma(gate, x, gates), tl.fma(up, x, ups)


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
):
    """`STAGES` of a pipelined loop over D, or 0 for an unrolled one."""
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
    gate, up = tl.sum(gates, axis=1), tl.sum(ups, axis=1)
    gate, up = gate.to(tl.bfloat16).to(tl.float32), up.to(tl.bfloat16).to(tl.float32)
    hidden = (silu_fp32(gate) * up).to(tl.bfloat16)
    tl.store(hidden_ptr + pair * F + row, hidden, mask=row < F)


@triton.jit
def experts_down_kernel(
    hidden_ptr,
    weights_ptr,
    experts_ptr,
    weight_ptr,
    out_ptr,
    weights_stride,
    scale,
    TOP_K: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    PIECES: tl.constexpr = (F + BLOCK - 1) // BLOCK
    held = ()
    for i in tl.static_range(0, HELD * PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        # The choice of experts was done before `experts_up_kernel` let this kernel start.
        expert = tl.load(experts_ptr + token * TOP_K + i // PIECES)
        held = held + (_piece(weight_ptr, expert, row, (i % PIECES) * BLOCK, D, F, BLOCK),)
    previous_is_done(PDL)
    total = tl.zeros([ROWS], tl.float32)
    for slot in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        pair = token * TOP_K + slot
        expert = tl.load(experts_ptr + pair)
        sums = tl.zeros([ROWS, BLOCK], tl.float32)
        for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
            if slot < HELD:
                weight = held[slot * PIECES + i]
            else:
                weight = _piece(weight_ptr, expert, row, i * BLOCK, D, F, BLOCK)
            column = i * BLOCK + tl.arange(0, BLOCK)[None, :]
            x = tl.load(hidden_ptr + pair * F + column, mask=column < F, other=0.0).to(tl.float32)
            wide = weight.to(tl.float32)  # pyright: ignore[reportAttributeAccessIssue]
            sums = tl.fma(wide, x.broadcast_to(ROWS, BLOCK), sums)
        y = tl.sum(sums, axis=1).to(tl.bfloat16).to(tl.float32)
        weighted = y * tl.load(weights_ptr + token * weights_stride + slot)
        total = weighted if slot == 0 else total + weighted
    tl.store(out_ptr + token * D + row, (total * scale).to(tl.bfloat16), mask=row < D)


@triton.jit
def _piece(weight_ptr, expert, row, first, D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr):
    """Columns `first` and on of some rows of an expert's matrix [D, F]."""
    column = first + tl.arange(0, BLOCK)[None, :]
    inside = (row < D)[:, None] & (column < F)
    return tl.load(
        weight_ptr + expert * (D * F) + row[:, None] * F + column, mask=inside, other=0.0
    )


def shape(node: Any, x: Tensor, weights: Tensor, experts: Tensor) -> dict[str, int]:
    """P pairs, K experts a token, D hidden and F feed-forward width of a call."""
    sizes = {"P": experts.numel(), "K": experts.shape[1]}
    return {**sizes, "D": node.down_proj.shape[1], "F": node.down_proj.shape[2]}


def guard(node: Any, x: Tensor, weights: Tensor, experts: Tensor) -> str | None:
    """Why the kernels do not take this call, or None."""
    if x.dim() != 2 or experts.dim() != 2 or len(x) != len(experts):
        return f"x is {tuple(x.shape)}, experts {tuple(experts.shape)}; they do not fit together"
    if weights.shape != experts.shape or weights.dtype != torch.float32:
        return f"weights are {weights.dtype} {tuple(weights.shape)}, the kernels take torch.float32"
    if row_stride(weights) is None or not 1 <= experts.shape[1] <= 16:
        return f"weights have strides {weights.stride()} and {experts.shape[1]} slots"
    if experts.dtype != torch.int64:
        return f"experts are {experts.dtype}, the kernels take torch.int64"
    if experts.numel() <= MAX_PAIRS and not experts.is_contiguous():
        return f"experts have strides {experts.stride()}, the kernels take contiguous ones"
    count, width, inner = node.down_proj.shape
    if node.gate_up_proj.shape != (count, 2 * inner, width) or x.shape[1] != width:
        return f"weights {tuple(node.gate_up_proj.shape)}, {tuple(node.down_proj.shape)} do not fit"
    if x.stride(1) != 1 or not (
        node.gate_up_proj.is_contiguous() and node.down_proj.is_contiguous()
    ):
        return "x or the weights are not contiguous"
    return outside_domain(x=x, gate_up_proj=node.gate_up_proj, down_proj=node.down_proj)


def build(node: Any, knobs: ExpertsKnobs | None):
    """(x [N, D] BF16, weights [N, K] FP32, experts [N, K] int64) -> [N, D] BF16."""
    activate = swiglu.build(node.activate, None)

    def forward(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        if experts.numel() > MAX_PAIRS:
            return many(node, x, weights, experts, activate)
        return few(node, x, weights, experts, knobs)

    return forward


def few(
    node: Any, x: Tensor, weights: Tensor, experts: Tensor, knobs: ExpertsKnobs | None
) -> Tensor:
    sizes = shape(node, x, weights, experts)
    pairs, top_k, width, inner = sizes["P"], sizes["K"], sizes["D"], sizes["F"]
    chosen = knobs or ExpertsKnobs.heuristic(sizes)
    hidden = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    out = torch.empty((len(experts), width), dtype=x.dtype, device=x.device)
    if pairs == 0:
        return out
    launch(
        experts_up_kernel,
        (pairs, triton.cdiv(inner, chosen.up_rows)),
        x,
        experts,
        node.gate_up_proj,
        hidden,
        x.stride(0),
        TOP_K=top_k,
        D=width,
        F=inner,
        ROWS=chosen.up_rows,
        BLOCK=chosen.up_block,
        STAGES=chosen.up_stages,
        num_warps=chosen.up_warps,
    )
    launch(
        experts_down_kernel,
        (len(experts), triton.cdiv(width, chosen.down_rows)),
        hidden,
        weights,
        experts,
        node.down_proj,
        out,
        row_stride(weights),
        node.combine.scale,
        TOP_K=top_k,
        D=width,
        F=inner,
        ROWS=chosen.down_rows,
        BLOCK=chosen.down_block,
        HELD=chosen.down_held,
        num_warps=chosen.down_warps,
    )
    return out


def many(node: Any, x: Tensor, weights: Tensor, experts: Tensor, activate: Any) -> Tensor:
    by_expert, order = experts.flatten().sort(stable=True)
    every = torch.arange(node.gate_up_proj.shape[0], device=x.device)
    ends = torch.searchsorted(by_expert, every, right=True).to(torch.int32)
    grouped = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]
    rows = x[order // experts.shape[1]]
    gate, up = grouped(rows, node.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    y = grouped(activate(gate, up), node.down_proj.transpose(1, 2), offs=ends)
    places = torch.empty_like(order)
    places.scatter_(0, order, torch.arange(len(order), device=x.device))
    return weighted_sum(y, weights, node.combine.scale, places=places)


def offline_cases() -> list[OfflineCase]:
    """Beam whole, and on one of two and one of eight tensor-parallel ranks."""
    up = dict.fromkeys(("x_ptr", "weight_ptr", "hidden_ptr"), "*bf16")
    up |= {"experts_ptr": "*i64", "x_stride": "i32:16"}
    up |= dict.fromkeys(("TOP_K", "D", "F", "ROWS", "BLOCK", "STAGES"), "constexpr")
    down = dict.fromkeys(("hidden_ptr", "weight_ptr", "out_ptr"), "*bf16")
    down |= {"weights_ptr": "*fp32", "experts_ptr": "*i64", "weights_stride": "i32"}
    down |= {"scale": "fp32"}
    down |= dict.fromkeys(("TOP_K", "D", "F", "ROWS", "BLOCK", "HELD"), "constexpr")
    up = {name: up[name] for name in experts_up_kernel.arg_names if name in up}
    down = {name: down[name] for name in experts_down_kernel.arg_names if name in down}
    cases = []
    for inner in (320, 1280, 2560):
        knobs = ExpertsKnobs.heuristic({"P": 8, "K": 8, "D": 5120, "F": inner})
        sizes = {"TOP_K": 8, "D": 5120, "F": inner}
        values = {**sizes, "ROWS": knobs.up_rows, "BLOCK": knobs.up_block}
        values["STAGES"] = knobs.up_stages
        cases.append(OfflineCase(experts_up_kernel, up, values, knobs.up_warps))
        values = {**sizes, "ROWS": knobs.down_rows, "BLOCK": knobs.down_block}
        values["HELD"] = knobs.down_held
        cases.append(OfflineCase(experts_down_kernel, down, values, knobs.down_warps))
    return cases


CHANGE = Change(
    name="routed_experts",
    region="experts",
    summary="experts read in place, SwiGLU and the weighted sum in their kernels",
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
