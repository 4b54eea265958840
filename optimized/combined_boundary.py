"""The weighted sum of many tokens' expert outputs and the boundary after it in one kernel.

    y   = R(scale * (w_0 y_0 + w_1 y_1 + ... + w_{K-1} y_{K-1}))
    h'  = R(R(R(rms_norm(y) w_post) y_scale) + R(h h_scale))
    x   = R(rms_norm(h') w_pre)

R rounds to BF16; all else is FP32, the products and sums of the first line rounded apart, in slot
order. N tokens, K experts a token, D hidden. All rounding points are kept; none is added, and the
bits are those of `combine`'s kernel and of `residual_boundary`'s with rows in the same pieces.

Moves N (K + 3) D BF16 values, where the two kernels move N (K + 5) D: 1.85 GB instead of 2.18 for
16384 tokens of Beam. Outputs are read where a grouped product has left them.

`forward` is a layer that ends in it: for a change that replaces layers, where `outside` is None.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.boundary_kernel import mean_square, part, post_norm_and_add, put
from optimized.change import KnobValue, region_of, shape_key
from optimized.combine import MAX_TOP_K
from optimized.grouped_experts import GroupedKnobs, grouped_experts
from optimized.residual_boundary import FEW_ROWS, MAX_ROWS, MAX_WIDTH, piece
from optimized.routed_experts import shape
from optimized.triton_support import (
    OfflineCase,
    launch,
    let_next_start,
    loads_are_asked_for,
    outside_domain,
    previous_is_done,
    row_stride,
)


@dataclass(frozen=True, kw_only=True)
class CombinedKnobs:
    """`warps` of a thread block, which serves one token; a row is held in pieces."""

    warps: int

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "CombinedKnobs":
        return cls(warps=max(1, min(8, piece(shape["D"], True) // 256)))

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        return {"warps": (4, 8, 16)}

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        block = piece(shape["D"], True)
        enough = self.warps == 1 or block >= 32 * self.warps
        return enough and block * triton.cdiv(shape["D"], block) <= 2048 * self.warps


@triton.jit
def combined_boundary_kernel(
    y_ptr,
    weights_ptr,
    places_ptr,
    h_ptr,
    post_ptr,
    pre_ptr,
    h_out_ptr,
    x_out_ptr,
    weights_stride,
    h_stride,
    scale,
    y_scale,
    h_scale,
    post_eps,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token's K rows of y are at `places_ptr`, int32; a row is held in pieces of `BLOCK`."""
    let_next_start(PDL)
    PIECES: tl.constexpr = (D + BLOCK - 1) // BLOCK
    token = tl.program_id(0).to(tl.int64)
    previous_is_done(PDL)
    hs, ys = (), ()
    for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        hs = hs + (part(h_ptr + token * h_stride, i, D, BLOCK),)
    loads_are_asked_for(PDL)
    for slot in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
        place = tl.load(places_ptr + token * K + slot).to(tl.int64)
        share = tl.load(weights_ptr + token * weights_stride + slot)
        sums = ()
        for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
            weighted = part(y_ptr + place * D, i, D, BLOCK).to(tl.float32) * share
            sums = sums + (weighted if slot == 0 else ys[i] + weighted,)
        ys = sums
    combined = ()
    for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        combined = combined + ((ys[i] * scale).to(tl.bfloat16).to(tl.float32),)
    inverse = tl.rsqrt(mean_square(combined, D, PIECES) + post_eps)
    added, pres = (), ()
    for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        post = part(post_ptr, i, D, BLOCK)
        pres = pres + (part(pre_ptr, i, D, BLOCK),)  # no load moves up past a store
        h = hs[i].to(tl.float32)  # pyright: ignore
        added = added + (post_norm_and_add(combined[i], h, post, inverse, y_scale, h_scale),)
    inverse = tl.rsqrt(mean_square(added, D, PIECES) + eps)
    for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        x = added[i] * inverse * pres[i].to(tl.float32)  # pyright: ignore
        put(h_out_ptr + token * D, added[i], i, D, BLOCK)
        put(x_out_ptr + token * D, x, i, D, BLOCK)


