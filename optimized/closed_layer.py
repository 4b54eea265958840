"""A layer of one token whose experts' last kernel crosses the boundary after them; used by
`boundary_router` with its knob `closes`.

`experts_down_close` has the equations and the kernel. The experts are `routed_experts`', with the
launch knobs of the change that replaced them, if one did; a boundary that was replaced is left out
with its kernel, and its knobs say how a row is held.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from optimized import combined_boundary, routed_experts
from optimized.change import shape_key
from optimized.expert_knobs import ExpertsKnobs
from optimized.experts_down_close import Closing
from optimized.gemv_engines import CannotServe
from optimized.residual_boundary import BoundaryKnobs, piece
from optimized.triton_support import outside_domain, row_stride


def counter(node: Any) -> Tensor:
    """What a layer's programs count themselves by, on its router's device: [1] int32."""
    return torch.zeros(1, dtype=torch.int32, device=node.mlp.gate.weight.device)


def close(
    node: Any,
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    h: Tensor,
    next_norm: Tensor,
    count: Tensor,
) -> tuple[Tensor, Tensor]:
    """(x [1, 1, D] BF16, its experts' weights [1, K] FP32, experts [1, K] int64, h [1, 1, D] BF16,
    w_pre [D] BF16, `counter`) -> (h, x [1, 1, D] BF16) after experts and boundary.

    CannotServe, with the reason, where the kernel cannot do it: nothing else does instead.
    """
    rows, boundary = x.flatten(0, 1), node.mlp_boundary
    post = node.post_feedforward_layernorm.weight
    sizes = routed_experts.shape(node.mlp.experts, rows, weights, experts)
    knobs, split = _tuned(node.mlp.experts, sizes), is_split(boundary, sizes["D"])
    held = piece(sizes["D"], split)
    reason = (
        outside(node, x, h, post, next_norm)
        or routed_experts.guard(node.mlp.experts, rows, weights, experts)
        or routed_experts.cannot_close(sizes, knobs, held)
    )
    if reason is not None:
        raise CannotServe(f"the experts do not close the layer: {reason}; choose closes = false")
    h_out, x_out = (torch.empty_like(x) for _ in "hx")
    scales, eps = (boundary.y_scale, boundary.h_scale), (boundary.eps, boundary.eps)
    closing = Closing(h, post, next_norm, scales, eps, h_out, x_out, count, held)
    routed_experts.few(node.mlp.experts, rows, weights, experts, knobs, closing)
    return h_out, x_out


def outside(node: Any, x: Tensor, h: Tensor, post: Tensor, pre: Tensor) -> str | None:
    """Why this layer's boundary is not the kernel's, or None."""
    if (reason := combined_boundary.lacks(node)) is not None:
        return reason
    if (applied := getattr(node.mlp.rank_sum, "applied", None)) is not None:
        return f"{applied} comes between the experts and the boundary"
    if not all(row_stride(t) is not None for t in (x, h, post, pre)):
        return "x, h or a norm's weight is not contiguous"
    return outside_domain(x=x, h=h, post_weight=post, pre_weight=pre)


def _tuned(experts: Any, sizes: Mapping[str, int]) -> ExpertsKnobs | None:
    """The launch knobs of the change that replaced the experts, or None."""
    knobs = getattr(experts, "knobs", {}).get(shape_key(sizes))
    return knobs if isinstance(knobs, ExpertsKnobs) else None


def is_split(boundary: Any, width: int) -> bool:
    """Whether the boundary of one row holds it in pieces."""
    sizes = {"T": 1, "D": width}
    knobs = getattr(boundary, "knobs", {}).get(shape_key(sizes))
    return (knobs if isinstance(knobs, BoundaryKnobs) else BoundaryKnobs.heuristic(sizes)).split
