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
an SM, and the second kernel holds its weights in registers before the first is done. Asking for all
of them in the first, behind its own, made a step slower. The knob `engine` may name two kernels in
CuTe DSL for one token instead (`optimized.experts_cute`).

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
from optimized.experts_up import experts_up, experts_up_kernel, experts_up_loop_kernel
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
    chosen = knobs or ExpertsKnobs.heuristic(sizes)
    experts = experts.contiguous()  # PyTorch's router leaves them in the rows of a sort
    out = torch.empty((len(experts), sizes["D"]), dtype=x.dtype, device=x.device)
    if sizes["P"] == 0:
        return out
    if chosen.engine != OWN:
        if not chosen.is_valid(sizes):
            raise ValueError(f"{chosen} do not fit the experts of {sizes}; tune it again")
        matrices = node.gate_up_proj, node.down_proj
        experts_cute.compute(x, weights, experts, *matrices, out, node.combine.scale, chosen)
        return out
    names = "rows", "block", "stages", "warps", "programs"
    up = {name: getattr(chosen, f"up_{name}") for name in names}
    hidden = experts_up(x, experts, node.gate_up_proj, up, rounded=False)
    launch(
        experts_down_across_kernel if chosen.down_across else experts_down_kernel,
        (len(experts), triton.cdiv(sizes["D"], chosen.down_rows)),
        hidden,
        weights,
        experts,
        node.down_proj,
        out,
        row_stride(weights),
        node.combine.scale,
        TOP_K=sizes["K"],
        D=sizes["D"],
        F=sizes["F"],
        **down_blocks(chosen, sizes),
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
    kinds = dict.fromkeys(("x_ptr", "weight_ptr", "hidden_ptr", "out_ptr"), "*bf16")
    kinds |= {"weights_ptr": "*fp32", "experts_ptr": "*i64", "x_stride": "i32:16"}
    kinds |= {"pairs": "i32", "weights_stride": "i32", "scale": "fp32"}
    cases = []

    def add(kernel: Any, warps: int, registers: int | None = None, **values: Any) -> None:
        types = kinds | dict.fromkeys(values, "constexpr")
        ordered = {n: types[n] for n in kernel.arg_names if n != "PDL"}
        cases.append(OfflineCase(kernel, ordered, values, warps, registers))

    for inner in (320, 1280, 2560):
        knobs = ExpertsKnobs.heuristic({"P": 8, "K": 8, "D": 5120, "F": inner})
        sizes = {"TOP_K": 8, "D": 5120, "F": inner}
        up = {**sizes, "ROWS": knobs.up_rows, "BLOCK": knobs.up_block}
        up |= {"STAGES": knobs.up_stages, "ROUNDED": False}
        for kernel in (experts_up_kernel, experts_up_loop_kernel):
            add(kernel, knobs.up_warps, **up)
        plain = down_blocks(replace(knobs, down_across=False), {"K": 8, "F": inner})
        add(experts_down_kernel, knobs.down_warps, **sizes, **plain)
        if inner != 320:
            continue
        across = replace(knobs, down_held=7, down_rows=8, down_block=64)
        down = {**sizes, **down_blocks(across, {"K": 8, "F": inner})}
        most = down_registers(across, {"P": 8, "K": 8, "D": 5120})
        add(experts_down_across_kernel, across.down_warps, most, **down)
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
