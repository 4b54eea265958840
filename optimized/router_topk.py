"""The router: FP32 logits, then grouped top-k and its weights; two kernels for a few tokens.

    s       = sigmoid(float(x) W^T * c)                FP32 throughout, no TF32
    groups  = the best G' of G by the sum of each group's two best s + b, if G > 1
    experts = the best K of their experts by s + b, in order
    weights = s of those / (their sum + a floor)

Ties go to the lower index, of groups and of experts. N tokens, D hidden, E experts in G groups of
M = E / G. There is no BF16 rounding point. Moves 4 E D bytes of weights, 5.2 MB or 1.2 us at an
H200's 4.33 TB/s (2026-11-29) for 256 x 5120. Many tokens have their logits made on tensor cores
(`router_matmul`); the choice is a kernel of its own (`router_choose`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.change import Change, Contract, Implementation, KnobValue
from optimized.router_choose import Rule, choose
from optimized.router_matmul import MatmulKnobs, router_logits
from optimized.triton_support import (
    OfflineCase,
    launch,
    let_next_start,
    outside_domain,
    prefetch,
    prefetch_chunks,
    previous_is_done,
)

MAX_TOKENS = 16  # of the logits' kernel here; beyond, a matrix product shares the weights
MAX_EXPERTS = 1024  # one warp holds a token's scores
MAX_UNROLL = 20  # steps of the unrolled loop


@dataclass(frozen=True, kw_only=True)
class RouterKnobs:
    """Of the logits' kernel: `rows` of W and `tokens` a program, the `block` of D it takes at a
    time, the `splits` of D between programs, `warps`."""

    rows: int
    tokens: int
    block: int
    splits: int
    warps: int

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "RouterKnobs":
        block = min(1024, triton.next_power_of_2(shape["D"]))
        tokens = min(4, triton.next_power_of_2(max(1, shape["N"])))
        return cls(rows=1, tokens=tokens, block=block, splits=1, warps=4)

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        return {
            "rows": (1, 2, 4),
            "tokens": tuple(n for n in (1, 2, 4, 8) if n < 2 * shape["N"]),
            "block": (256, 512, 1024, 2048),
            "splits": (1, 2, 4),
            "warps": (2, 4, 8),
        }

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        span = triton.cdiv(shape["D"], self.splits)
        return (
            triton.cdiv(span, self.block) <= MAX_UNROLL
            and self.block < 2 * span
            and self.tokens * self.rows * self.block <= 8192  # partial sums in registers
        )


@triton.jit
def router_logits_kernel(
    x_ptr,
    weight_ptr,
    logits_ptr,
    x_stride,
    count,
    D: tl.constexpr,
    E: tl.constexpr,
    SPAN: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    if ((tl.program_id(0) + 1) * ROWS <= E) & (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        prefetch(weight_ptr + tl.program_id(0) * ROWS * D, ROWS * D * 4, CHUNKS, PDL)
    previous_is_done(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    # Both loads have the tile's whole shape, though each repeats itself along one dimension: so the
    # compiler gives them one layout, instead of moving every x through shared memory.
    tile = tl.zeros([TOKENS, ROWS, BLOCK], tl.int32)
    x_rows = x_ptr + token.to(tl.int64)[:, None, None] * x_stride
    weight_rows = weight_ptr + row[None, :, None] * D
    inside_rows = ((token < count)[:, None, None] & (row < E)[None, :, None]) & (tile == 0)
    total = tl.zeros([TOKENS, ROWS, BLOCK], tl.float32)
    for start in tl.static_range(0, SPAN, BLOCK):  # pyright: ignore[reportGeneralTypeIssues]
        within = start + tl.arange(0, BLOCK)[None, None, :]
        column = split * SPAN + within
        inside = (within < SPAN) & (column < D) & inside_rows
        x = tl.load(x_rows + (column + tile), mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_rows + (column + tile), mask=inside, other=0.0)
        total = tl.fma(weight, x, total)
    logits = tl.sum(total, axis=2)
    out = logits_ptr + (split * count + token[:, None]) * E + row[None, :]
    tl.store(out, logits, mask=(token < count)[:, None] & (row < E)[None, :])


def shape(node: Any, x: Tensor) -> dict[str, int]:
    """N tokens, D hidden and E experts of a call."""
    return {"N": x.shape[0], "D": x.shape[1], "E": len(node.weight)}


def guard(node: Any, x: Tensor) -> str | None:
    """Why the kernels do not take this call, or None."""
    if x.dim() != 2:
        return f"x is {tuple(x.shape)}, the kernels take [N, D]"
    if x.stride(1) != 1:
        return "x is not contiguous"
    return outside_router(node, x.shape[1]) or outside_domain(x=x)


def outside_router(node: Any, width: int) -> str | None:
    """Why the kernels cannot serve this router for inputs of `width`, or None."""
    count, rule = len(node.weight), Rule.of(node)
    if node.weight.shape[1] != width:
        return f"x is {width} wide, the weight {tuple(node.weight.shape)}; they do not fit"
    powers = all(n > 0 and n & (n - 1) == 0 for n in (count, rule.groups))
    if not powers or count > MAX_EXPERTS or rule.groups > 32 or count < 2 * rule.groups:
        return f"{count} experts in {rule.groups} groups; the kernels take powers of two"
    if node.top_k > rule.top_groups * (count // rule.groups):
        return f"top {node.top_k} of {rule.top_groups} groups of {count // rule.groups}"
    bias = node.e_score_correction_bias
    if node.weight.dtype != torch.float32 or bias.dtype != torch.float32:
        return f"weight is {node.weight.dtype}, bias {bias.dtype}; the kernels take torch.float32"
    if not (node.weight.is_contiguous() and bias.is_contiguous()):
        return "the weight or the bias is not contiguous"
    return None


class EitherKnobs:
    """`RouterKnobs` of a few tokens, `MatmulKnobs` of many."""

    def __new__(cls, **values: Any):
        return (MatmulKnobs if "row_tile" in values else RouterKnobs)(**values)

    @staticmethod
    def heuristic(shape: Mapping[str, int]) -> RouterKnobs | MatmulKnobs:
        return (MatmulKnobs if shape["N"] > MAX_TOKENS else RouterKnobs).heuristic(shape)

    @staticmethod
    def candidates(shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        return (MatmulKnobs if shape["N"] > MAX_TOKENS else RouterKnobs).candidates(shape)


def build(node: Any, knobs: RouterKnobs | MatmulKnobs | None):
    """x [N, D] BF16 -> (weights [N, K] FP32, experts [N, K] int64)."""

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        sizes = shape(node, x)
        tokens, width = sizes["N"], sizes["D"]
        count = node.weight.shape[0]
        if tokens > MAX_TOKENS:
            given = knobs if isinstance(knobs, MatmulKnobs) else None
            return choose(node, router_logits(x, node.weight, given))
        chosen = knobs if isinstance(knobs, RouterKnobs) else RouterKnobs.heuristic(sizes)
        logits = torch.empty((chosen.splits, tokens, count), device=x.device)
        if tokens == 0:
            return choose(node, logits)
        grid = triton.cdiv(count, chosen.rows), triton.cdiv(tokens, chosen.tokens), chosen.splits
        launch(
            router_logits_kernel,
            grid,
            x,
            node.weight,
            logits,
            x.stride(0),
            tokens,
            D=width,
            E=count,
            SPAN=triton.cdiv(width, chosen.splits),
            TOKENS=chosen.tokens,
            ROWS=chosen.rows,
            BLOCK=chosen.block,
            CHUNKS=prefetch_chunks(chosen.rows * width * 4),
            num_warps=chosen.warps,
        )
        return choose(node, logits)

    return forward


def offline_cases() -> list[OfflineCase]:
    """256 experts, of inputs 5120 and 8192 wide: one token, and eight."""
    pointers = {"x_ptr": "*bf16", "weight_ptr": "*fp32", "logits_ptr": "*fp32"}
    sizes = ("D", "E", "SPAN", "TOKENS", "ROWS", "BLOCK", "CHUNKS")
    signature = {**pointers, "x_stride": "i32:16", "count": "i32"}
    signature |= dict.fromkeys(sizes, "constexpr")
    cases = []
    for width in (5120, 8192):
        for tokens in (1, 8):
            knobs = RouterKnobs.heuristic({"N": tokens, "D": width})
            values = {"D": width, "E": 256, "SPAN": width}
            values |= {"TOKENS": knobs.tokens, "ROWS": knobs.rows, "BLOCK": knobs.block}
            values |= {"CHUNKS": prefetch_chunks(knobs.rows * width * 4)}
            cases.append(OfflineCase(router_logits_kernel, signature, values, knobs.warps))
    return cases


CHANGE = Change(
    name="router_topk",
    region="router",
    summary="FP32 router: logits, on tensor cores for many tokens, then grouped top-k in one warp",
    contract=Contract(numerics="reduction"),
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build,
            guard=guard,
            knobs=EitherKnobs,
            shape=shape,
        ),
    ),
)
