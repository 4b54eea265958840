"""The output norm and gate's kernel against the reference: its three roundings, layouts."""

import pytest
import torch

from optimized.output_norm_gate import CHANGE, NormGateKnobs
from reference.muse_spark_attention import OutputNormGate
from tests.optimized.kernel_checks import (
    DEVICE,
    all_knobs,
    bf16,
    needs_kernels,
    refusal,
    run_triton,
    same_bits,
)
from tests.reference.noise import assert_within, within

pytestmark = needs_kernels
NODE = OutputNormGate(1e-5)


def arguments(tokens: int, heads: int, dim: int, scale: float = 1.0):
    a, gate = (bf16(1, tokens, heads, dim, scale=s, seed=i) for i, s in ((1, scale), (2, 2.0)))
    return a, gate


def reordered(args, count=16):
    """The reference with its sum in `count` other orders."""
    for seed in range(count):
        order = torch.randperm(args[0].shape[-1], generator=torch.Generator().manual_seed(seed))
        order = order.to(DEVICE)
        yield NODE(*(x[..., order] for x in args))[..., order.argsort()]


def assert_matches(args, knobs=None, count=16):
    found = run_triton(CHANGE, NODE, *args, knobs=knobs)
    assert found.shape == args[0].shape
    assert_within(found, NODE(*args), reordered(args, count))


@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "scale"),
    [(1, 16, 64, 1.0), (9, 4, 64, 1.0), (3, 3, 7, 1.0), (20, 2, 32, 1e-4), (20, 2, 32, 1e4)],
    ids=str,
)
def test_matches_the_reference(tokens, heads, dim, scale):
    assert_matches(arguments(tokens, heads, dim, scale))


def test_every_knob_gives_the_same_function():
    args, seen = arguments(5, 3, 64), 0
    for rows in (15, 16384 * 16):
        for knobs in all_knobs(CHANGE, {"R": rows, "d": 64}):
            assert_matches(args, knobs, count=4)
            seen += 1
    assert seen >= 8


def test_a_slice_of_a_packed_projection_and_no_tokens():
    gate = bf16(2, 5, 640)[..., 128:384].unflatten(-1, (4, 64))
    assert gate.stride(1) == 640
    assert_matches((bf16(2, 5, 4, 64, seed=1), gate))
    assert run_triton(CHANGE, NODE, *arguments(0, 4, 64)).shape == (1, 0, 4, 64)


def test_heads_as_attention_returns_them():
    """Tokens and heads transposed, of two sequences."""
    a, gate = bf16(2, 4, 5, 64, seed=1).transpose(1, 2), bf16(2, 5, 4, 64, seed=2)
    assert a.stride() == (1280, 64, 320, 1)
    expected = run_triton(CHANGE, NODE, a.contiguous(), gate)
    assert same_bits(run_triton(CHANGE, NODE, a, gate), expected)
    assert_matches((a, gate))


@pytest.mark.parametrize("point", ["norm", "sigmoid"])
def test_one_rounding_less_would_be_noticed(point):
    def rounded(value, name):
        return value if name == point else value.bfloat16().float()

    args = arguments(64, 4, 64)
    a, gate = (x.float() for x in args)
    normed = rounded(a * torch.rsqrt(a.square().mean(-1, keepdim=True) + NODE.eps), "norm")
    found = (normed * rounded(torch.sigmoid(gate), "sigmoid")).bfloat16()
    assert not within(found, NODE(*args), reordered(args))


def test_guard_says_why():
    a, gate = arguments(4, 2, 64)
    assert refusal(CHANGE, NODE, a, gate) == ""
    assert "do not match" in refusal(CHANGE, NODE, a, gate[:, :2])
    heads_apart = bf16(1, 2, 4, 64).transpose(1, 2)
    assert "strides" in refusal(CHANGE, NODE, a, heads_apart)
    assert refusal(CHANGE, NODE, heads_apart, gate) == ""
    assert "strides" in refusal(CHANGE, NODE, bf16(1, 4, 2, 128)[..., ::2], gate)
    assert "torch.float32" in refusal(CHANGE, NODE, a.float(), gate)
    assert "up to 1024" in refusal(CHANGE, NODE, *arguments(1, 1, 1025))


def test_heuristic_is_valid():
    for rows in (1, 16, 16384 * 16):
        for dim in (7, 64, 128, 1024):
            sizes = {"R": rows, "d": dim}
            assert NormGateKnobs.heuristic(sizes).is_valid(sizes), sizes


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 128, 16384], ids="bf16-T{}-H16-d64".format)
def test_matches_on_cuda(tokens):
    gate = bf16(1, tokens, 2304)[..., 1280:].unflatten(-1, (16, 64))
    assert_matches((bf16(1, tokens, 16, 64, seed=1), gate), count=4)
