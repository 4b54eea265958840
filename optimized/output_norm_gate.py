"""Weightless per-head norm of attention's output and its sigmoid gate in one kernel.

    out = R(R(unit_norm(a)) * R(sigmoid(gate)))

R rounds to BF16; all else is FP32. N tokens, H query heads, d head dimension. Moves 3 N H d BF16
values. All three rounding points are kept; none is added. Heads are numbered across tokens; tokens
of `gate` may lie apart, as in a slice of a packed projection's output, and heads of `a`, as
attention over many tokens returns them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.change import Change, Contract, Implementation, KnobValue
from optimized.head_layout import HeadLayout, head_layout
from optimized.inductor import inductor_implementation
from optimized.output_gate import gated
from optimized.triton_support import OfflineCase, begin, launch, outside_domain, row_stride

MAX_ROWS = 2**31 - 2**16  # heads are numbered in int32, the last block included
MAX_DIM = 1024
FEW_ELEMENTS = 1 << 18  # below, small blocks spread over more SMs


@dataclass(frozen=True, kw_only=True)
class NormGateKnobs:
    """`rows` (heads of tokens) a program, `warps` of its thread block; R rows of d values."""

    rows: int
    warps: int

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "NormGateKnobs":
        few = shape["R"] * shape["d"] <= FEW_ELEMENTS
        width = triton.next_power_of_2(shape["d"])
        rows = max(1, (256 if few else 2048) // width)
        return cls(rows=rows, warps=1 if few else max(1, min(4, rows * width // 256)))

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        return {"rows": (1, 2, 4, 8, 16, 32, 64), "warps": (1, 2, 4, 8)}

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        values = self.rows * triton.next_power_of_2(shape["d"])
        return (self.warps == 1 or values >= 32 * self.warps) and values <= 2048 * self.warps


@triton.jit
def output_norm_gate_kernel(
    a_ptr,
    gate_ptr,
    out_ptr,
    a_tokens,
    a_sequence,
    a_token,
    a_head,
    gate_stride,
    rows,
    eps,
    H: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    valid = (row < rows)[:, None] & (column < DIM)
    token = (row // H).to(tl.int64)[:, None]
    head = (row % H).to(tl.int64)[:, None]
    within = head * DIM + column
    a_at = token // a_tokens * a_sequence + token % a_tokens * a_token + head * a_head + column
    a = tl.load(a_ptr + a_at, mask=valid, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + within, mask=valid, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(a * a, axis=1) * (1.0 / DIM) + eps)
    normed = (a * inverse[:, None]).to(tl.bfloat16).to(tl.float32)
    out = out_ptr + row.to(tl.int64)[:, None] * DIM + column
    tl.store(out, gated(normed, gate, PDL), mask=valid)


def shape(node: Any, a: Tensor, gate: Tensor) -> dict[str, int]:
    """R rows (heads of all tokens) of d values of a call."""
    return {"R": a.numel() // max(1, a.shape[-1]), "d": a.shape[-1]}


def guard(node: Any, a: Tensor, gate: Tensor) -> str | None:
    """Why the kernel does not take this call, or None."""
    if a.dim() < 2 or a.shape != gate.shape:
        return f"a {tuple(a.shape)}, gate {tuple(gate.shape)} do not match"
    if not 0 < a.shape[-1] <= MAX_DIM or a.numel() > MAX_ROWS * a.shape[-1]:
        return f"a is {tuple(a.shape)}, the kernel takes heads of up to {MAX_DIM}"
    if head_layout(a) is None:
        return f"a has strides {a.stride()}, the kernel takes contiguous heads, evenly spaced"
    if row_stride(gate, inner=2) is None:
        return f"gate has strides {gate.stride()}, the kernel takes evenly spaced tokens"
    return outside_domain(a=a, gate=gate)


def build(node: Any, knobs: NormGateKnobs | None):
    """(a [..., H, d], gate [..., H, d]) -> [..., H, d], BF16."""

    def forward(a: Tensor, gate: Tensor) -> Tensor:
        sizes = shape(node, a, gate)
        chosen = knobs or NormGateKnobs.heuristic(sizes)
        out = torch.empty(a.shape, dtype=a.dtype, device=a.device)
        if out.numel() == 0:
            return out
        layout = head_layout(a)
        assert layout is not None  # the guard has seen to it
        launch(
            output_norm_gate_kernel,
            (triton.cdiv(sizes["R"], chosen.rows),),
            a,
            gate,
            out,
            *layout,
            row_stride(gate, inner=2),
            sizes["R"],
            node.eps,
            H=a.shape[-2],
            DIM=sizes["d"],
            WIDTH=triton.next_power_of_2(sizes["d"]),
            ROWS=chosen.rows,
            num_warps=chosen.warps,
        )
        return out

    return forward


def offline_cases() -> list[OfflineCase]:
    """One of eight tensor-parallel ranks, 16 heads of 64: a decode step and a prefill."""
    kinds: dict[str, str] = dict.fromkeys(("a_ptr", "gate_ptr", "out_ptr"), "*bf16")
    sizes = [*(f"a_{name}" for name in HeadLayout._fields), "gate_stride", "rows"]
    kinds |= dict.fromkeys(sizes, "i32:16") | {"eps": "fp32"}
    cases = []
    for tokens in (1, 16384):
        knobs = NormGateKnobs.heuristic({"R": tokens * 16, "d": 64})
        values = {"H": 16, "DIM": 64, "WIDTH": 64, "ROWS": knobs.rows}
        types = kinds | dict.fromkeys(values, "constexpr")
        cases.append(OfflineCase(output_norm_gate_kernel, types, values, knobs.warps))
    return cases


CHANGE = Change(
    name="output_norm_gate",
    region="output_norm_gate",
    summary="per-head output norm and sigmoid gate in one kernel",
    contract=Contract(numerics="reduction"),
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build,
            guard=guard,
            knobs=NormGateKnobs,
            shape=shape,
        ),
        inductor_implementation(),
    ),
)
