"""The router of many tokens against the reference: exact terms, the same experts, FP32 weights."""

from dataclasses import replace

import pytest
import torch

from optimized.router_matmul import MatmulKnobs, router_logits, split_weight_kernel
from optimized.router_topk import CHANGE, MAX_TOKENS
from optimized.triton_support import launch
from tests.optimized.kernel_checks import DEVICE, all_knobs, bf16, needs_kernels, run_triton
from tests.optimized.test_router import BEAM, TOY, node, reordered
from tests.reference.noise import assert_within, within

pytestmark = needs_kernels
FEW = MatmulKnobs(row_tile=64, columns=64, block=64, splits=1, stages=2, warps=4)


def logits_in_other_orders(reference, x, count=16):
    for seed in range(count):
        order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(seed))
        order = order.to(DEVICE)
        yield x[:, order].float() @ reference.weight[:, order].T


def assert_logits_match(reference, x, knobs=None):
    found = router_logits(x, reference.weight, knobs).sum(dim=0)
    others = logits_in_other_orders(reference, x)
    assert_within(found, x.float() @ reference.weight.T, others)


def test_a_weight_is_the_sum_of_its_terms():
    weight = torch.randn(8, 512, device=DEVICE) * 10.0 ** torch.randint(-8, 8, (8, 512)).to(DEVICE)
    terms = torch.empty((3, *weight.shape), dtype=torch.bfloat16, device=DEVICE)
    launch(split_weight_kernel, (4,), weight, terms, weight.numel(), BLOCK=1024, num_warps=4)
    low, middle, high = terms.double()
    assert torch.equal(low + middle + high, weight.double())
    assert (high.abs() >= 255 * middle.abs()).all() and (middle.abs() >= 255 * low.abs()).all()


@pytest.mark.parametrize(("tokens", "width"), [(17, 256), (100, 320), (70, 33)], ids=str)
def test_logits_match(tokens, width):
    assert_logits_match(node(TOY, width), bf16(tokens, width))


def test_rows_of_a_larger_tensor():
    assert_logits_match(node(TOY, 64), bf16(40, 192)[:, 64:128])


def test_every_knob_gives_the_same_function():
    reference, x, seen = node(TOY, 288), bf16(70, 288), 0
    expected, others = x.float() @ reference.weight.T, list(logits_in_other_orders(reference, x))
    for knobs in all_knobs(CHANGE, {"N": 70, "D": 288, "E": 16}):
        found = router_logits(x, reference.weight, knobs).sum(dim=0)
        assert_within(found, expected, others)
        seen += 1
    assert seen >= 8


@pytest.mark.parametrize("splits", [1, 4])
def test_the_same_experts_and_their_weights(splits):
    reference, x = node(BEAM, 256), bf16(20, 256)
    assert len(x) > MAX_TOKENS
    weights, experts = run_triton(CHANGE, reference, x, knobs=replace(FEW, splits=splits))
    expected_weights, expected_experts = reference(x)
    assert experts.tolist() == expected_experts.tolist()
    assert_within(weights, expected_weights, reordered(reference, x))


def test_ties_go_to_the_lower_index():
    reference, x = node(TOY, 32), bf16(20, 32)
    reference.weight.copy_(reference.weight[:1].expand_as(reference.weight))
    reference.e_score_correction_bias.zero_()
    _, experts = run_triton(CHANGE, reference, x)
    assert experts.tolist() == [list(range(TOY.top_k))] * 20


def test_without_the_smallest_terms_it_would_be_noticed():
    reference, x = node(TOY, 256), bf16(64, 256)
    rough = node(TOY, 256)
    high = rough.weight.bfloat16().float()
    rough.weight.copy_(high + (rough.weight - high).bfloat16().float())
    logits = x.float() @ rough.weight.T
    expected = x.float() @ reference.weight.T
    assert not torch.equal(logits, expected)
    one_term = x.float() @ high.T
    assert not within(one_term, expected, list(logits_in_other_orders(reference, x)))


def test_heuristic_is_valid():
    for tokens in (17, 128, 16384):
        for width, count in ((5120, 256), (33, 16), (256, 1024)):
            sizes = {"N": tokens, "D": width, "E": count}
            assert MatmulKnobs.heuristic(sizes).is_valid(sizes), sizes


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [17, 128, 2048, 16384], ids="N{}-D5120-E256".format)
def test_matches_on_cuda(tokens):
    """Sums of tensor cores are no farther from FP64 than the reference's are."""
    reference, x = node(BEAM, 5120), bf16(tokens, 5120)
    exact = x.double() @ reference.weight.double().T
    found = router_logits(x, reference.weight, None).sum(dim=0)
    plain = x.float() @ reference.weight.T
    assert_within(found, plain, logits_in_other_orders(reference, x, 4))
    assert (found - exact).norm() <= 2 * (plain - exact).norm()
    weights, experts = run_triton(CHANGE, reference, x)
    expected_weights, expected_experts = reference(x)
    same = (experts == expected_experts).all(dim=1)
    assert same.float().mean() > 0.99
    assert_within(weights[same], expected_weights[same], (w[same] for w in reordered(reference, x)))
