"""A router's choice of experts, from its logits; one warp a token.

    s       = sigmoid(logits * c)                      FP32
    groups  = the best G' of G by the sum of each group's two best s + b, if G > 1
    experts = the best K of their experts by s + b, in order
    weights = s of those / (their sum + a floor)

Ties go to the lower index, of groups and of experts. N tokens, E experts in G groups of M = E / G.
The choice is one warp's serial work, so it runs on integer keys in the floats' order: their
warp-wide maximum is one instruction on NVIDIA since sm_80, where a float's takes ten.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.triton_support import (
    OfflineCase,
    launch,
    let_next_start,
    previous_is_done,
    sigmoid_fp32,
)

LOWEST = tl.constexpr(-(2**31))


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
def _scores(logits_ptr, index, split_stride, logit_scale, SPLITS: tl.constexpr):
    """sigmoid of the scaled logits at `index`, their splits summed in order."""
    logits = tl.load(logits_ptr + index)
    for split in tl.static_range(1, SPLITS):  # pyright: ignore[reportGeneralTypeIssues]
        logits += tl.load(logits_ptr + split * split_stride + index)
    return sigmoid_fp32(logits * logit_scale)


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
    logits_row = logits_ptr + token * E
    MEMBERS: tl.constexpr = E // GROUPS
    group, member = tl.arange(0, GROUPS), tl.arange(0, MEMBERS)[None, :]
    expert = group[:, None] * MEMBERS + member
    bias = tl.load(bias_ptr + expert)
    previous_is_done(PDL)

    scores = _scores(logits_row, expert, count * E, logit_scale, SPLITS)
    biased = scores + bias
    # Integers in the order of the biased scores; + 0.0: -0.0 and 0.0 are a tie.
    bits = (biased + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if GROUPS > 1:
        # The two best of each group, and the groups that fewer than TOP_GROUPS others beat.
        best = tl.max(biased, axis=1)
        place = tl.min(tl.where(biased == best[:, None], member, MEMBERS), axis=1)
        second = tl.max(tl.where(member == place[:, None], float("-inf"), biased), axis=1)
        score = best + second
        mine, other = score[:, None], score[None, :]
        earlier = group[None, :] < group[:, None]
        beaten = (other > mine) | ((other == mine) & earlier)
        rank = tl.sum(beaten.to(tl.int32), axis=1)
        key = tl.where((rank < TOP_GROUPS)[:, None], key, LOWEST)

    # The best experts, one after the other.
    key = tl.reshape(key, [E])
    scores = tl.reshape(scores, [E]).to(tl.int32, bitcast=True)
    expert = tl.arange(0, E)
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros([SLOTS], tl.int32)
    weight = tl.zeros([SLOTS], tl.int32)
    for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        index = tl.min(tl.where(key == tl.max(key, axis=0), expert, E - 1), axis=0)
        taken = expert == index
        chosen = tl.where(slot == k, index, chosen)
        weight = tl.where(slot == k, tl.max(tl.where(taken, scores, LOWEST), axis=0), weight)
        key = tl.where(taken, LOWEST, key)

    used = slot < TOP_K
    weight = weight.to(tl.float32, bitcast=True)
    weight = tl.math.div_rn(weight, tl.sum(weight, axis=0) + floor)
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
