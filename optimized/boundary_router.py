"""The boundary before a mixture of experts and the router's logits in one kernel, for a few tokens.

    h       = R(R(R(rms_norm(y) w_post) y_scale) + R(h h_scale))
    x       = R(rms_norm(h) w_pre)
    logits  = float(x) W^T                        FP32 throughout, no TF32

R rounds to BF16. N tokens, D hidden, E experts. The rest of the layer runs as it is, the choice of
experts by `router_topk`'s kernel. All rounding points are kept; none is added.

A boundary is one thread block's work a token, while all others wait. Here every block that
multiplies some of the router's rows, loaded before, repeats it: it reads 4 D BF16 values from the
L2 cache, and no kernel has to end and another to begin between the two.

Memory is idle meanwhile, yet asking from here for the next layer's packed projections to come to
the L2 cache (18 MB of Beam on a TP8 rank) delays the kernel itself, by far more than it saves.

Of many tokens a layer ends in one kernel for the weighted sum and the boundary
(`optimized.combined_boundary`), and all before it is as it was. Of one token, that boundary in the
experts' last kernel made a step slower.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from optimized import combined_boundary
from optimized.boundary_router_kernel import boundary_router_kernel
from optimized.change import Change, Contract, Implementation, KnobValue, region_of
from optimized.residual_boundary import post_kind
from optimized.router_topk import choose, outside_router
from optimized.triton_support import (
    OfflineCase,
    launch,
    outside_domain,
    row_stride,
)

MAX_TOKENS = 8  # each repeats the boundary and reads all of W again
MAX_WIDTH = 16384


@dataclass(frozen=True, kw_only=True)
class BoundaryRouterKnobs:
    """`rows` of W a program, `warps` of its thread block; `split` holds a row in pieces."""

    rows: int
    warps: int
    split: bool

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "BoundaryRouterKnobs":
        wide = shape["D"] > 2048
        return cls(rows=2, warps=16 if wide else 4, split=False)

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        if shape["N"] > MAX_TOKENS:  # none of `combined_boundary`'s is a knob here
            return {name: (value,) for name, value in vars(cls.heuristic(shape)).items()}
        whole = not shape["D"] & (shape["D"] - 1)
        return {
            "rows": (1, 2, 4),
            "warps": (4, 8, 16),
            "split": (False,) if whole else (False, True),
        }

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        block = piece(shape["D"], self.split)
        width = block * triton.cdiv(shape["D"], block)
        held = (4 + self.rows) * width // (32 * self.warps)  # values a thread
        whole = not shape["D"] & (shape["D"] - 1)
        return block >= 32 * self.warps and held <= 240 and not (self.split and whole)


def piece(width: int, split: bool) -> int:
    """The elements that a row of `width` is held in at a time: all, padded to a power of two, or an
    eighth of that: 5120 without padding, in five pieces of 1024."""
    whole = triton.next_power_of_2(width)
    return max(1, whole // 8) if split else whole


def shape(node: Any, h: Tensor, x: Tensor, *rest: Any) -> dict[str, int]:
    """N tokens and D hidden of a call."""
    return {"N": x.numel() // x.shape[-1], "D": x.shape[-1]}


def guard(node: Any, h: Tensor, x: Tensor, step: Any, cache: Any, next_norm: Tensor) -> str | None:
    """Why the kernels do not take this call, or None: of few tokens this one, of many the one that
    the layer ends in."""
    if combined_boundary.outside(node, h, x) is None:
        return None
    return outside(node, h, x, "router", "residual_boundary")


def unsupported(node: Any) -> str | None:
    """Why the kernel serves no call of this layer, or None."""
    return lacks(node, "router", "residual_boundary")


def lacks(node: Any, router: str, boundary: str) -> str | None:
    """Says that a layer has no such router after such a boundary, or None."""
    gate = getattr(getattr(node, "mlp", node), "gate", node)
    before = getattr(node, "attn_boundary", node)
    if region_of(gate) != router or region_of(before) != boundary:
        return "the layer has no such router after such a boundary"
    return None


def outside(node: Any, h: Tensor, x: Tensor, router: str, boundary: str) -> str | None:
    """Why the kernel does not take this call of a layer with such a router and boundary."""
    if (reason := lacks(node, router, boundary)) is not None:
        return reason
    gate = node.mlp.gate
    tokens, width = shape(node, h, x).values()
    if not 0 < tokens <= MAX_TOKENS or width > MAX_WIDTH:
        return f"{tokens} tokens of width {width}, the kernel takes 1 to {MAX_TOKENS}"
    if row_stride(h) is None:
        return f"h has strides {h.stride()}, the kernel takes evenly spaced rows"
    return outside_router(gate, width) or outside_domain(x=x, h=h)


def build(node: Any, knobs: BoundaryRouterKnobs | None):
    """The function of `reference.beam.Layer.forward` for a few tokens, and for many."""

    def forward(h: Tensor, x: Tensor, step: Any, cache: Any, next_norm: Tensor):
        if shape(node, h, x)["N"] > MAX_TOKENS:
            return combined_boundary.forward(node, h, x, step, cache, next_norm)
        y = node.self_attn(x, step, cache)
        norms = node.post_attention_layernorm.weight, node.pre_feedforward_layernorm.weight
        boundary, weight = node.attn_boundary, node.mlp.gate.weight
        scales, eps = (boundary.y_scale, boundary.h_scale), (boundary.eps, boundary.eps)
        h, x, logits = enter(y, h, *norms, None, weight, scales, eps, knobs)
        weights, experts = choose(node.mlp.gate, logits[None])
        y = node.mlp.experts(x.flatten(0, 1), weights, experts)
        y = node.mlp.rank_sum(y.view_as(x))
        return node.mlp_boundary(y, h, node.post_feedforward_layernorm.weight, next_norm)

    return forward


def enter(
    y: Tensor,
    h: Tensor,
    post_weight: Tensor | None,
    pre_weight: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    scales: tuple[float, float],
    eps: tuple[float, float],
    knobs: BoundaryRouterKnobs | None,
    *,
    centred: bool = False,
    tf32: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, h [..., D], router's weight [E, D] FP32) -> (h, x [..., D], logits [N, E] FP32); the
    others are those of `residual_boundary.cross`. With `tf32` the router reads x before its
    rounding, in TF32."""
    count, width = weight.shape
    tokens = y.numel() // width
    chosen = knobs or BoundaryRouterKnobs.heuristic({"N": tokens, "D": width})
    h_out, x_out = (torch.empty(y.shape, dtype=y.dtype, device=y.device) for _ in "hx")
    logits = torch.empty((tokens, count), device=y.device)
    launch(
        boundary_router_kernel,
        (triton.cdiv(count, chosen.rows), tokens),
        y,
        h,
        pre_weight if post_weight is None else post_weight,
        pre_weight,
        pre_weight if gate is None else gate,
        weight,
        h_out,
        x_out,
        logits,
        row_stride(y),
        row_stride(h),
        *scales,
        *eps,
        D=width,
        E=count,
        BLOCK=piece(width, chosen.split),
        ROWS=chosen.rows,
        POST=post_kind(post_weight is not None, gate is not None),
        GATED=gate is not None,
        CENTRED=centred,
        TF32=tf32,
        num_warps=chosen.warps,
    )
    return h_out, x_out, logits


