"""The weighted sum of a token's expert outputs in one kernel.

    out = R(scale * (w_0 y_0 + w_1 y_1 + ... + w_{K-1} y_{K-1}))

R rounds to BF16; all else is FP32, products and sums rounded apart, in slot order. N tokens, K
experts a token, D hidden. Moves N (K + 1) D BF16 values. The one rounding point is the output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
)

MAX_TOP_K = 16  # the slots are unrolled


@dataclass(frozen=True, kw_only=True)
class CombineKnobs:
    """`block` outputs a program, `warps` of its thread block."""

    block: int
    warps: int

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "CombineKnobs":
        return cls(block=256, warps=1) if shape["N"] <= 8 else cls(block=1024, warps=4)

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        return {"block": (128, 256, 512, 1024, 2048), "warps": (1, 2, 4, 8)}

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        powers = all(n > 0 and n & (n - 1) == 0 for n in (self.block, self.warps))
        return powers and 1 <= self.block // (32 * self.warps) <= 32


@triton.jit
def combine_kernel(
    y_ptr,
    weights_ptr,
    out_ptr,
    weights_stride,
    scale,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < D
    y_row, weights_row = y_ptr + token * K * D, weights_ptr + token * weights_stride
    total = tl.load(y_row + column, mask=valid, other=0.0).to(tl.float32) * tl.load(weights_row)
    for slot in tl.static_range(1, K):  # pyright: ignore[reportGeneralTypeIssues]
        y = tl.load(y_row + slot * D + column, mask=valid, other=0.0).to(tl.float32)
        total += y * tl.load(weights_row + slot)
    tl.store(out_ptr + token * D + column, (total * scale).to(tl.bfloat16), mask=valid)


def shape(node: nn.Module, y: Tensor, weights: Tensor) -> dict[str, int]:
    """N tokens, K experts a token and D hidden of a call."""
    return {"N": y.shape[0], "K": y.shape[1], "D": y.shape[2]}


def guard(node: nn.Module, y: Tensor, weights: Tensor) -> str | None:
    """Why the kernel does not take this call, or None."""
    if y.dim() != 3 or weights.shape != y.shape[:2]:
        return f"y is {tuple(y.shape)}, weights {tuple(weights.shape)}; they do not fit together"
    if not 1 <= y.shape[1] <= MAX_TOP_K:
        return f"y has {y.shape[1]} slots a token, the kernel takes 1 to {MAX_TOP_K}"
    if not y.is_contiguous():
        return f"y has strides {y.stride()}, the kernel takes a contiguous one"
    if weights.dtype != torch.float32:
        return f"weights are {weights.dtype}, the kernel takes torch.float32"
    if weights.device != y.device or row_stride(weights) is None:
        return f"weights are on {weights.device} with strides {weights.stride()}"
    return outside_domain(y=y)


def build(node: Any, knobs: CombineKnobs | None):
    """(y [N, K, D] BF16, weights [N, K] FP32) -> [N, D] BF16."""

    def forward(y: Tensor, weights: Tensor) -> Tensor:
        sizes = shape(node, y, weights)
        chosen = knobs or CombineKnobs.heuristic(sizes)
        out = torch.empty((sizes["N"], sizes["D"]), dtype=y.dtype, device=y.device)
        if out.numel() == 0:
            return out
        launch(
            combine_kernel,
            (sizes["N"], triton.cdiv(sizes["D"], chosen.block)),
            y,
            weights,
            out,
            row_stride(weights),
            node.scale,
            D=sizes["D"],
            K=sizes["K"],
            BLOCK=chosen.block,
            num_warps=chosen.warps,
        )
        return out

    return forward


def offline_cases() -> list[OfflineCase]:
    """Beam's width and top-8: a decode step and a prefill."""
    signature = {
        "y_ptr": "*bf16",
        "weights_ptr": "*fp32",
        "out_ptr": "*bf16",
        "weights_stride": "i32",
        "scale": "fp32",
        **dict.fromkeys(("D", "K", "BLOCK"), "constexpr"),
    }
    cases = []
    for rows in (1, 16384):
        knobs = CombineKnobs.heuristic({"N": rows, "K": 8, "D": 5120})
        values = {"D": 5120, "K": 8, "BLOCK": knobs.block}
        cases.append(OfflineCase(combine_kernel, signature, values, knobs.warps))
    return cases


CHANGE = Change(
    name="combine",
    region="combine",
    summary="weighted sum of the experts' outputs in one kernel",
    contract=Contract(numerics="exact", batch_invariant=True),
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build,
            guard=guard,
            knobs=CombineKnobs,
            shape=shape,
        ),
        inductor_implementation(),
    ),
)
