"""A router's choice of experts, from its logits; one warp a token.

    s       = sigmoid(logits * c)                      FP32
    groups  = the best G' of G by the sum of each group's two best s + b, if G > 1
    experts = the best K of their experts by s + b, in order
    weights = s of those / (their sum + a floor)

Ties go to the lower index, of groups and of experts. N tokens, E experts in G groups of M = E / G.
The choice is one warp's serial work, so it runs on integer keys in the floats' order: their
warp-wide maximum is one instruction on NVIDIA since sm_80, where a float's takes ten.

Each round takes the best key left. Keys whose low log2(E) bits name their expert need one maximum a
round in place of two and say whose they are. They order as the scores do unless two neighbours
among the K + 1 best agree in all other bits: such a token, and one with a logit so low that its
score is no normal FP32 number, is chosen anew by the whole keys.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.triton_support import (
    OfflineCase,
    exp_fp32,
    launch,
    let_next_start,
    previous_is_done,
)

LOWEST = tl.constexpr(-(2**31))
TOO_LARGE = tl.constexpr(0x7E800000)  # the bits of 2^126: `_inverse` takes less


class Rule(NamedTuple):
    """How a router chooses, beyond its weights: of some of its groups of experts, or of one; logits
    times a scale; the floor of the sum that weights are divided by."""

    groups: int
    top_groups: int
    logit_scale: float
    floor: float

    @classmethod
    def of(cls, node: Any) -> "Rule":
        groups, top_groups = getattr(node, "groups", 1), getattr(node, "top_groups", 1)
        return cls(groups, top_groups, getattr(node, "logit_scale", 1.0), node.floor)


@triton.jit
def _inverse(x, PDL: tl.constexpr):
    """1 / x, rounded to nearest, of x from 1 to below 2^126: an estimate and one Newton step, as
    CUDA's `__frcp_rn`, without its branch for other x, which makes eight wait for each other."""
    if not PDL:
        return tl.math.div_rn(1.0, x)
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 minus, estimate, rest;
        rcp.approx.ftz.f32 estimate, $1;
        neg.f32 minus, $1;
        fma.rn.f32 rest, minus, estimate, 0f3F800000;
        fma.rn.f32 $0, estimate, rest, estimate;
        }""",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _two_best(best, second, other_best, other_second):
    """The two best of two pairs."""
    low = tl.minimum(best, other_best)
    return tl.maximum(best, other_best), tl.maximum(low, tl.maximum(second, other_second))


@triton.jit
def _reflect(bits):
    """A float's bits as an integer in the floats' order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _keys(biased):
    """Integers in the order of the biased scores. None of those is -0.0, whose key is not that of
    0.0: no score is -0.0, and so no sum."""
    return _reflect(biased.to(tl.int32, bitcast=True))


