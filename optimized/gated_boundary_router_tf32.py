"""The router of latent experts in TF32, fed by the norm before its rounding.

    h       = R(alpha h + beta R(unit_norm(y)))
    x'      = rms_norm(h) R(1 + w_pre),  x = R(x')
    logits  = T(x') T(W)^T                        sums in FP32

R rounds to BF16, T to TF32. N tokens, D hidden, E experts. A few tokens have their logits made in
the boundary's kernel, as in `gated_boundary_router`. Many have them made on tensor cores from h, of
which x' is one product away once the boundary has left each row's 1 / rms: 2 N D E operations, 69
GFLOP for 16384 x 8192 x 256, and no BF16 x is read again.

The experts read x, rounded. Elided is its rounding in the router alone; added is T of the router's
operands. Tensor cores cut operands off, so both are rounded before. They sum `block` columns; those
sums are added up outside, to nearest.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized import residual_boundary
from optimized.boundary_router import MAX_TOKENS, offline_case, outside, shape
from optimized.change import Change, Contract, Implementation, KnobValue
from optimized.gated_boundary import GatedBoundaryKnobs
from optimized.gated_boundary_router import (
    PARTS,
    GatedRouterKnobs,
    cross_and_route,
    experts_of,
    leave,
    outside_experts,
    unsupported,
)
from optimized.norms import norm_factor
from optimized.residual_boundary import MAX_ROWS, cross
from optimized.router_matmul import MatmulKnobs
from optimized.triton_support import OfflineCase, begin, launch, round_to_tf32

X_IN_ROUTER = "attn_boundary: norm(h, pre_weight, self.eps) #2 in mlp.gate"
TF32_IN_ROUTER = "matmul_operands_tf32 in mlp.gate"


class TF32Knobs:
    """`GatedRouterKnobs` of a few tokens, `MatmulKnobs` of many."""

    def __new__(cls, **values: Any):
        return (MatmulKnobs if "row_tile" in values else GatedRouterKnobs)(**values)

    @staticmethod
    def heuristic(shape: Mapping[str, int]) -> GatedRouterKnobs | MatmulKnobs:
        return _kind(shape).heuristic(shape)

    @staticmethod
    def candidates(shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        return _kind(shape).candidates(shape)


def _kind(shape: Mapping[str, int]) -> type[GatedRouterKnobs] | type[MatmulKnobs]:
    return MatmulKnobs if shape["N"] > MAX_TOKENS else GatedRouterKnobs


@triton.jit
def normed_logits_kernel(
    h_ptr,
    rms_ptr,
    pre_ptr,
    weight_ptr,
    logits_ptr,
    count,
    D: tl.constexpr,
    E: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    CENTRED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    PARTS: tl.constexpr = (E + COLUMNS - 1) // COLUMNS
    row = tl.program_id(0) // PARTS * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(1)
    depth = tl.arange(0, BLOCK)
    # Rows and columns beyond the last are computed on real values and not stored.
    h_row = tl.minimum(row, count - 1).to(tl.int64)
    h_tile = h_ptr + h_row[:, None] * D + depth[None, :]
    weight_tile = weight_ptr + tl.minimum(column, E - 1)[None, :] * D + depth[:, None]
    inverse = tl.load(rms_ptr + h_row)[:, None]
    start, end = split * SPAN, tl.minimum((split + 1) * SPAN, D)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in tl.range(start, end, BLOCK, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        inside = k + depth < D
        h = tl.load(h_tile + k, mask=inside[None, :], other=0.0).to(tl.float32)
        pre = tl.load(pre_ptr + k + depth, mask=inside, other=0.0)
        weight = tl.load(weight_tile + k, mask=inside[:, None], other=0.0)
        x = round_to_tf32(h * inverse * norm_factor(pre, CENTRED)[None, :])
        total += tl.dot(x, round_to_tf32(weight), input_precision=PRECISION)
    out = logits_ptr + (split * count + row).to(tl.int64)[:, None] * E + column[None, :]
    tl.store(out, total, mask=(row < count)[:, None] & (column < E)[None, :])


def sizes(node: Any, h: Tensor, x: Tensor, *rest: Any) -> dict[str, int]:
    """N tokens, D hidden and E experts of a call."""
    return {**shape(node, h, x), "E": len(node.mlp.gate.weight)}


def guard(node: Any, h: Tensor, x: Tensor, step: Any, cache: Any, next_norm: Tensor) -> str | None:
    """Why the kernels do not take this call, or None."""
    tokens = shape(node, h, x)["N"]
    if tokens <= MAX_TOKENS:
        return outside(node, h, x, *PARTS) or outside_experts(node, x)
    if tokens > MAX_ROWS:
        return f"{tokens} tokens, the kernels take up to {MAX_ROWS}"
    one = h[:1, :1], x[:1, :1]
    refused = outside(node, *one, *PARTS) or outside_experts(node, x)
    weight = node.pre_feedforward_layernorm.weight
    return refused or residual_boundary.guard(node, x, h, weight, weight)


def build(node: Any, knobs: GatedRouterKnobs | MatmulKnobs | None):
    """The function of `reference.muse_spark.Layer.forward`."""

    def forward(h: Tensor, x: Tensor, step: Any, cache: Any, next_norm: Tensor):
        shape = sizes(node, h, x)
        chosen = knobs or TF32Knobs.heuristic(shape)
        y = node.self_attn(x, step, cache)
        if isinstance(chosen, MatmulKnobs):
            h, x, logits = cross_then_route(node, y, h, chosen)
        else:
            h, x, logits = cross_and_route(node, y, h, chosen, tf32=True)
            logits = logits[None]
        return leave(node, experts_of(node.mlp, x, logits), h, next_norm)

    return forward


def cross_then_route(
    node: Any, y: Tensor, h: Tensor, knobs: MatmulKnobs
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, h [B, T, D]) -> (h, x [B, T, D], logits [splits, N, E] FP32), for many tokens."""
    boundary, weight = node.attn_boundary, node.mlp.gate.weight
    gate, pre = node.post_attention_residual_gate.gate, node.pre_feedforward_layernorm.weight
    count, width = weight.shape
    tokens = y.numel() // width
    inverse_rms = torch.empty(tokens, device=y.device)
    h, x = cross(
        y,
        h,
        None,
        pre,
        gate,
        (1.0 / boundary.temperature, boundary.floor),
        (boundary.post_eps, boundary.eps),
        GatedBoundaryKnobs.heuristic({"T": tokens, "D": width}),
        boundary.centred,
        inverse_rms,
    )
    span = triton.cdiv(triton.cdiv(width, knobs.block), knobs.splits) * knobs.block
    splits = triton.cdiv(width, span)
    logits = torch.empty((splits, tokens, count), device=y.device)
    launch(
        normed_logits_kernel,
        (triton.cdiv(tokens, knobs.row_tile) * triton.cdiv(count, knobs.columns), splits),
        h,
        inverse_rms,
        pre,
        weight,
        logits,
        tokens,
        D=width,
        E=count,
        SPAN=span,
        ROWS=knobs.row_tile,
        COLUMNS=knobs.columns,
        BLOCK=knobs.block,
        STAGES=knobs.stages,
        CENTRED=boundary.centred,
        num_warps=knobs.warps,
    )
    return h, x, logits


