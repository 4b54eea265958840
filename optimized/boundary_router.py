"""The boundary before a mixture of experts and the router's logits in one kernel, for a few tokens.

    h       = R(R(R(rms_norm(y) w_post) y_scale) + R(h h_scale))
    x       = R(rms_norm(h) w_pre)
    logits  = float(x) W^T                        FP32 throughout, no TF32

R rounds to BF16. N tokens, D hidden, E experts. The rest of the layer runs as it is, the choice of
experts by `router_topk`'s kernel. All rounding points are kept; none is added.

A boundary is one thread block's work a token, while all others wait. Here every block that
multiplies some of the router's rows, loaded before, repeats it: it reads 4 D BF16 values from the
L2 cache, and no kernel has to end and another to begin between the two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.change import Change, Contract, Implementation, KnobValue, region_of
from optimized.residual_boundary import post_norm_and_add, row_pieces
from optimized.router_topk import choose, outside_router
from optimized.triton_support import (
    OfflineCase,
    launch,
    let_next_start,
    outside_domain,
    previous_is_done,
    row_stride,
)

MAX_TOKENS = 8  # each repeats the boundary and reads all of W again
MAX_WIDTH = 16384


@dataclass(frozen=True, kw_only=True)
class BoundaryRouterKnobs:
    """`rows` of W a program, `warps` of its thread block; `split` holds a row in two pieces."""

    rows: int
    warps: int
    split: bool

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "BoundaryRouterKnobs":
        wide = shape["D"] > 2048
        return cls(rows=2, warps=16 if wide else 4, split=False)

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        whole = not shape["D"] & (shape["D"] - 1)
        return {
            "rows": (1, 2, 4),
            "warps": (4, 8, 16),
            "split": (False,) if whole else (False, True),
        }

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        head, tail = row_pieces(shape["D"], self.split)
        held = (4 + self.rows) * (head + tail) // (32 * self.warps)  # values a thread
        whole = not shape["D"] & (shape["D"] - 1)
        return head + tail >= 32 * self.warps and held <= 240 and not (self.split and whole)


@triton.jit
def boundary_router_kernel(
    y_ptr,
    h_ptr,
    post_ptr,
    pre_ptr,
    weight_ptr,
    h_out_ptr,
    x_out_ptr,
    logits_ptr,
    y_stride,
    h_stride,
    y_scale,
    h_scale,
    eps,
    D: tl.constexpr,
    E: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    token = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * ROWS
    head = tl.arange(0, HEAD)
    in_head = head < D
    post_head = tl.load(post_ptr + head, mask=in_head, other=0.0)
    pre_head = tl.load(pre_ptr + head, mask=in_head, other=0.0)
    if TAIL > 0:
        tail = HEAD + tl.arange(0, TAIL)
        in_tail = tail < D
        post_tail = tl.load(post_ptr + tail, mask=in_tail, other=0.0)
        pre_tail = tl.load(pre_ptr + tail, mask=in_tail, other=0.0)
    heads, tails = (), ()
    for r in tl.static_range(ROWS):  # pyright: ignore[reportGeneralTypeIssues]
        row = weight_ptr + (first + r) * D
        there = first + r < E
        heads = heads + (tl.load(row + head, mask=in_head & there, other=0.0),)
        if TAIL > 0:
            tails = tails + (tl.load(row + tail, mask=in_tail & there, other=0.0),)

    previous_is_done(PDL)
    y_row, h_row = y_ptr + token * y_stride, h_ptr + token * h_stride
    y_head = tl.load(y_row + head, mask=in_head, other=0.0).to(tl.float32)
    h_head = tl.load(h_row + head, mask=in_head, other=0.0).to(tl.float32)
    squares = tl.sum(y_head * y_head, axis=0)
    if TAIL > 0:
        y_tail = tl.load(y_row + tail, mask=in_tail, other=0.0).to(tl.float32)
        h_tail = tl.load(h_row + tail, mask=in_tail, other=0.0).to(tl.float32)
        squares += tl.sum(y_tail * y_tail, axis=0)
    inverse = tl.rsqrt(squares * (1.0 / D) + eps)
    h_head = post_norm_and_add(y_head, h_head, post_head.to(tl.float32), inverse, y_scale, h_scale)
    squares = tl.sum(h_head * h_head, axis=0)
    if TAIL > 0:
        wide = post_tail.to(tl.float32)
        h_tail = post_norm_and_add(y_tail, h_tail, wide, inverse, y_scale, h_scale)
        squares += tl.sum(h_tail * h_tail, axis=0)
    inverse = tl.rsqrt(squares * (1.0 / D) + eps)
    x_head = (h_head * inverse * pre_head.to(tl.float32)).to(tl.bfloat16)
    h_out, x_out = h_out_ptr + token * D, x_out_ptr + token * D
    if TAIL > 0:
        x_tail = (h_tail * inverse * pre_tail.to(tl.float32)).to(tl.bfloat16)
    if tl.program_id(0) == 0:
        tl.store(h_out + head, h_head.to(tl.bfloat16), mask=in_head)
        tl.store(x_out + head, x_head, mask=in_head)
        if TAIL > 0:
            tl.store(h_out + tail, h_tail.to(tl.bfloat16), mask=in_tail)
            tl.store(x_out + tail, x_tail, mask=in_tail)
    for r in tl.static_range(ROWS):  # pyright: ignore[reportGeneralTypeIssues]
        logit = tl.sum(x_head.to(tl.float32) * heads[r], axis=0)
        if TAIL > 0:
            logit += tl.sum(x_tail.to(tl.float32) * tails[r], axis=0)
        tl.store(logits_ptr + token * E + first + r, logit, mask=first + r < E)


def shape(node: Any, h: Tensor, x: Tensor, *rest: Any) -> dict[str, int]:
    """N tokens and D hidden of a call."""
    return {"N": x.numel() // x.shape[-1], "D": x.shape[-1]}


def guard(node: Any, h: Tensor, x: Tensor, step: Any, cache: Any, next_norm: Tensor) -> str | None:
    """Why the kernel does not take this call, or None."""
    router = getattr(node.mlp, "gate", node)
    if region_of(router) != "router" or region_of(node.attn_boundary) != "residual_boundary":
        return "the layer has no such router after such a boundary"
    tokens, width = shape(node, h, x).values()
    if not 0 < tokens <= MAX_TOKENS or width > MAX_WIDTH:
        return f"{tokens} tokens of width {width}, the kernel takes 1 to {MAX_TOKENS}"
    if row_stride(h) is None:
        return f"h has strides {h.stride()}, the kernel takes evenly spaced rows"
    return outside_router(router, width) or outside_domain(x=x, h=h)


def build(node: Any, knobs: BoundaryRouterKnobs | None):
    """The function of `reference.beam.Layer.forward` for a few tokens."""

    def forward(h: Tensor, x: Tensor, step: Any, cache: Any, next_norm: Tensor):
        y = node.self_attn(x, step, cache)
        norms = node.post_attention_layernorm.weight, node.pre_feedforward_layernorm.weight
        h, x, logits = enter(y, h, *norms, node.mlp.gate.weight, node.attn_boundary, knobs)
        weights, experts = choose(node.mlp.gate, logits[None])
        y = node.mlp.experts(x.flatten(0, 1), weights, experts)
        y = node.mlp.rank_sum(y.view_as(x))
        return node.mlp_boundary(y, h, node.post_feedforward_layernorm.weight, next_norm)

    return forward


def enter(
    y: Tensor,
    h: Tensor,
    post_weight: Tensor,
    pre_weight: Tensor,
    weight: Tensor,
    boundary: Any,
    knobs: BoundaryRouterKnobs | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, h [..., D], post_weight, pre_weight [D], weight [E, D] FP32) -> (h, x [..., D], logits
    [N, E] FP32); `boundary` has the scales and eps."""
    count, width = weight.shape
    tokens = y.numel() // width
    chosen = knobs or BoundaryRouterKnobs.heuristic({"N": tokens, "D": width})
    h_out, x_out = (torch.empty(y.shape, dtype=y.dtype, device=y.device) for _ in "hx")
    logits = torch.empty((tokens, count), device=y.device)
    head, tail = row_pieces(width, chosen.split)
    launch(
        boundary_router_kernel,
        (triton.cdiv(count, chosen.rows), tokens),
        y,
        h,
        post_weight,
        pre_weight,
        weight,
        h_out,
        x_out,
        logits,
        row_stride(y),
        row_stride(h),
        boundary.y_scale,
        boundary.h_scale,
        boundary.eps,
        D=width,
        E=count,
        HEAD=head,
        TAIL=tail,
        ROWS=chosen.rows,
        num_warps=chosen.warps,
    )
    return h_out, x_out, logits


def offline_cases() -> list[OfflineCase]:
    """Beam: 5120 wide, 256 experts."""
    names = "y_ptr", "h_ptr", "post_ptr", "pre_ptr", "h_out_ptr", "x_out_ptr"
    kinds: dict[str, str] = dict.fromkeys(names, "*bf16")
    kinds |= dict.fromkeys(("weight_ptr", "logits_ptr"), "*fp32")
    kinds |= dict.fromkeys(("y_stride", "h_stride"), "i32:16")
    kinds |= dict.fromkeys(("y_scale", "h_scale", "eps"), "fp32")
    knobs = BoundaryRouterKnobs.heuristic({"N": 1, "D": 5120})
    head, tail = row_pieces(5120, knobs.split)
    values = {"D": 5120, "E": 256, "HEAD": head, "TAIL": tail, "ROWS": knobs.rows}
    kinds |= dict.fromkeys(values, "constexpr")
    ordered = {n: kinds[n] for n in boundary_router_kernel.arg_names if n != "PDL"}
    return [OfflineCase(boundary_router_kernel, ordered, values, knobs.warps)]


CHANGE = Change(
    name="boundary_router",
    region="layer",
    summary="a layer whose boundary before the experts and router are one kernel",
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
        ),
    ),
)
