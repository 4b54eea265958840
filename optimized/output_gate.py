"""Attention's sigmoid output gate in one kernel.

    out = R(a * R(sigmoid(R(gate + bias))))

R rounds to BF16; all else is FP32. N tokens, H query heads, d head dimension; one bias per head.
Moves 3 N H d BF16 values. All three rounding points are kept; none is added. Elements are numbered
across tokens, so that no width wastes lanes; tokens of `gate` may lie apart, as in a slice of a
packed projection's output, and heads of `a`, as attention over many tokens returns them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from optimized.change import Change, Contract, Implementation, KnobValue
from optimized.head_layout import HeadLayout, head_layout
from optimized.inductor import inductor_implementation
from optimized.triton_support import (
    OfflineCase,
    begin,
    launch,
    outside_domain,
    row_stride,
    sigmoid_fp32,
)

MAX_ELEMENTS = 2**31 - 2**16  # elements are numbered in int32, the last block included
# Up to so many, 4 elements a thread are faster than 8: 8 x 768 take 0.92 us instead of 1.12,
# 128 x 768 take 1.07 instead of 1.26 (H200, 2026-11-30).
FEW_ELEMENTS = 1 << 18


@dataclass(frozen=True, kw_only=True)
class GateKnobs:
    """`block` elements a program, `warps` of its thread block; 8 elements are a 16-byte load."""

    block: int
    warps: int

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "GateKnobs":
        if shape["N"] * shape["W"] <= FEW_ELEMENTS:
            return cls(block=512, warps=4)
        return cls(block=2048, warps=4)

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        return {"block": (128, 256, 512, 1024, 2048, 4096), "warps": (1, 2, 4, 8)}

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        powers = all(n > 0 and n & (n - 1) == 0 for n in (self.block, self.warps))
        return powers and 1 <= self.block // (32 * self.warps) <= 64


@triton.jit
def gated(a, gate, PDL: tl.constexpr):
    """R(a * R(sigmoid(gate))), of values rounded before, all FP32."""
    share = sigmoid_fp32(gate, PDL).to(tl.bfloat16).to(tl.float32)
    return (a * share).to(tl.bfloat16)


@triton.jit
def output_gate_kernel(
    a_ptr,
    gate_ptr,
    bias_ptr,
    out_ptr,
    a_tokens,
    a_sequence,
    a_token,
    a_head,
    gate_stride,
    elements,
    W: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    APART: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """`VECTOR` consecutive elements are of one head and lie side by side, as the compiler cannot
    know of a width that is no power of two. `APART`: tokens of `a` are not evenly spaced rows."""
    begin(PDL)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = tl.max_constancy(index < elements, [VECTOR])
    row, column = (index // W).to(tl.int64), index % W
    head = tl.max_constancy(column // HEAD_DIM, [VECTOR])
    if APART:
        a_at = row // a_tokens * a_sequence + row % a_tokens * a_token
        a_at += head.to(tl.int64) * a_head + column % HEAD_DIM
    else:
        a_at = row * a_token + column
    gate_at = row * gate_stride + column
    a_at = tl.max_contiguous(tl.multiple_of(a_at, [VECTOR]), [VECTOR])
    gate_at = tl.max_contiguous(tl.multiple_of(gate_at, [VECTOR]), [VECTOR])
    a = tl.load(a_ptr + a_at, mask=valid, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + gate_at, mask=valid, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + head, mask=valid, other=0.0).to(tl.float32)
    biased = (gate + bias).to(tl.bfloat16).to(tl.float32)
    tl.store(out_ptr + index, gated(a, biased, PDL), mask=valid)


def shape(node: nn.Module, a: Tensor, gate: Tensor, bias: Tensor) -> dict[str, int]:
    """N tokens and W = H d values a token of a call."""
    width = a.shape[-2] * a.shape[-1]
    return {"N": a.numel() // max(1, width), "W": width}


def guard(node: nn.Module, a: Tensor, gate: Tensor, bias: Tensor) -> str | None:
    """Why the kernel does not take this call, or None."""
    if a.dim() < 2 or a.shape != gate.shape or bias.shape != a.shape[-2:-1]:
        return (
            f"a {tuple(a.shape)}, gate {tuple(gate.shape)}, bias {tuple(bias.shape)} do not match"
        )
    if a.numel() > MAX_ELEMENTS:
        return f"a has {a.numel()} elements, the kernel takes up to {MAX_ELEMENTS}"
    if head_layout(a) is None:
        return f"a has strides {a.stride()}, the kernel takes contiguous heads, evenly spaced"
    if row_stride(gate, inner=2) is None:
        return f"gate has strides {gate.stride()}, the kernel takes evenly spaced tokens"
    if row_stride(bias) is None:
        return f"bias has strides {bias.stride()}, the kernel takes a contiguous one"
    return outside_domain(a=a, gate=gate, bias=bias)


def build(node: nn.Module, knobs: GateKnobs | None):
    """(a [..., H, d], gate [..., H, d], bias [H]) -> [..., H, d], BF16."""

    def forward(a: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
        sizes = shape(node, a, gate, bias)
        chosen = knobs or GateKnobs.heuristic(sizes)
        out = torch.empty(a.shape, dtype=a.dtype, device=a.device)
        if out.numel() == 0:
            return out
        layout = head_layout(a)
        assert layout is not None  # the guard has seen to it
        launch(
            output_gate_kernel,
            (triton.cdiv(out.numel(), chosen.block),),
            a,
            gate,
            bias,
            out,
            *layout,
            row_stride(gate, inner=2),
            out.numel(),
            W=sizes["W"],
            HEAD_DIM=a.shape[-1],
            APART=layout.head != a.shape[-1] or layout.tokens != sizes["N"],
            BLOCK=chosen.block,
            VECTOR=8 if aligned(a, layout, gate) else 1,
            num_warps=chosen.warps,
        )
        return out

    return forward


def aligned(a: Tensor, layout: HeadLayout, gate: Tensor) -> bool:
    """Whether groups of 8 elements, counted across tokens, are 16 aligned bytes of one head."""
    tokens = row_stride(gate, inner=2) or 0
    starts = a.data_ptr() % 16 == gate.data_ptr() % 16 == 0
    return starts and layout.aligned and a.shape[-1] % 8 == tokens % 8 == 0


def offline_cases() -> list[OfflineCase]:
    """Beam on one of eight tensor-parallel ranks (6 heads of 128): a decode step and a prefill, of
    attention that returns its heads side by side, and apart."""
    layout = [f"a_{name}" for name in HeadLayout._fields]
    signature = {
        **dict.fromkeys(("a_ptr", "gate_ptr", "bias_ptr", "out_ptr"), "*bf16"),
        **dict.fromkeys((*layout, "gate_stride", "elements"), "i32:16"),
        **dict.fromkeys(("W", "HEAD_DIM", "APART", "BLOCK", "VECTOR"), "constexpr"),
    }
    cases = []
    for rows, apart in ((1, False), (16384, False), (16384, True)):
        knobs = GateKnobs.heuristic({"N": rows, "W": 768})
        values = {"W": 768, "HEAD_DIM": 128, "APART": apart, "BLOCK": knobs.block, "VECTOR": 8}
        cases.append(OfflineCase(output_gate_kernel, signature, values, knobs.warps))
    return cases


CHANGE = Change(
    name="output_gate",
    region="output_gate",
    summary="sigmoid output gate in one kernel",
    contract=Contract(numerics="transcendental", batch_invariant=True),
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build,
            guard=guard,
            knobs=GateKnobs,
            shape=shape,
        ),
        inductor_implementation(),
    ),
)