def offline_case(width: int, knobs: BoundaryRouterKnobs, **kind: Any) -> OfflineCase:
    """256 experts; `kind` are POST, GATED, CENTRED and TF32."""
    names = "y_ptr", "h_ptr", "post_ptr", "pre_ptr", "h_out_ptr", "x_out_ptr"
    kinds: dict[str, str] = dict.fromkeys(names, "*bf16")
    kinds |= dict.fromkeys(("weight_ptr", "logits_ptr"), "*fp32")
    kinds |= {"gate_ptr": "*fp32" if kind["GATED"] else "*bf16"}
    kinds |= dict.fromkeys(("y_stride", "h_stride"), "i32:16")
    kinds |= dict.fromkeys(("y_scale", "h_scale", "post_eps", "eps"), "fp32")
    values = {"D": width, "E": 256, "BLOCK": piece(width, knobs.split), "ROWS": knobs.rows, **kind}
    kinds |= dict.fromkeys(values, "constexpr")
    ordered = {n: kinds[n] for n in boundary_router_kernel.arg_names if n != "PDL"}
    return OfflineCase(boundary_router_kernel, ordered, values, knobs.warps)


def offline_cases() -> list[OfflineCase]:
    """5120 wide, as Beam."""
    knobs = BoundaryRouterKnobs.heuristic({"N": 1, "D": 5120})
    return [offline_case(5120, knobs, POST="weighted", GATED=False, CENTRED=False, TF32=False)]


CHANGE = Change(
    name="boundary_router",
    region="layer",
    summary="a layer with boundary and router, or of many tokens sum and boundary, in one kernel",
    contract=Contract(numerics="reduction", batch_invariant=False),
    around=True,
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build,
            guard=guard,
            knobs=BoundaryRouterKnobs,
            shape=shape,
            unsupported=unsupported,
        ),
    ),
)