def combine_and_cross(
    y: Tensor,
    weights: Tensor,
    places: Tensor,
    h: Tensor,
    post_weight: Tensor,
    pre_weight: Tensor,
    scale: float,
    scales: tuple[float, float],
    eps: tuple[float, float],
    knobs: CombinedKnobs | None = None,
) -> tuple[Tensor, Tensor]:
    """(y [P, D] BF16, weights [N, K] FP32, places [N * K] int32, h [..., D] BF16 of N rows evenly
    spaced, the two norms' weights [D] BF16) -> (h, x) like h, contiguous.

    Pair i's row is y[places[i]]. `scales` are those of y and h, `eps` of post- and pre-norm.
    """
    h_out, x_out = (torch.empty(h.shape, dtype=h.dtype, device=h.device) for _ in "hx")
    if h.numel() == 0:
        return h_out, x_out
    (tokens, top_k), width = weights.shape, h.shape[-1]
    chosen = knobs or CombinedKnobs.heuristic({"N": tokens, "K": top_k, "D": width})
    launch(
        combined_boundary_kernel,
        (tokens,),
        y,
        weights,
        places,
        h,
        post_weight,
        pre_weight,
        h_out,
        x_out,
        row_stride(weights),
        row_stride(h),
        scale,
        *scales,
        *eps,
        D=width,
        BLOCK=piece(width, True),
        K=top_k,
        num_warps=chosen.warps,
    )
    return h_out, x_out


def lacks(node: Any) -> str | None:
    """Why no call of this layer can end in the kernel, or None."""
    mlp, boundary = getattr(node, "mlp", node), getattr(node, "mlp_boundary", node)
    experts = getattr(mlp, "experts", node)
    if region_of(experts) != "experts" or region_of(boundary) != "residual_boundary":
        return "the layer has no such boundary after such experts"
    group = mlp.rank_sum.group
    if group is not None and group.size() > 1:
        return f"{group.size()} ranks' sums come between the experts and the boundary"
    return None


def outside(node: Any, h: Tensor, x: Tensor) -> str | None:
    """Why this call of a layer does not end in the kernel, or None."""
    if (reason := lacks(node)) is not None:
        return reason
    experts, width = node.mlp.experts, x.shape[-1]
    tokens = x.numel() // width
    if not FEW_ROWS < tokens <= MAX_ROWS or width > MAX_WIDTH:
        return f"{tokens} tokens of width {width}, the kernel takes {FEW_ROWS + 1} to {MAX_ROWS}"
    if row_stride(h) is None:
        return f"h has strides {h.stride()}, the kernel takes evenly spaced rows"
    if not 1 <= node.mlp.gate.top_k <= MAX_TOP_K:
        return f"{node.mlp.gate.top_k} experts a token, the kernel takes up to {MAX_TOP_K}"
    weights = {"gate_up_proj": experts.gate_up_proj, "down_proj": experts.down_proj}
    if not (x.is_contiguous() and all(w.is_contiguous() for w in weights.values())):
        return "x or the experts' weights are not contiguous"
    return outside_domain(x=x, h=h, **weights)


def tuned(experts: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> GroupedKnobs | None:
    """The launch knobs of the change that replaced the experts for a call, or None."""
    sizes = shape(experts, x, weights, chosen)
    knobs = getattr(experts, "knobs", {}).get(shape_key(sizes))
    return knobs if isinstance(knobs, GroupedKnobs) else None


def forward(
    node: Any, h: Tensor, x: Tensor, step: Any, cache: Any, next_norm: Tensor
) -> tuple[Tensor, Tensor]:
    """`reference.beam.Layer.forward` for many tokens: the experts as grouped products, with the
    launch knobs of the change that replaced them, if one did, and no sum of their own."""
    y = node.self_attn(x, step, cache)
    norms = node.post_attention_layernorm.weight, node.pre_feedforward_layernorm.weight
    h, x = node.attn_boundary(y, h, *norms)
    rows, experts = x.flatten(0, 1), node.mlp.experts
    weights, chosen = node.mlp.gate(rows)
    y, order = grouped_experts(experts, rows, chosen, tuned(experts, rows, weights, chosen))
    boundary = node.mlp_boundary
    return combine_and_cross(
        y,
        weights,
        order.places,
        h,
        node.post_feedforward_layernorm.weight,
        next_norm,
        experts.combine.scale,
        (boundary.y_scale, boundary.h_scale),
        (boundary.eps, boundary.eps),
    )


def offline_cases() -> list[OfflineCase]:
    """Beam's width and top-8, a prefill."""
    names = "y_ptr", "h_ptr", "post_ptr", "pre_ptr", "h_out_ptr", "x_out_ptr"
    kinds: dict[str, str] = dict.fromkeys(names, "*bf16")
    kinds |= {"weights_ptr": "*fp32", "places_ptr": "*i32"}
    kinds |= {"weights_stride": "i32", "h_stride": "i32:16"}
    kinds |= dict.fromkeys(("scale", "y_scale", "h_scale", "post_eps", "eps"), "fp32")
    values: dict[str, Any] = {"D": 5120, "BLOCK": piece(5120, True), "K": 8}
    kinds |= dict.fromkeys(values, "constexpr")
    ordered = {n: kinds[n] for n in combined_boundary_kernel.arg_names if n != "PDL"}
    knobs = CombinedKnobs.heuristic({"N": 16384, "K": 8, "D": 5120})
    return [OfflineCase(combined_boundary_kernel, ordered, values, knobs.warps)]
