"""The combine kernel against the reference: bit-equal, whatever the shape."""

import pytest
import torch

from optimized.combine import CHANGE, CombineKnobs
from reference.beam import Combine
from tests.optimized.kernel_checks import (
    DEVICE,
    all_knobs,
    bf16,
    needs_kernels,
    refusal,
    run_triton,
    same_bits,
)

pytestmark = needs_kernels
NODE = Combine(2.5)


def arguments(tokens: int, top_k: int, width: int):
    weights = torch.rand(tokens, top_k, device=DEVICE)
    return bf16(tokens, top_k, width), weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    "shape", [(1, 8, 320), (37, 4, 64), (2, 1, 7), (3, 16, 33), (0, 8, 64)], ids=str
)
def test_bit_equal(shape):
    args = arguments(*shape)
    assert same_bits(run_triton(CHANGE, NODE, *args), NODE(*args))


def test_every_knob_is_bit_equal():
    args, seen = arguments(3, 8, 320), 0
    for tokens in (3, 16384):
        for knobs in all_knobs(CHANGE, {"N": tokens, "K": 8, "D": 320}):
            seen += 1
            assert same_bits(run_triton(CHANGE, NODE, *args, knobs=knobs), NODE(*args))
    assert seen >= 8


def test_another_order_or_a_rounding_more_would_be_noticed():
    y, weights = arguments(64, 8, 256)
    expected = NODE(y, weights)
    assert not same_bits(NODE(y.flip(1), weights.flip(1)), expected)
    assert not same_bits(Combine(1.0)(y, weights) * 2.5, expected)


def test_guard_says_why():
    y, weights = arguments(4, 8, 64)
    assert refusal(CHANGE, NODE, y, weights) == ""
    assert "fit together" in refusal(CHANGE, NODE, y, weights[:2])
    assert "17 slots" in refusal(CHANGE, NODE, *arguments(1, 17, 8))
    assert "contiguous" in refusal(CHANGE, NODE, y[..., ::2], weights)
    assert "torch.bfloat16" in refusal(CHANGE, NODE, y, weights.to(torch.bfloat16))
    assert "torch.float32" in refusal(CHANGE, NODE, y.float(), weights)


def test_heuristic_is_valid():
    for tokens in (1, 128, 16384):
        sizes = {"N": tokens, "K": 8, "D": 5120}
        assert CombineKnobs.heuristic(sizes).is_valid(sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 128, 16384], ids="bf16-N{}-K8-D5120".format)
def test_bit_equal_on_cuda(tokens):
    args = arguments(tokens, 8, 5120)
    assert same_bits(run_triton(CHANGE, NODE, *args), NODE(*args))
