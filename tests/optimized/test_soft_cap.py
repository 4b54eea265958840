"""The soft cap's kernel against the reference, on every BF16 value; its tanh against FP64."""

import pytest
import torch

from optimized.soft_cap import CHANGE, SoftCapKnobs
from reference.muse_spark import SoftCap
from tests.optimized.kernel_checks import (
    DEVICE,
    all_knobs,
    bf16,
    elements,
    needs_kernels,
    nudged,
    refusal,
    run_triton,
    same_bits,
)
from tests.reference.noise import assert_within, within

pytestmark = needs_kernels
NODE = SoftCap(0.1767766952966369, 20.0)


def every_value(limit: float = torch.inf) -> torch.Tensor:
    """All finite BF16 values up to a size."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return x[x.isfinite() & (x.abs() <= limit)].to(DEVICE)


def spelled_out(logits, tanh=torch.tanh, skip=None, node=NODE):
    """The reference's equation, rounding by rounding, but for `skip`."""

    def rounded(value, name):
        return value if name == skip else value.bfloat16().float()

    scaled = rounded(logits.float() * node.scale, "scaled")
    capped = rounded(tanh(rounded(scaled / node.cap, "ratio")), "tanh")
    return (capped * node.cap).bfloat16()


def others(logits, node=NODE):
    """The reference with its tanh off by one FP32 ULP either way."""
    return [elements(spelled_out(logits, tanh=t, node=node)) for t in nudged(torch.tanh)]


def test_every_bf16_value():
    x = every_value()
    found = run_triton(CHANGE, NODE, x)
    assert_within(elements(found), elements(NODE(x)), others(x))
    assert same_bits(found[x == 0], x[x == 0])  # zeros keep their sign


def test_tanh_of_every_bf16_value():
    """With scale and cap 1 the kernel is tanh, and as near to FP64's as the reference."""
    node, x = SoftCap(1.0, 1.0), every_value(20.0)
    found, exact = run_triton(CHANGE, node, x), torch.tanh(x.double()).bfloat16()
    assert_within(elements(found), elements(exact), others(x, node))
    assert_within(elements(found), elements(node(x)), others(x, node))


@pytest.mark.parametrize("shape", [(1, 1, 509), (3, 64), (0, 8)], ids=str)
def test_shapes(shape):
    x = bf16(*shape, scale=60.0)
    found = run_triton(CHANGE, NODE, x)
    assert found.shape == x.shape
    if x.numel():
        assert_within(elements(found), elements(NODE(x)), others(x))


def test_what_is_not_finite():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan], device=DEVICE).bfloat16()
    assert same_bits(run_triton(CHANGE, NODE, x), NODE(x))


def test_every_knob_gives_the_same_bits():
    x, seen = bf16(2, 300, scale=30.0), 0
    expected = run_triton(CHANGE, NODE, x)
    for knobs in all_knobs(CHANGE, {"N": 2, "V": 300}):
        assert same_bits(run_triton(CHANGE, NODE, x, knobs=knobs), expected)
        seen += 1
    assert seen >= 6


@pytest.mark.parametrize("point", ["scaled", "ratio", "tanh"])
def test_one_rounding_less_would_be_noticed(point):
    x = bf16(64, 256, scale=60.0)
    expected = elements(NODE(x))
    assert within(elements(spelled_out(x)), expected, others(x))
    assert not within(elements(spelled_out(x, skip=point)), expected, others(x))


def test_guard_says_why():
    x = bf16(4, 64)
    assert refusal(CHANGE, NODE, x) == ""
    assert "strides" in refusal(CHANGE, NODE, x[:, ::2])
    assert "torch.float32" in refusal(CHANGE, NODE, x.float())


def test_heuristic_is_valid():
    for rows in (1, 128, 16384):
        sizes = {"N": rows, "V": 25256}
        assert SoftCapKnobs.heuristic(sizes).is_valid(sizes)


@pytest.mark.gpu
def test_matches_on_cuda():
    for x in (every_value(), bf16(8, 25256, scale=60.0)):
        assert_within(elements(run_triton(CHANGE, NODE, x)), elements(NODE(x)), others(x))
