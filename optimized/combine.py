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
    places_ptr,
    out_ptr,
    weights_stride,
    scale,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < D
    weights_row = weights_ptr + token * weights_stride
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
        place = token * K + slot
        if PLACED:
            place = tl.load(places_ptr + place).to(tl.int64)
        y = tl.load(y_ptr + place * D + column, mask=valid, other=0.0).to(tl.float32)
        weighted = y * tl.load(weights_row + slot)
        total = weighted if slot == 0 else total + weighted
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
        return weighted_sum(y, weights, node.scale, knobs=knobs)

    return forward


def weighted_sum(
    y: Tensor,
    weights: Tensor,
    scale: float,
    *,
    places: Tensor | None = None,
    knobs: CombineKnobs | None = None,
) -> Tensor:
    """sum_k weights[n, k] y[n, k] times `scale` -> [N, D] BF16, for y [N, K, D].

    With `places` [N * K] int32, the row of pair i is y.flatten(0, 1)[places[i]].
    """
    tokens, top_k, width = (*weights.shape, y.shape[-1])
    chosen = knobs or CombineKnobs.heuristic({"N": tokens, "K": top_k, "D": width})
    out = torch.empty((tokens, width), dtype=y.dtype, device=y.device)
    if out.numel() == 0:
        return out
    launch(
        combine_kernel,
        (tokens, triton.cdiv(width, chosen.block)),
        y,
        weights,
        weights if places is None else places,
        out,
        row_stride(weights),
        scale,
        D=width,
        K=top_k,
        BLOCK=chosen.block,
        PLACED=places is not None,
        num_warps=chosen.warps,
    )
    return out


def offline_cases() -> list[OfflineCase]:
    """Beam's width and top-8: a decode step and a prefill."""
    signature = {
        "y_ptr": "*bf16",
        "weights_ptr": "*fp32",
        "places_ptr": "*i32",
        "out_ptr": "*bf16",
        "weights_stride": "i32",
        "scale": "fp32",
        **dict.fromkeys(("D", "K", "BLOCK", "PLACED"), "constexpr"),
    }
    cases = []
    for rows in (1, 16384):
        knobs = CombineKnobs.heuristic({"N": rows, "K": 8, "D": 5120})
        values = {"D": 5120, "K": 8, "BLOCK": knobs.block, "PLACED": rows > 1}
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
