"""A latent mixture of experts for a few tokens in six kernels.

    logits   = float(x) W_router^T                     FP32 throughout, no TF32
    y        = R(x W_pool^T), summed over ranks        one kernel with the logits
    experts, weights of the logits; z = R(y / rms(y) * R(1 + w))       one kernel
    e        = the experts of z, normed and summed     `experts_up`, `pair_products`, `norm_combine`
    out      = R(e W_unpool^T)                         the node's own module

R rounds to BF16. N tokens, W the model's width, of which a rank pools a part; E experts of width D,
inner width F, K a token. All rounding points are kept; none is added.

Both products of x are one kernel, whose programs each hold some rows of a weight, loaded before the
previous kernel is done: 17 MB in the registers of an H200 for 256 x 8192 FP32 and 4096 x 1024 BF16,
3.9 us at its 4.33 TB/s (2026-11-29). The choice is one warp's serial work, beside which others norm
the pooled row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from optimized import gemv
from optimized.change import Change, Contract, Implementation, KnobValue, shape_key
from optimized.expert_knobs import MAX_PAIRS
from optimized.experts_up import experts_up
from optimized.latent_kernels import choose_norm_kernel, route_pool_kernel
from optimized.norm_combine import MAX_WIDTH, NormCombineKnobs, norm_combine
from optimized.pair_products import PairKnobs, pair_product
from optimized.router_choose import Rule
from optimized.router_topk import outside_router
from optimized.triton_support import OfflineCase, launch, outside_domain

MAX_TOKENS = 8  # more are better served by a matrix product
BLOCK = 1024  # columns of a weight in one load
MAX_HELD = 64  # registers of weights that a thread holds
NORM_COLUMNS = 1024  # of a pooled row that one warp norms


@dataclass(frozen=True, kw_only=True)
class LatentKnobs(PairKnobs):
    """Of the first kernel the rows of the router's and of the pooler's weight a program, and its
    `warps`; the experts' as in `PairKnobs`."""

    router_rows: int
    pool_rows: int
    enter_warps: int

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "LatentKnobs":
        part = triton.next_power_of_2(shape["R"])
        rows = max(1, min(16, MAX_HELD * 2 * 128 // part))
        pairs = vars(PairKnobs.heuristic(shape))
        return cls(**pairs, router_rows=1, pool_rows=rows, enter_warps=4)

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        return {
            **PairKnobs.candidates(shape),
            "router_rows": (1, 2),
            "pool_rows": (2, 4, 8, 16),
            "enter_warps": (4, 8, 16),
        }

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        most = MAX_HELD * 32 * self.enter_warps
        router = self.router_rows * _padded(shape["W"])
        pool = self.pool_rows * _padded(shape["R"]) // 2  # two to a register
        return super().is_valid(shape) and max(router, pool) <= most


def _padded(width: int) -> int:
    """`width` in whole loads."""
    block = min(BLOCK, triton.next_power_of_2(width))
    return triton.cdiv(width, block) * block


def shape(node: Any, x: Tensor) -> dict[str, int]:
    """N tokens, P pairs, W width of the model, R of it pooled here, E experts of width D and inner
    width F, K a token."""
    experts, width, inner = node.experts.down_proj.shape
    tokens, top_k = x.numel() // max(1, x.shape[-1]), node.gate.top_k
    sizes = {"N": tokens, "P": tokens * top_k, "K": top_k, "W": x.shape[-1], "R": node.part}
    return {**sizes, "E": experts, "D": width, "F": inner}


def guard(node: Any, x: Tensor) -> str | None:
    """Why the kernels do not take this call, or None."""
    sizes = shape(node, x)
    if not 0 < sizes["N"] <= MAX_TOKENS or sizes["P"] > MAX_PAIRS:
        return f"{sizes['N']} tokens, the kernels take 1 to {MAX_TOKENS}"
    if sizes["D"] > MAX_WIDTH or not LatentKnobs.heuristic(sizes).is_valid(sizes):
        return f"widths {sizes['W']} and {sizes['D']}, more than the kernels hold"
    tensors = {
        "x": x,
        "pool": node.pre_expert_proj.weight,
        "pool_norm": node.pre_expert_norm.weight,
        "gate_up_proj": node.experts.gate_up_proj,
        "down_proj": node.experts.down_proj,
        "output_norm": node.experts.post_expert_norm.weight,
    }
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            return f"{name} has strides {tensor.stride()}, the kernels take contiguous ones"
    return outside_router(node.gate, sizes["W"]) or outside_domain(**tensors)


def build(node: Any, knobs: LatentKnobs | None):
    """x [B, T, W] -> [B, T, W], BF16, for a few tokens."""

    def forward(x: Tensor) -> Tensor:
        chosen = knobs or LatentKnobs.heuristic(shape(node, x))
        logits, pooled = enter(node, x.flatten(0, 1), chosen)
        return leave(node, logits, pooled, chosen).view_as(x)

    return forward


def after_router(node: Any, x: Tensor, logits: Tensor) -> Tensor:
    """The experts of `node`, which this change has replaced and whose guard takes x [B, T, W], once
    another kernel has made the logits [N, E] FP32 -> [B, T, W]."""
    sizes = shape(node, x)
    chosen = node.knobs.get(shape_key(sizes)) or LatentKnobs.heuristic(sizes)
    part = x.flatten(0, 1).narrow(1, node.rank * node.part, node.part)
    pooled = gemv.multiply(part, node.pre_expert_proj.weight)
    return leave(node, logits, pooled, chosen).view_as(x)


def leave(node: Any, logits: Tensor, pooled: Tensor, knobs: LatentKnobs) -> Tensor:
    """logits [N, E] FP32, pooled [N, D] BF16, of this rank's part -> [N, W] BF16."""
    weights, experts, z = choose_and_norm(node, logits, node.pool.rank_sum(pooled))
    inner = node.experts
    hidden = experts_up(z, experts, inner.gate_up_proj, knobs.of("up"), rounded=True)
    y = pair_product(hidden, experts, inner.down_proj, knobs.of("down"))
    norm, scale = inner.post_expert_norm, inner.combine.scale
    summed = NormCombineKnobs(**knobs.of("sum"))
    y = inner.rank_sum(y)
    y = norm_combine(y, weights, norm.weight, norm.eps, scale, knobs=summed)
    y = y.narrow(1, node.rank * node.expert_part, node.expert_part)
    return node.rank_sum(node.post_expert_proj(y))


def enter(node: Any, x: Tensor, knobs: LatentKnobs) -> tuple[Tensor, Tensor]:
    """x [N, W] BF16 -> logits [N, E] FP32, and [N, D] BF16 pooled of this rank's part of x."""
    router, pool = node.gate.weight, node.pre_expert_proj.weight
    (experts, width), (outputs, part) = router.shape, pool.shape
    logits = torch.empty((len(x), experts), device=x.device)
    pooled = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    launch(
        route_pool_kernel,
        (triton.cdiv(experts, knobs.router_rows) + triton.cdiv(outputs, knobs.pool_rows),),
        x,
        router,
        pool,
        logits,
        pooled,
        x.stride(0),
        len(x),
        node.rank * part,
        W=width,
        E=experts,
        R=part,
        D=outputs,
        ROWS=knobs.router_rows,
        BLOCK=min(BLOCK, triton.next_power_of_2(width)),
        POOL_ROWS=knobs.pool_rows,
        POOL_BLOCK=min(BLOCK, triton.next_power_of_2(part)),
        num_warps=knobs.enter_warps,
    )
    return logits, pooled


def choose_and_norm(node: Any, logits: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits [N, E] FP32, pooled [N, D] BF16 -> weights [N, K] FP32, experts [N, K] int64, z [N, D]
    BF16."""
    (tokens, count), width, gate = logits.shape, pooled.shape[1], node.gate
    rule = Rule.of(gate)
    weights = torch.empty((tokens, gate.top_k), device=logits.device)
    experts = torch.empty((tokens, gate.top_k), dtype=torch.int64, device=logits.device)
    z = torch.empty_like(pooled)
    columns = min(NORM_COLUMNS, triton.next_power_of_2(width))
    launch(
        choose_norm_kernel,
        (tokens, 1 + triton.cdiv(width, columns)),
        logits,
        gate.e_score_correction_bias,
        weights,
        experts,
        pooled,
        node.pre_expert_norm.weight,
        z,
        tokens,
        rule.logit_scale,
        rule.floor,
        node.pool.eps,
        E=count,
        GROUPS=rule.groups,
        TOP_GROUPS=rule.top_groups,
        TOP_K=gate.top_k,
        SLOTS=triton.next_power_of_2(gate.top_k),
        D=width,
        COLUMNS=columns,
        num_warps=1,
    )
    return weights, experts, z


def offline_cases() -> list[OfflineCase]:
    """One of eight tensor-parallel ranks: 8192 wide, 1024 of it pooled to 4096; top-8 of 256; one
    token."""
    kinds: dict[str, str] = dict.fromkeys(("x_ptr", "pool_ptr", "pooled_ptr"), "*bf16")
    kinds |= dict.fromkeys(("norm_ptr", "z_ptr"), "*bf16") | {"experts_ptr": "*i64"}
    kinds |= dict.fromkeys(("router_ptr", "logits_ptr", "bias_ptr", "weights_ptr"), "*fp32")
    kinds |= {"x_stride": "i32:16", "count": "i32", "first": "i32:16"}
    kinds |= dict.fromkeys(("logit_scale", "floor", "eps"), "fp32")
    sizes = {"N": 1, "P": 8, "K": 8, "W": 8192, "R": 1024, "E": 256, "D": 4096, "F": 512}
    knobs = LatentKnobs.heuristic(sizes)
    enter_values = {"W": 8192, "E": 256, "R": 1024, "D": 4096, "ROWS": knobs.router_rows}
    enter_values |= {"BLOCK": BLOCK, "POOL_ROWS": knobs.pool_rows, "POOL_BLOCK": BLOCK}
    choose_values = {"E": 256, "GROUPS": 1, "TOP_GROUPS": 1, "TOP_K": 8, "SLOTS": 8, "D": 4096}
    choose_values |= {"COLUMNS": NORM_COLUMNS}
    for values in (enter_values, choose_values):
        values["count"] = 1  # Triton compiles integers that are 1 as constants
    cases = []
    for kernel, values, warps in (
        (route_pool_kernel, enter_values, knobs.enter_warps),
        (choose_norm_kernel, choose_values, 1),
    ):
        types = kinds | dict.fromkeys(values, "constexpr")
        ordered = {n: types[n] for n in kernel.arg_names if n != "PDL"}
        cases.append(OfflineCase(kernel, ordered, values, warps))
    return cases


CHANGE = Change(
    name="latent_moe",
    region="latent_moe",
    summary="a few tokens' latent experts: router beside pooler, choice beside norm, six kernels",
    contract=Contract(numerics="reduction", batch_invariant=False),
    around=True,
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build,
            guard=guard,
            knobs=LatentKnobs,
            shape=shape,
        ),
    ),
)
