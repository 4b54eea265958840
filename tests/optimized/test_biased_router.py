"""The router without groups against the reference: the same experts in order, ties included, and
weights within FP32 noise."""

from dataclasses import replace

import pytest
import torch

from optimized.biased_router import CHANGE
from optimized.router_matmul import MatmulKnobs
from optimized.router_topk import MAX_TOKENS, RouterKnobs
from reference.muse_spark_config import PRESETS
from reference.muse_spark_moe import Router
from tests.optimized.kernel_checks import DEVICE, bf16, needs_kernels, refusal, run_triton
from tests.reference.noise import assert_within, within

pytestmark = needs_kernels
# Few programs: the interpreter takes milliseconds for each.
FEW = RouterKnobs(rows=16, tokens=4, block=64, splits=1, warps=4)
MANY = MatmulKnobs(row_tile=64, columns=64, block=32, splits=1, stages=2, warps=4)


def node(width: int, experts: int = 16, top_k: int = 4) -> Router:
    sizes = {"hidden": width, "experts": experts, "top_k": top_k}
    made = Router(replace(PRESETS["mini"], **sizes)).to(DEVICE).requires_grad_(False)
    generator = torch.Generator(DEVICE).manual_seed(0)
    made.weight.normal_(std=4 * width**-0.5, generator=generator)
    made.e_score_correction_bias.normal_(std=0.1, generator=generator)
    return made


def reordered(reference, x, count=16):
    """The reference's weights with its sum in `count` other orders."""
    twin = node(x.shape[1], len(reference.weight), reference.top_k)
    twin.e_score_correction_bias.copy_(reference.e_score_correction_bias)
    for seed in range(count):
        order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(seed))
        order = order.to(DEVICE)
        twin.weight.copy_(reference.weight[:, order])
        yield twin(x[:, order])[0]


def assert_matches(reference, x, knobs=None):
    weights, experts = run_triton(CHANGE, reference, x, knobs=knobs)
    expected_weights, expected_experts = reference(x)
    moved = (experts != expected_experts).any(dim=-1)
    assert experts.dtype == torch.int64
    assert_tied(reference, x[moved], experts[moved], expected_experts[moved])
    others = (w[~moved] for w in reordered(reference, x))
    assert_within(weights[~moved], expected_weights[~moved], others)


def assert_tied(reference, x, experts, expected):
    """The experts that changed places have exact scores closer than FP32's errors: of 16384 tokens
    one had (an H200, 2026-12-01)."""
    if len(x) == 0:
        return
    exact, single = (
        torch.sigmoid((x.to(t) @ reference.weight.T.to(t)) * reference.logit_scale)
        + reference.e_score_correction_bias.to(t)
        for t in (torch.float64, torch.float32)
    )
    apart = (exact.gather(1, experts) - exact.gather(1, expected)).abs().max()
    assert apart <= 2 * (single - exact).abs().max()


def test_a_tie_is_told_from_a_wrong_expert():
    reference, x = node(64), bf16(4, 64)
    experts = reference(x)[1]
    assert_tied(reference, x, experts, experts)
    with pytest.raises(AssertionError):
        assert_tied(reference, x, experts.flip(-1), experts)


@pytest.mark.parametrize("tokens", [1, 5], ids="N{}".format)
@pytest.mark.parametrize("width", [128, 33], ids="D{}".format)
def test_matches_the_reference(tokens, width):
    assert_matches(node(width), bf16(tokens, width))


def test_256_experts():
    assert_matches(node(64, experts=256, top_k=8), bf16(3, 64), FEW)


def test_many_tokens():
    x = bf16(MAX_TOKENS + 3, 64)
    assert_matches(node(64), x, MANY)


@pytest.mark.parametrize("levels", [1, 2, 3], ids="levels{}".format)
def test_ties_go_to_the_lower_index(levels):
    """One-hot rows make the sums exact, so both sides see the very same scores."""
    reference = node(16, experts=64, top_k=8)
    values = torch.tensor([0.25, -0.5, 1.0], device=DEVICE)[:levels]
    reference.weight.copy_(values[torch.randint(levels, reference.weight.shape).to(DEVICE)])
    reference.e_score_correction_bias.zero_()
    reference.e_score_correction_bias[::3] = -0.0
    x = torch.eye(16, dtype=torch.bfloat16, device=DEVICE)[:4]
    _, experts = run_triton(CHANGE, reference, x, knobs=FEW)
    assert experts.tolist() == reference(x)[1].tolist()
    if levels == 1:
        assert experts[0].tolist() == list(range(8))


def test_the_bias_serves_the_choice_alone():
    reference, x = node(64), bf16(2, 64)
    reference.e_score_correction_bias.copy_(torch.linspace(-3.0, 3.0, 16))
    assert_matches(reference, x)
    assert run_triton(CHANGE, reference, x)[1].tolist() == [[15, 14, 13, 12]] * 2


def test_scores_next_to_nothing_are_divided_by_the_floor():
    """Weights of 1e-16 each do not add up to one."""
    reference = node(16)
    reference.weight.fill_(-13.0)
    x = torch.ones(1, 16, dtype=torch.bfloat16, device=DEVICE)
    assert_matches(reference, x)
    total = run_triton(CHANGE, reference, x)[0].sum()
    assert 0.1 < total < 0.9


def test_an_unscaled_logit_would_be_noticed():
    reference, x = node(64), bf16(4, 64)
    others, expected = list(reordered(reference, x)), reference(x)[0]
    assert within(run_triton(CHANGE, reference, x)[0], expected, others)
    reference.logit_scale = 1.0
    assert not within(run_triton(CHANGE, reference, x)[0], expected, others)


def test_guard_says_why():
    reference, x = node(64), bf16(2, 64)
    assert refusal(CHANGE, reference, x) == ""
    assert "do not fit" in refusal(CHANGE, reference, bf16(2, 32))
    assert "powers of two" in refusal(CHANGE, node(64, experts=24), x)
    assert "top 32 of 1 groups" in refusal(CHANGE, node(64, top_k=32), x)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 16, 300, 16384], ids="N{}-D8192-E256".format)
def test_matches_on_cuda(tokens):
    assert_matches(node(8192, experts=256, top_k=8), bf16(tokens, 8192))