@triton.jit
def _open_groups(key, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """key [G, M] -> [G, 1]: is the group one that fewer than TOP_GROUPS others beat?"""
    if GROUPS == 1:
        return tl.full([1, 1], True, tl.int1)
    best, second = tl.reduce((key, tl.full(key.shape, LOWEST, tl.int32)), 1, _two_best)
    score = _reflect(best).to(tl.float32, bitcast=True)
    score += _reflect(second).to(tl.float32, bitcast=True)
    score = _keys(score)
    group = tl.arange(0, GROUPS)
    earlier = (group[None, :] < group[:, None]).to(tl.int32)
    beaten = score[None, :] > score[:, None] - earlier  # an earlier one by as much, too
    return (tl.sum(beaten.to(tl.int32), axis=1) < TOP_GROUPS)[:, None]


@triton.jit
def _best_by_short_keys(
    key, allowed, expert, E: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr
):
    """The best TOP_K of key, allowed and expert [G, M], in order as [SLOTS]; and whether two of
    them, or the last and the best of the others, may be in the wrong order."""
    LOW: tl.constexpr = E - 1
    short = ((key ^ LOWEST) & ~LOW) | (LOW - expert)
    short = tl.reshape(tl.where(allowed, short, 0), [E]).to(tl.uint32, bitcast=True)
    slot = tl.arange(0, SLOTS)
    top = tl.max(short, axis=0)
    chosen = tl.full([SLOTS], 0, tl.uint32)
    nearest = top
    for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        chosen = tl.where(slot == k, top, chosen)
        # The largest distance up from `top`, around the integers, is that to the next below it.
        below = top + tl.max(short - top, axis=0)
        nearest = tl.minimum(nearest, top ^ below)
        top = below
    return LOW - (chosen.to(tl.int32, bitcast=True) & LOW), nearest <= LOW


@triton.jit
def _best_by_whole_keys(
    key, allowed, expert, E: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr
):
    """The best TOP_K of key, allowed and expert [G, M], in order as [SLOTS]."""
    key = tl.reshape(tl.where(allowed, key, LOWEST), [E])
    expert = tl.reshape(expert, [E])
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros([SLOTS], tl.int32)
    for k in range(TOP_K):
        index = tl.min(tl.where(key == tl.max(key, axis=0), expert, E - 1), axis=0)
        chosen = tl.where(slot == k, index, chosen)
        key = tl.where(expert == index, LOWEST, key)
    return chosen


@triton.jit
def _weights(scores, chosen, floor, E: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr):
    """scores [G, M] of the chosen [SLOTS], of which TOP_K count, divided by their sum."""
    weight = tl.gather(tl.reshape(scores, [E]), chosen, 0)
    weight = tl.where(tl.arange(0, SLOTS) < TOP_K, weight, 0.0)
    return tl.math.div_rn(weight, tl.sum(weight, axis=0) + floor)


@triton.jit
def choose_experts(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    token,
    count,
    logit_scale,
    floor,
    E: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The choice for one `token` of `count`; waits for the previous kernel."""
    MEMBERS: tl.constexpr = E // GROUPS
    expert = tl.arange(0, GROUPS)[:, None] * MEMBERS + tl.arange(0, MEMBERS)[None, :]
    bias = tl.load(bias_ptr + expert)
    previous_is_done(PDL)

    logits_row = logits_ptr + token * E + expert
    logits = tl.load(logits_row)
    for split in tl.static_range(1, SPLITS):  # pyright: ignore[reportGeneralTypeIssues]
        logits += tl.load(logits_row + split * count * E)
    divisor = 1.0 + exp_fp32(logits * -logit_scale, PDL)
    largest = tl.max(tl.reshape(divisor, [E]).to(tl.uint32, bitcast=True), axis=0)

    scores = _inverse(divisor, PDL)
    key = _keys(scores + bias)
    allowed = _open_groups(key, GROUPS, TOP_GROUPS)
    chosen, unsure = _best_by_short_keys(key, allowed, expert, E, TOP_K, SLOTS)
    weight = _weights(scores, chosen, floor, E, TOP_K, SLOTS)
    if unsure | (largest >= TOO_LARGE):
        scores = tl.math.div_rn(1.0, divisor)
        key = _keys(scores + bias)
        allowed = _open_groups(key, GROUPS, TOP_GROUPS)
        chosen = _best_by_whole_keys(key, allowed, expert, E, TOP_K, SLOTS)
        weight = _weights(scores, chosen, floor, E, TOP_K, SLOTS)

    slot = tl.arange(0, SLOTS)
    used = slot < TOP_K
    tl.store(weights_ptr + token * TOP_K + slot, weight, mask=used)
    tl.store(experts_ptr + token * TOP_K + slot, chosen.to(tl.int64), mask=used)


@triton.jit
def router_choose_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    count,
    logit_scale,
    floor,
    E: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    choose_experts(
        logits_ptr,
        bias_ptr,
        weights_ptr,
        experts_ptr,
        tl.program_id(0),
        count,
        logit_scale,
        floor,
        E,
        GROUPS,
        TOP_GROUPS,
        TOP_K,
        SLOTS,
        SPLITS,
        PDL,
    )


def choose(node: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [splits, N, E] FP32, to be summed over the splits -> (weights [N, K] FP32, experts
    [N, K] int64) of the router `node`."""
    splits, tokens, count = logits.shape
    rule = Rule.of(node)
    weights = torch.empty((tokens, node.top_k), device=logits.device)
    experts = torch.empty((tokens, node.top_k), dtype=torch.int64, device=logits.device)
    if tokens == 0:
        return weights, experts
    launch(
        router_choose_kernel,
        (tokens,),
        logits,
        node.e_score_correction_bias,
        weights,
        experts,
        tokens,
        rule.logit_scale,
        rule.floor,
        E=count,
        GROUPS=rule.groups,
        TOP_GROUPS=rule.top_groups,
        TOP_K=node.top_k,
        SLOTS=triton.next_power_of_2(node.top_k),
        SPLITS=splits,
        num_warps=1,
    )
    return weights, experts


def offline_cases() -> list[OfflineCase]:
    """The best 8 of 256 experts, in groups and not."""
    cases = []
    kinds: dict[str, str] = dict.fromkeys(("logits_ptr", "bias_ptr", "weights_ptr"), "*fp32")
    kinds |= {"experts_ptr": "*i64", "count": "i32", "logit_scale": "fp32", "floor": "fp32"}
    for groups, top_groups in ((8, 4), (1, 1)):
        values = {"E": 256, "GROUPS": groups, "TOP_GROUPS": top_groups}
        values |= {"TOP_K": 8, "SLOTS": 8, "SPLITS": 1}
        signature = {**kinds, **dict.fromkeys(values, "constexpr")}
        cases.append(OfflineCase(router_choose_kernel, signature, values, 1))
    return cases
