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
an SM, and the second kernel holds its weights in registers before the first is done. The knob
`engine` may name two kernels in CuTe DSL for one token instead (`optimized.experts_cute`).

Many pairs: sorted by expert for grouped matrix products (`grouped_experts`), whose results are not
put back in order; the weighted sum reads them where they are.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from optimized import experts_cute
from optimized.change import Change, Contract, Implementation
from optimized.combine import weighted_sum
from optimized.expert_knobs import MAX_PAIRS, ExpertsKnobs, RoutedKnobs
from optimized.experts_down import experts_down_across_kernel, experts_down_kernel
from optimized.experts_up import experts_up_kernel, experts_up_loop_kernel
from optimized.gemv_engines import OWN
from optimized.grouped_experts import GroupedKnobs, grouped_experts
from optimized.triton_support import (
    OfflineCase,
    launch,
    outside_domain,
    row_stride,
)

SMS, REGISTERS = 132, 65536  # of an H200, and of each SM
FEWEST = 80  # registers that the second kernel works with


def shape(node: Any, x: Tensor, weights: Tensor, experts: Tensor) -> dict[str, int]:
    """P pairs, K of E experts a token, D hidden and F feed-forward width of a call."""
    count, width, inner = node.down_proj.shape
    return {"P": experts.numel(), "K": experts.shape[1], "E": count, "D": width, "F": inner}


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


def build(node: Any, knobs: ExpertsKnobs | GroupedKnobs | None):
    """(x [N, D] BF16, weights [N, K] FP32, experts [N, K] int64) -> [N, D] BF16.

    ValueError if the knobs name an engine that is unknown or cannot run here.
    """
    if isinstance(knobs, ExpertsKnobs):
        experts_cute.check(knobs.engine)

    def forward(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        if experts.numel() > MAX_PAIRS:
            chosen = knobs if isinstance(knobs, GroupedKnobs) else None
            y, order = grouped_experts(node, x, experts, chosen)
            return weighted_sum(y, weights, node.combine.scale, places=order.places)
        return few(node, x, weights, experts, knobs if isinstance(knobs, ExpertsKnobs) else None)

    return forward


def few(
    node: Any, x: Tensor, weights: Tensor, experts: Tensor, knobs: ExpertsKnobs | None
) -> Tensor:
    sizes = shape(node, x, weights, experts)
    pairs, top_k, width, inner = sizes["P"], sizes["K"], sizes["D"], sizes["F"]
    chosen = knobs or ExpertsKnobs.heuristic(sizes)
    out = torch.empty((len(experts), width), dtype=x.dtype, device=x.device)
    if pairs == 0:
        return out
    if chosen.engine != OWN:
        if not chosen.is_valid(sizes):
            raise ValueError(f"{chosen} do not fit the experts of {sizes}; tune it again")
        matrices = node.gate_up_proj, node.down_proj
        experts_cute.compute(x, weights, experts, *matrices, out, node.combine.scale, chosen)
        return out
    hidden = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(inner, chosen.up_rows)
    blocks: dict[str, Any] = {"TOP_K": top_k, "D": width, "F": inner, "ROWS": chosen.up_rows}
    blocks |= {"BLOCK": chosen.up_block, "STAGES": chosen.up_stages, "num_warps": chosen.up_warps}
    blocks |= {"ROUNDED": False}
    given = x, experts, node.gate_up_proj, hidden, x.stride(0)
    if chosen.up_programs:
        grid = (min(chosen.up_programs, pairs * tiles),)
        launch(experts_up_loop_kernel, grid, *given, pairs, **blocks)
    else:
        launch(experts_up_kernel, (pairs, tiles), *given, **blocks)
    blocks = {"TOP_K": top_k, "D": width, "F": inner, **down_blocks(chosen, sizes)}
    launch(
        experts_down_across_kernel if chosen.down_across else experts_down_kernel,
        (len(experts), triton.cdiv(width, chosen.down_rows)),
        hidden,
        weights,
        experts,
        node.down_proj,
        out,
        row_stride(weights),
        node.combine.scale,
        **blocks,
        num_warps=chosen.down_warps,
        registers=down_registers(chosen, sizes),
    )
    return out


def down_blocks(knobs: ExpertsKnobs, sizes: Mapping[str, int]) -> dict[str, int]:
    """How the second kernel is tiled: it holds slots, or that share of each slot's columns."""
    found = {"ROWS": knobs.down_rows, "BLOCK": knobs.down_block, "HELD": knobs.down_held}
    if not knobs.down_across:
        return found
    held = knobs.down_held * triton.cdiv(sizes["F"], knobs.down_block) // sizes["K"]
    return {**found, "HELD": held, "SLOTS": triton.next_power_of_2(sizes["K"])}


def down_registers(knobs: ExpertsKnobs, sizes: Mapping[str, int]) -> int | None:
    """A limit with which all programs of the second kernel fit a GPU at once; None where there is
    none, or nothing is held across threads."""
    programs = sizes["P"] // sizes["K"] * triton.cdiv(sizes["D"], knobs.down_rows)
    most = REGISTERS // (32 * knobs.down_warps * triton.cdiv(programs, SMS)) // 8 * 8
    return most if knobs.down_across and FEWEST <= most < 255 else None


def offline_cases() -> list[OfflineCase]:
    """Beam whole, and on one of two and one of eight tensor-parallel ranks."""
    up = dict.fromkeys(("x_ptr", "weight_ptr", "hidden_ptr"), "*bf16")
    up |= {"experts_ptr": "*i64", "x_stride": "i32:16", "pairs": "i32"}
    up |= dict.fromkeys(("TOP_K", "D", "F", "ROWS", "BLOCK", "STAGES", "ROUNDED"), "constexpr")
    down = dict.fromkeys(("hidden_ptr", "weight_ptr", "out_ptr"), "*bf16")
    down |= {"weights_ptr": "*fp32", "experts_ptr": "*i64", "weights_stride": "i32"}
    down |= {"scale": "fp32"}
    down |= dict.fromkeys(("TOP_K", "SLOTS", "D", "F", "ROWS", "BLOCK", "HELD"), "constexpr")
    cases = []
    for inner in (320, 1280, 2560):
        knobs = ExpertsKnobs.heuristic({"P": 8, "K": 8, "D": 5120, "F": inner})
        sizes = {"TOP_K": 8, "D": 5120, "F": inner}
        values = {**sizes, "ROWS": knobs.up_rows, "BLOCK": knobs.up_block}
        values |= {"STAGES": knobs.up_stages, "ROUNDED": False}
        for kernel in (experts_up_kernel, experts_up_loop_kernel):
            types = {name: up[name] for name in kernel.arg_names if name in up}
            cases.append(OfflineCase(kernel, types, values, knobs.up_warps))
        across = replace(knobs, down_across=True, down_held=7, down_rows=8, down_block=64)
        plain = replace(knobs, down_across=False)
        kernels = (experts_down_kernel, plain), (experts_down_across_kernel, across)
        for kernel, chosen in kernels[: 2 if inner == 320 else 1]:
            values = {**sizes, **down_blocks(chosen, {"K": 8, "F": inner})}
            types = {name: down[name] for name in kernel.arg_names if name in down}
            most = down_registers(chosen, {"P": 8, "K": 8, "D": 5120})
            cases.append(OfflineCase(kernel, types, values, chosen.down_warps, most))
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
            knobs=RoutedKnobs,
            shape=shape,
        ),
    ),
)
