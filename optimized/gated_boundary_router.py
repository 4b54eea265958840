"""The gated boundary before latent experts and the router's logits in one kernel, a few tokens.

    y'      = R(unit_norm(y))
    h       = R(alpha h + beta y')
    x       = R(rms_norm(h) R(1 + w_pre))
    logits  = float(x) W^T                        FP32 throughout, no TF32

R rounds to BF16; alpha, beta and what else the norms can be as in `gated_boundary`. N tokens, D
hidden, E experts. The rest of the layer runs as it is, in the experts' own modules, the choice of
experts by `router_topk`'s kernel. All rounding points are kept; none is added. The kernel is
`boundary_router`'s: every block that multiplies some of the router's rows repeats the boundary, 4 D
BF16 values and the gate from the L2 cache, and reads its rows once: 4 E D bytes, 8.4 MB or 1.9 us
at an H200's 4.33 TB/s (2026-11-29) for 256 x 8192.

Experts that `latent_moe` has replaced go on from the logits in its kernels, which leaves as many
kernels as without this change: its router and pooler, which shared one, are in two. Which is faster
is the loop's to find. The boundary in front of both at once does not fit: 16.8 MB of their weights
and 147 KB of the boundary's values in each of 132 blocks, 36 MB, are more than the registers' 34.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from optimized import boundary_router, latent_moe
from optimized.boundary_router import BoundaryRouterKnobs, enter, offline_case, shape
from optimized.change import Change, Contract, Implementation
from optimized.router_topk import choose
from optimized.triton_support import OfflineCase


@dataclass(frozen=True, kw_only=True)
class GatedRouterKnobs(BoundaryRouterKnobs):
    """As `BoundaryRouterKnobs`. The gate's two shares are held, too."""

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "GatedRouterKnobs":
        most = max(1, triton.next_power_of_2(shape["D"]) // 32)
        return cls(rows=2, warps=16 if shape["D"] > 2048 else min(4, most), split=False)

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        more = BoundaryRouterKnobs(rows=self.rows + 2, warps=self.warps, split=self.split)
        return more.is_valid(shape)


PARTS = "biased_router", "gated_residual_boundary"  # of a layer that is served


def unsupported(node: Any) -> str | None:
    """Why the kernels serve no call of this layer, or None."""
    return boundary_router.lacks(node, *PARTS)


def guard(node: Any, h: Tensor, x: Tensor, step: Any, cache: Any, next_norm: Tensor) -> str | None:
    """Why the kernel does not take this call, or None."""
    return boundary_router.outside(node, h, x, *PARTS) or outside_experts(node, x)


def outside_experts(node: Any, x: Tensor) -> str | None:
    """Why the layer's other parts are not what `experts_of` calls for such x, or None."""
    if getattr(node.mlp, "applied", None) not in (None, latent_moe.CHANGE.name):
        return f"the experts as a whole were replaced by {node.mlp.applied}"
    tested = getattr(node.mlp.forward, "guard", None)
    if tested is not None and (outside := tested.outside((x,))) is not None:
        return f"the experts are outside what they were tested on: {outside}"
    if node.attn_boundary.scaled:
        return "the boundary after attention has a weighted post-norm"
    gate = node.post_attention_residual_gate.gate
    return None if gate.is_contiguous() else f"the gate has strides {gate.stride()}"


def build(node: Any, knobs: GatedRouterKnobs | None):
    """The function of `reference.muse_spark.Layer.forward` for a few tokens."""

    def forward(h: Tensor, x: Tensor, step: Any, cache: Any, next_norm: Tensor):
        chosen = knobs or GatedRouterKnobs.heuristic(shape(node, h, x))
        y = node.self_attn(x, step, cache)
        h, x, logits = cross_and_route(node, y, h, chosen)
        return leave(node, experts_of(node.mlp, x, logits[None]), h, next_norm)

    return forward


def cross_and_route(
    node: Any, y: Tensor, h: Tensor, knobs: BoundaryRouterKnobs, *, tf32: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, h [B, T, D]) -> (h, x [B, T, D], logits [N, E] FP32)."""
    boundary, gate = node.attn_boundary, node.post_attention_residual_gate.gate
    return enter(
        y,
        h,
        None,
        node.pre_feedforward_layernorm.weight,
        gate,
        node.mlp.gate.weight,
        (1.0 / boundary.temperature, boundary.floor),
        (boundary.post_eps, boundary.eps),
        knobs,
        centred=boundary.centred,
        tf32=tf32,
    )


def experts_of(mlp: Any, x: Tensor, logits: Tensor) -> Tensor:
    """The latent experts after their router: x [B, T, D], logits [splits, N, E] -> [B, T, D]."""
    if getattr(mlp, "applied", None) is not None and latent_moe.guard(mlp, x) is None:
        return latent_moe.after_router(mlp, x, logits[0])
    rows = x.flatten(0, 1)
    weights, experts = choose(mlp.gate, logits)
    pooler = mlp.pre_expert_proj.weight, mlp.pre_expert_norm.weight
    z = mlp.pool(rows.narrow(1, mlp.rank * mlp.part, mlp.part), *pooler)
    y = mlp.experts(z, weights, experts)
    y = y.narrow(1, mlp.rank * mlp.expert_part, mlp.expert_part)
    return mlp.rank_sum(mlp.post_expert_proj(y)).view_as(x)


def leave(node: Any, y: Tensor, h: Tensor, next_norm: Tensor) -> tuple[Tensor, Tensor]:
    """The boundary after the experts, by the node's own module."""
    gate = node.post_feedforward_residual_gate.gate
    return node.mlp_boundary(y, h, gate, node.post_feedforward_layernorm.weight, next_norm)


def offline_cases() -> list[OfflineCase]:
    """8192 wide, 256 experts."""
    knobs = GatedRouterKnobs.heuristic({"N": 1, "D": 8192})
    return [offline_case(8192, knobs, POST="unit", GATED=True, CENTRED=True, TF32=False)]


CHANGE = Change(
    name="gated_boundary_router",
    region="layer",
    summary="a layer whose gated boundary before the experts and router are one kernel",
    contract=Contract(numerics="reduction", batch_invariant=False),
    around=True,
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build,
            guard=guard,
            knobs=GatedRouterKnobs,
            shape=shape,
            unsupported=unsupported,
        ),
    ),
)
