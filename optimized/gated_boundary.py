"""Post-norm, gated residual add and next pre-norm in one kernel.

    y' = R(unit_norm(y)), or R(unit_norm(R(y * R(1 + w_post))))
    h' = R(alpha * h + beta * y')
    x  = R(rms_norm(h') * R(1 + w_pre)), or with w_pre as it is
    beta = sigmoid(g / t),  alpha = sqrt(max(sigmoid(-g / t) * (1 + beta), floor))

R rounds to BF16; all else is FP32. T rows (tokens), D hidden, g [D] FP32. One program holds whole
rows in registers, so that each value crosses memory once: 4 D BF16 values a row, 64 KiB at D =
8192, the weights and the gate. The gate's two shares are computed before the previous kernel is
done. All rounding points are kept; none is added. The kernel is `residual_boundary`'s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optimized import residual_boundary
from optimized.change import Change, Contract, Implementation, KnobValue
from optimized.inductor import inductor_implementation
from optimized.residual_boundary import FEW_ROWS, BoundaryKnobs, cases, cross
from optimized.triton_support import OfflineCase


@dataclass(frozen=True, kw_only=True)
class GatedBoundaryKnobs(BoundaryKnobs):
    """As `BoundaryKnobs`. A program that goes through several rows computes the gate's shares once,
    and holds them."""

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "GatedBoundaryKnobs":
        most = max(1, shape["D"] // 256)  # 8 elements, a 16-byte load, for every thread
        few = shape["T"] <= FEW_ROWS
        warps = min(32 if few else 16, 1 << most.bit_length() - 1)
        return cls(warps=warps, rows=1 if few else 4, split=False)

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        return {**super().candidates(shape), "warps": (4, 8, 16, 32)}


def shape(
    node: Any, y: Tensor, h: Tensor, gate: Tensor, post: Tensor | None, pre: Tensor
) -> dict[str, int]:
    """T rows and D hidden of a call."""
    return residual_boundary.shape(node, y, h, pre, pre)


def guard(
    node: Any, y: Tensor, h: Tensor, gate: Tensor, post: Tensor | None, pre: Tensor
) -> str | None:
    """Why the kernel does not take this call, or None."""
    if gate.shape != y.shape[-1:] or gate.dtype != torch.float32 or not gate.is_contiguous():
        return f"gate is {gate.dtype} {tuple(gate.shape)}, the kernel takes contiguous fp32 [D]"
    if node.scaled != (post is not None):
        return "post_weight does not fit the node's post-norm"
    return residual_boundary.guard(node, y, h, pre if post is None else post, pre)


def build(node: Any, knobs: BoundaryKnobs | None):
    """(y, h [..., D] BF16, gate [D] FP32, post_weight [D] BF16 or None, pre_weight [D] BF16)
    -> (h, x [..., D] BF16)."""
    gating = 1.0 / node.temperature, node.floor
    eps = node.post_eps, node.eps

    def forward(
        y: Tensor, h: Tensor, gate: Tensor, post_weight: Tensor | None, pre_weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        sizes = shape(node, y, h, gate, post_weight, pre_weight)
        chosen = knobs or GatedBoundaryKnobs.heuristic(sizes)
        return cross(y, h, post_weight, pre_weight, gate, gating, eps, chosen, node.centred)

    return forward


def offline_cases() -> list[OfflineCase]:
    """8192 wide: after attention, and after the experts."""
    kinds = [("unit", True, True), ("input_scaled", True, True)]
    return cases(8192, GatedBoundaryKnobs, kinds)


CHANGE = Change(
    name="gated_boundary",
    region="gated_residual_boundary",
    summary="post-norm, gated residual add and next pre-norm in one kernel",
    contract=Contract(numerics="reduction", batch_invariant=False),
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build,
            guard=guard,
            knobs=GatedBoundaryKnobs,
            shape=shape,
        ),
        inductor_implementation(),
    ),
)
