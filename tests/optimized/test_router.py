"""The router's kernels against the reference: the same experts in the same order, ties included,
and weights within FP32 noise."""

from dataclasses import replace

import pytest
import torch

from optimized.router_topk import CHANGE, RouterKnobs
from reference.beam import Router, configs
from tests.optimized.kernel_checks import (
    DEVICE,
    all_knobs,
    bf16,
    needs_kernels,
    refusal,
    run_triton,
)
from tests.reference.noise import assert_within, within

pytestmark = needs_kernels
TOY = configs["mini"]
BEAM = configs["tp8-rank"]
# Few programs: the interpreter takes milliseconds for each.
FEW = RouterKnobs(rows=16, tokens=4, block=64, splits=1, warps=4)


def node(config, width: int) -> Router:
    made = Router(replace(config, hidden=width)).to(DEVICE).requires_grad_(False)
    generator = torch.Generator(DEVICE).manual_seed(0)
    made.weight.normal_(std=width**-0.5, generator=generator)
    made.e_score_correction_bias.normal_(std=0.1, generator=generator)
    return made


def reordered(reference, x, count=16):
    """The reference's weights with its sum in `count` other orders."""
    twin = Router(replace(TOY, experts=len(reference.weight), hidden=x.shape[1])).to(DEVICE)
    twin.__dict__.update({n: getattr(reference, n) for n in ("groups", "top_groups", "top_k")})
    twin.requires_grad_(False).e_score_correction_bias.copy_(reference.e_score_correction_bias)
    for seed in range(count):
        order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(seed))
        order = order.to(DEVICE)
        twin.weight.copy_(reference.weight[:, order])
        yield twin(x[:, order])[0]


def assert_matches(reference, x, knobs=None):
    weights, experts = run_triton(CHANGE, reference, x, knobs=knobs)
    expected_weights, expected_experts = reference(x)
    assert experts.dtype == torch.int64 and experts.tolist() == expected_experts.tolist()
    assert weights.dtype == torch.float32
    assert_within(weights, expected_weights, reordered(reference, x))


@pytest.mark.parametrize("tokens", [1, 2, 5, 16], ids="N{}".format)
def test_matches_the_reference(tokens):
    assert_matches(node(TOY, 256), bf16(tokens, 256))


@pytest.mark.parametrize("width", [320, 33], ids="D{}".format)
def test_ragged_widths(width):
    assert_matches(node(TOY, width), bf16(3, width))


def test_beams_256_experts():
    assert_matches(node(BEAM, 64), bf16(3, 64), FEW)


def test_every_knob_gives_the_same_function():
    reference, x, seen = node(TOY, 300), bf16(3, 300), 0
    for knobs in all_knobs(CHANGE, {"N": 3, "D": 300}):
        assert_matches(reference, x, knobs)
        seen += 1
    assert seen >= 8


def test_no_tokens():
    weights, experts = run_triton(CHANGE, node(TOY, 64), bf16(0, 64))
    assert weights.shape == experts.shape == (0, 4)


def test_rows_of_a_larger_tensor():
    assert_matches(node(TOY, 64), bf16(4, 192)[:, 64:128])


@pytest.mark.parametrize("config", [TOY, BEAM], ids=["E16", "E256"])
@pytest.mark.parametrize("levels", [1, 2, 3], ids="levels{}".format)
def test_ties_go_to_the_lower_index(config, levels):
    """Logits drawn from so few values that groups and experts tie. One-hot rows make the sums
    exact, so both sides see the very same scores."""
    reference = node(config, 16)
    values = torch.tensor([0.25, -0.5, 1.0], device=DEVICE)[:levels]
    reference.weight.copy_(values[torch.randint(levels, reference.weight.shape).to(DEVICE)])
    reference.e_score_correction_bias.zero_()
    reference.e_score_correction_bias[::3] = -0.0
    x = torch.eye(16, dtype=torch.bfloat16, device=DEVICE)[:8]
    weights, experts = run_triton(CHANGE, reference, x, knobs=FEW)
    expected_weights, expected_experts = reference(x)
    assert experts.tolist() == expected_experts.tolist()
    assert_within(weights, expected_weights, reordered(reference, x))
    if levels == 1:
        assert experts[0].tolist() == list(range(config.top_k))


def test_biased_scores_below_zero_and_a_zero_among_them():
    """Scores of both signs keep their order as integers, and -0.0 ties with 0.0."""
    reference = node(TOY, 16)
    reference.weight.zero_()
    bias = reference.e_score_correction_bias
    bias.copy_(torch.linspace(-1.0, 0.0, len(bias)))
    bias[3], bias[7] = -0.5, -0.5
    x = bf16(2, 16)
    assert run_triton(CHANGE, reference, x)[1].tolist() == reference(x)[1].tolist()


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_nan_chooses_experts_that_exist():
    x = torch.full((1, 64), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    _, experts = run_triton(CHANGE, node(TOY, 64), x)
    assert experts.numel() == TOY.top_k and ((experts >= 0) & (experts < TOY.experts)).all()


def test_tf32_or_bf16_products_would_be_noticed():
    """Weights rounded to the 11 bits of TF32, or to BF16's 8, move the result beyond the noise."""
    reference, x = node(TOY, 256), bf16(16, 256)
    others = list(reordered(reference, x))
    expected = reference(x)[0]
    for kept_bits in (0xFFFFE000, 0xFFFF0000):
        rough = node(TOY, 256)
        mask = kept_bits - 2**32
        rough.weight.copy_((rough.weight.view(torch.int32) & mask).view(torch.float32))
        assert not within(rough(x)[0], expected, others)


def test_guard_says_why():
    reference, x = node(TOY, 64), bf16(2, 64)
    assert refusal(CHANGE, reference, x) == ""
    assert refusal(CHANGE, reference, bf16(17, 64)) == ""
    assert "do not fit" in refusal(CHANGE, reference, bf16(2, 32))
    assert "powers of two" in refusal(CHANGE, node(replace(TOY, experts=24), 64), x)
    assert "torch.float32" in refusal(CHANGE, reference, x.float())
    assert "contiguous" in refusal(CHANGE, reference, bf16(2, 128)[:, ::2])


def test_heuristic_is_valid():
    for tokens in (0, 1, 3, 16):
        for width in (5120, 256, 33):
            sizes = {"N": tokens, "D": width}
            assert RouterKnobs.heuristic(sizes).is_valid(sizes), sizes


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 16], ids="N{}-D5120-E256".format)
def test_matches_on_cuda(tokens):
    assert_matches(node(BEAM, 5120), bf16(tokens, 5120))
