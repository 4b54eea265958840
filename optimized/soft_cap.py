"""The logits' soft cap in one kernel.

    out = R(R(tanh(R(R(logits * scale) / cap))) * cap)

R rounds to BF16; all else is FP32. Moves 2 values a logit. All four rounding points are kept; none
is added. Elements are numbered across rows, so the logits have to be contiguous. Inductor is no
second implementation: it leaves out the first rounding (torch 2.13, CPU), and the judge refuses it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.change import Change, Contract, Implementation, KnobValue
from optimized.triton_support import OfflineCase, begin, exp_fp32, launch, outside_domain

MAX_ELEMENTS = 2**31 - 2**16  # elements are numbered in int32, the last block included
FEW_ELEMENTS = 1 << 18  # below, small blocks spread over more SMs
SMALL = tl.constexpr(0.625)  # up to here 1 - 2 / (e^2x + 1) would cancel
# (tanh(x) / x - 1) / x^2 by powers of x^2, up to `SMALL` to 0.07 FP32 ULPs of tanh(x): a weighted
# least-squares fit.
TANH_0 = tl.constexpr(-0.3333328366279602)
TANH_1 = tl.constexpr(0.13331490755081177)
TANH_2 = tl.constexpr(-0.05374349653720856)
TANH_3 = tl.constexpr(0.020650582388043404)
TANH_4 = tl.constexpr(-0.005717039108276367)


@dataclass(frozen=True, kw_only=True)
class SoftCapKnobs:
    """`block` elements a program, `warps` of its thread block; 8 elements are a 16-byte load."""

    block: int
    warps: int

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "SoftCapKnobs":
        few = shape["N"] * shape["V"] <= FEW_ELEMENTS
        return cls(block=256, warps=1) if few else cls(block=2048, warps=4)

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        return {"block": (128, 256, 512, 1024, 2048, 4096), "warps": (1, 2, 4, 8)}

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        return 1 <= self.block // (32 * self.warps) <= 64


@triton.jit
def tanh_fp32(x):
    """tanh(x) in FP32 to a few ULPs, of any sign and size."""
    square = x * x
    series = tl.fma(square, TANH_4, TANH_3)
    series = tl.fma(square, series, TANH_2)
    series = tl.fma(square, series, TANH_1)
    series = tl.fma(square, series, TANH_0)
    small = tl.fma(x * square, series, x)
    small = tl.where(x == 0, x, small)  # with its sign
    size = tl.abs(x)
    large = 1.0 - tl.math.div_rn(2.0, exp_fp32(2.0 * size) + 1.0)
    return tl.where(size <= SMALL, small, tl.where(x < 0, -large, large))


@triton.jit
def _rounded(x):
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def soft_cap_kernel(
    logits_ptr,
    out_ptr,
    elements,
    scale,
    inverse_cap,
    cap,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = index < elements
    x = tl.load(logits_ptr + index, mask=valid, other=0.0).to(tl.float32)
    x = _rounded(tanh_fp32(_rounded(_rounded(x * scale) * inverse_cap)))
    tl.store(out_ptr + index, (x * cap).to(tl.bfloat16), mask=valid)


def shape(node: Any, logits: Tensor) -> dict[str, int]:
    """N rows and V logits a row of a call."""
    return {"N": logits.numel() // max(1, logits.shape[-1]), "V": logits.shape[-1]}


def guard(node: Any, logits: Tensor) -> str | None:
    """Why the kernel does not take this call, or None."""
    if logits.numel() > MAX_ELEMENTS:
        return f"logits have {logits.numel()} elements, the kernel takes up to {MAX_ELEMENTS}"
    if not logits.is_contiguous():
        return f"logits have strides {logits.stride()}, the kernel takes contiguous ones"
    return outside_domain(logits=logits)


def capped(
    kernel: Any, logits: Tensor, dtype: torch.dtype, *numbers: float, knobs: SoftCapKnobs | None
) -> Tensor:
    """logits [..., V] BF16, contiguous -> [..., V] of `dtype`, by a kernel that takes elements one
    by one and these numbers."""
    chosen = knobs or SoftCapKnobs.heuristic(shape(None, logits))
    out = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    if out.numel() == 0:
        return out
    grid = (triton.cdiv(out.numel(), chosen.block),)
    launched = {"BLOCK": chosen.block, "num_warps": chosen.warps}
    launch(kernel, grid, logits, out, out.numel(), *numbers, **launched)
    return out


def build(node: Any, knobs: SoftCapKnobs | None):
    """logits [..., V] BF16 -> [..., V] BF16."""
    numbers = node.scale, 1.0 / node.cap, node.cap  # eager mode on a GPU multiplies by 1 / cap, too
    return lambda logits: capped(soft_cap_kernel, logits, logits.dtype, *numbers, knobs=knobs)


def offline_cases() -> list[OfflineCase]:
    """25256 logits, as on one of eight tensor-parallel ranks: a decode step and 16384 rows."""
    signature = {"logits_ptr": "*bf16", "out_ptr": "*bf16", "elements": "i32:16"}
    signature |= dict.fromkeys(("scale", "inverse_cap", "cap"), "fp32") | {"BLOCK": "constexpr"}
    cases = []
    for rows in (1, 16384):
        knobs = SoftCapKnobs.heuristic({"N": rows, "V": 25256})
        values = {"BLOCK": knobs.block}
        cases.append(OfflineCase(soft_cap_kernel, signature, values, knobs.warps))
    return cases


CHANGE = Change(
    name="soft_cap",
    region="soft_cap",
    summary="the logits' scale and soft cap in one kernel",
    contract=Contract(numerics="transcendental", batch_invariant=True),
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build,
            guard=guard,
            knobs=SoftCapKnobs,
            shape=shape,
        ),
    ),
)
