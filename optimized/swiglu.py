"""silu(gate) * up in one kernel.

    out = R(silu(gate) * up),  silu(g) = g / (1 + exp(-g))

R rounds to BF16; all else is FP32. N rows, F feed-forward width. Moves 3 N F BF16 values. The one
rounding point is the output. Elements are numbered across rows, so that no width wastes lanes; rows
of `gate` and `up` may lie apart, as in the two halves of one projection's output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from optimized.change import Change, Contract, Implementation, KnobValue
from optimized.inductor import inductor_implementation
from optimized.triton_support import (
    OfflineCase,
    begin,
    launch,
    outside_domain,
    row_stride,
    silu_fp32,
)

MAX_ELEMENTS = 2**31 - 2**16  # elements are numbered in int32, the last block included
# Up to so many, 4 elements a thread are faster than 8 or 16: 8 x 2560 take 0.94 us instead of 1.13,
# 128 x 2560 take 1.46 instead of 1.52; 16384 x 2560 are alike at 16 and at 8 (H200, 2026-11-30).
MANY_ELEMENTS = 1 << 21


@dataclass(frozen=True, kw_only=True)
class SwiGLUKnobs:
    """`block` elements a program, `warps` of its thread block; 8 elements are a 16-byte load."""

    block: int
    warps: int

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "SwiGLUKnobs":
        if shape["N"] * shape["F"] <= MANY_ELEMENTS:
            return cls(block=512, warps=4)
        return cls(block=2048, warps=4)

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        return {"block": (256, 512, 1024, 2048, 4096), "warps": (1, 2, 4, 8)}

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        powers = all(n > 0 and n & (n - 1) == 0 for n in (self.block, self.warps))
        return powers and 1 <= self.block // (32 * self.warps) <= 64


@triton.jit
def swiglu_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    gate_stride,
    up_stride,
    elements,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """`ROUNDED` rounds silu before its product."""
    begin(PDL)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = index < elements
    row, column = (index // F).to(tl.int64), index % F
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=valid, other=0.0).to(tl.float32)
    opened = silu_fp32(gate, PDL)
    if ROUNDED:
        opened = opened.to(tl.bfloat16).to(tl.float32)
    tl.store(out_ptr + index, (opened * up).to(tl.bfloat16), mask=valid)


def shape(node: nn.Module, gate: Tensor, up: Tensor) -> dict[str, int]:
    """N rows and F width of a call."""
    return {"N": gate.numel() // max(1, gate.shape[-1]), "F": gate.shape[-1]}


def guard(node: nn.Module, gate: Tensor, up: Tensor) -> str | None:
    """Why the kernel does not take this call, or None."""
    if gate.shape != up.shape:
        return f"gate is {tuple(gate.shape)}, up {tuple(up.shape)}; the kernel takes equal shapes"
    if gate.numel() > MAX_ELEMENTS:
        return f"gate has {gate.numel()} elements, the kernel takes up to {MAX_ELEMENTS}"
    for name, tensor in (("gate", gate), ("up", up)):
        if row_stride(tensor) is None:
            return f"{name} has strides {tensor.stride()}, the kernel takes evenly spaced rows"
    return outside_domain(gate=gate, up=up)


def build(node: nn.Module, knobs: SwiGLUKnobs | None):
    """(gate [..., F], up [..., F]) -> [..., F], BF16."""
    return activation(knobs, rounded=False)


def activation(knobs: SwiGLUKnobs | None, rounded: bool):
    """The same function, silu `rounded` before its product or not."""

    def forward(gate: Tensor, up: Tensor) -> Tensor:
        sizes = {"N": gate.numel() // max(1, gate.shape[-1]), "F": gate.shape[-1]}
        chosen = knobs or SwiGLUKnobs.heuristic(sizes)
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        if out.numel() == 0:
            return out
        launch(
            swiglu_kernel,
            (triton.cdiv(out.numel(), chosen.block),),
            gate,
            up,
            out,
            row_stride(gate),
            row_stride(up),
            out.numel(),
            F=sizes["F"],
            BLOCK=chosen.block,
            ROUNDED=rounded,
            num_warps=chosen.warps,
        )
        return out

    return forward


def cases(width: int, rows: tuple[int, ...], rounded: bool) -> list[OfflineCase]:
    """That many rows of that width."""
    signature = {
        **dict.fromkeys(("gate_ptr", "up_ptr", "out_ptr"), "*bf16"),
        **dict.fromkeys(("gate_stride", "up_stride", "elements"), "i32:16"),
        **dict.fromkeys(("F", "BLOCK", "ROUNDED"), "constexpr"),
    }
    found = []
    for count in rows:
        knobs = SwiGLUKnobs.heuristic({"N": count, "F": width})
        values = {"F": width, "BLOCK": knobs.block, "ROUNDED": rounded}
        found.append(OfflineCase(swiglu_kernel, signature, values, knobs.warps))
    return found


def offline_cases() -> list[OfflineCase]:
    """Beam's dense MLP on one of eight tensor-parallel ranks: a decode step and a prefill."""
    return cases(2560, (1, 16384), rounded=False)


CHANGE = Change(
    name="swiglu",
    region="swiglu",
    summary="silu(gate) * up in one kernel",
    contract=Contract(numerics="transcendental", batch_invariant=True),
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build,
            guard=guard,
            knobs=SwiGLUKnobs,
            shape=shape,
        ),
        inductor_implementation(),
    ),
)
