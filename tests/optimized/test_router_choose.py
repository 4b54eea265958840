"""The choice of experts from given logits, where the order is hard to tell: next to ties, at the
last place, among infinities and numbers next to zero."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from optimized.router_choose import choose
from reference.beam import Router, configs
from reference.muse_spark_config import PRESETS
from reference.muse_spark_moe import Router as BiasedRouter
from tests.optimized.kernel_checks import DEVICE, needs_kernels

pytestmark = needs_kernels
# Experts, their groups, the groups and the experts chosen.
BEAM, ONE_GROUP = (256, 8, 4, 8), (256, 1, 1, 8)
RULES = [BEAM, ONE_GROUP, (64, 4, 2, 6), (1024, 32, 4, 8), (32, 2, 1, 16)]
ULP = 2.0**-24  # of numbers from a half to one


def name(rule) -> str:
    return f"E{rule[0]}-G{rule[2]}of{rule[1]}-K{rule[3]}"


def node(rule):
    """A router of a one-wide input, whose weights are the logits of the input 1."""
    experts, groups, top_groups, top_k = rule
    sizes = {"hidden": 1, "experts": experts, "top_k": top_k}
    if groups == 1:
        made = BiasedRouter(replace(PRESETS["mini"], **sizes, logit_scale=1.0))
    else:
        sizes |= {"groups": groups, "top_groups": top_groups}
        made = Router(replace(configs["mini"], **sizes))
    made.weight.data.zero_()
    made.e_score_correction_bias.zero_()
    return made.to(DEVICE).requires_grad_(False)


def chosen(router):
    with np.errstate(over="ignore", invalid="ignore"):
        return choose(router, router.weight.T[None].contiguous())


def assert_matches(router):
    x = torch.ones(1, 1, dtype=torch.bfloat16, device=DEVICE)
    weights, experts = chosen(router)
    assert experts.tolist() == router(x)[1].tolist()
    return weights, experts


def drawn(count: int, most: int, seed: int) -> torch.Tensor:
    return torch.randint(most, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rule", RULES, ids=name)
def test_scores_far_apart(rule):
    router = node(rule)
    order = torch.randperm(rule[0], generator=torch.Generator().manual_seed(1))
    router.weight[:, 0] = torch.linspace(-4.0, 4.0, rule[0])[order]
    assert_matches(router)


@pytest.mark.parametrize("rule", RULES, ids=name)
@pytest.mark.parametrize("levels", [2, 40, 3000], ids="levels{}".format)
def test_scores_a_few_ulp_apart(rule, levels):
    """Of a score of one half each, and a bias of some ULP. Every weight is 1 / K."""
    router = node(rule)
    router.e_score_correction_bias.copy_(drawn(rule[0], levels, seed=levels) * ULP)
    weights, _ = assert_matches(router)
    if rule in (BEAM, ONE_GROUP):
        assert weights.tolist() == [[0.125] * 8]


@pytest.mark.parametrize("rule", [BEAM, ONE_GROUP], ids=name)
@pytest.mark.parametrize("step", [0, 1, 255, 256], ids="ulp{}".format)
def test_the_last_place_goes_to_the_better_of_two_neighbours(rule, step):
    """All others are far apart; the lower index is worse by `step` ULP, or the two tie."""
    router = node(rule)
    best = torch.tensor([9, 200, 33, 50, 7, 201, 48])
    bias = router.e_score_correction_bias
    bias.fill_(-0.25)
    bias[best] = 0.25 + torch.arange(7) / 64
    bias[203], bias[44] = 0.125 + step * ULP, 0.125
    _, experts = assert_matches(router)
    assert experts[0, -1] == (203 if step else 44)


@pytest.mark.parametrize("rule", RULES, ids=name)
def test_experts_and_groups_that_a_bias_rules_out(rule):
    """An infinite bias: of some experts in every group, and of all but one in a group."""
    router, (count, groups, top_groups, top_k) = node(rule), rule
    router.weight[:, 0] = torch.linspace(2.0, -2.0, count)
    bias = router.e_score_correction_bias.view(groups, -1)
    if top_k < top_groups * bias.shape[1]:
        bias[:, 1::4] = -torch.inf
    if groups > top_groups:
        bias[0, 1:] = -torch.inf
    _, experts = assert_matches(router)
    assert torch.isfinite(bias.flatten()[experts]).all()


@pytest.mark.parametrize("rule", [BEAM, ONE_GROUP], ids=name)
def test_scores_below_the_normal_numbers(rule):
    """1 / (1 + e^88) has no 24 bits, and 1 / (1 + e^100) is zero: both keep their order."""
    router = node(rule)
    order = torch.randperm(rule[0], generator=torch.Generator().manual_seed(2))
    router.weight[:, 0] = (-100.0 + 0.05 * torch.arange(rule[0]).clamp(max=250))[order]
    _, experts = assert_matches(router)
    assert router.weight[experts[0, 0], 0] == router.weight.max()


@pytest.mark.parametrize("rule", RULES, ids=name)
@pytest.mark.parametrize("logit", [0.0, -100.0], ids=["half", "nothing"])
@pytest.mark.parametrize("zeros", [1, 2], ids="zeros{}".format)
def test_biased_scores_of_both_signs(rule, logit, zeros):
    """Scores of a half or of nothing, biased to two positive numbers, a zero, perhaps its negative,
    and negative numbers: two zeros are a tie."""
    router = node(rule)
    router.weight[:, 0] = logit
    values = 2.0 - torch.arange(rule[0])
    values[3 : 2 + zeros] = -0.0
    order = torch.randperm(rule[0], generator=torch.Generator().manual_seed(3))
    router.e_score_correction_bias[order] = values.to(DEVICE) - (0.5 if logit == 0 else 0.0)
    assert_matches(router)