def offline_cases() -> list[OfflineCase]:
    """8192 wide, 256 experts: one token, decodes of 128, a prefill of 16384."""
    one = GatedRouterKnobs.heuristic({"N": 1, "D": 8192})
    cases = [offline_case(8192, one, POST="unit", GATED=True, CENTRED=True, TF32=True)]
    kind = [("unit", True, True)]
    cases += residual_boundary.cases(8192, GatedBoundaryKnobs, kind, keep=True)[1:]
    pointers = dict.fromkeys(("rms_ptr", "weight_ptr", "logits_ptr"), "*fp32")
    kinds = {"h_ptr": "*bf16", "pre_ptr": "*bf16", **pointers, "count": "i32:16"}
    for tokens in (128, 16384):
        knobs = MatmulKnobs.heuristic({"N": tokens, "D": 8192, "E": 256})
        values: dict[str, Any] = {"D": 8192, "E": 256, "SPAN": 8192 // knobs.splits}
        values |= {"ROWS": knobs.row_tile, "COLUMNS": knobs.columns, "BLOCK": knobs.block}
        values |= {"STAGES": knobs.stages, "CENTRED": True}
        types = kinds | dict.fromkeys(values, "constexpr")
        ordered = {n: types[n] for n in normed_logits_kernel.arg_names if n in types}
        cases.append(OfflineCase(normed_logits_kernel, ordered, values, knobs.warps))
    return cases


CHANGE = Change(
    name="gated_boundary_router_tf32",
    region="layer",
    summary="a layer whose router reads the norm before its rounding, in TF32",
    contract=Contract(
        numerics="reduction",
        elides={X_IN_ROUTER: "the router reads the norm where it is made, in FP32 registers"},
        adds={TF32_IN_ROUTER: "tensor cores multiply TF32 eight times as fast as FP32 units do"},
        batch_invariant=False,
    ),
    around=True,
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build,
            guard=guard,
            knobs=TF32Knobs,
            shape=sizes,
            unsupported=unsupported,
        ),
    ),
)
