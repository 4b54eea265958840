"""The output gate's kernel against the reference: its three roundings, layouts, special values."""

import pytest
import torch

from optimized.output_gate import CHANGE, GateKnobs
from reference.beam import OutputGate
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
NODE = OutputGate()


def arguments(tokens: int, heads: int, dim: int, scale: float = 1.0):
    a, gate = (bf16(1, tokens, heads, dim, scale=scale, seed=s) for s in (1, 2))
    return a, gate, bf16(heads, seed=3)


def spelled_out(a, gate, bias, sigmoid=torch.sigmoid, skip=None):
    """The reference's equation, rounding by rounding, but for `skip`."""

    def rounded(value, name):
        return value if name == skip else value.to(torch.bfloat16).float()

    biased = rounded(gate.float() + bias.float()[:, None], "biased")
    return (a.float() * rounded(sigmoid(biased), "sigmoid")).to(torch.bfloat16)


def others(args):
    """The reference with its sigmoid off by one FP32 ULP either way."""
    return [elements(spelled_out(*args, sigmoid=s)) for s in nudged(torch.sigmoid)]


def assert_matches(args, knobs=None):
    found = run_triton(CHANGE, NODE, *args, knobs=knobs)
    assert found.shape == args[0].shape
    assert_within(elements(found), elements(NODE(*args)), others(args))


@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "scale"),
    [(1, 6, 128, 1.0), (37, 4, 64, 1.0), (3, 3, 7, 1.0), (50, 2, 64, 1e-3), (50, 2, 64, 30.0)],
    ids=lambda value: str(value),
)
def test_matches_the_reference(tokens, heads, dim, scale):
    assert_matches(arguments(tokens, heads, dim, scale))


def test_every_bf16_gate_gives_the_references_sigmoid():
    """All finite BF16 values as gates: at most the elements that one FP32 ULP decides."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    gate = bits.view(torch.bfloat16)
    gate = gate[gate.isfinite()].to(DEVICE).view(1, -1, 1, 2)
    bias = torch.zeros(1, dtype=torch.bfloat16, device=DEVICE)
    assert_matches((torch.ones_like(gate), gate, bias))


def test_every_knob_gives_the_same_bits():
    args = arguments(9, 3, 64)
    expected, seen = run_triton(CHANGE, NODE, *args), 0
    for tokens in (9, 16384):
        for knobs in all_knobs(CHANGE, {"N": tokens, "W": 192}):
            seen += 1
            assert same_bits(run_triton(CHANGE, NODE, *args, knobs=knobs), expected)
    assert seen >= 8


def test_no_tokens():
    assert run_triton(CHANGE, NODE, *arguments(0, 4, 64)).shape == (1, 0, 4, 64)


def test_slice_of_a_packed_projection():
    packed = bf16(2, 5, 1024)
    gate = packed[..., 640:896].unflatten(-1, (4, 64))
    args = bf16(2, 5, 4, 64, seed=1), gate, bf16(4, seed=3)
    assert gate.stride(1) == 1024
    assert_matches(args)


@pytest.mark.parametrize(("heads", "dim"), [(6, 64), (1, 64), (3, 7)])
def test_heads_as_attention_returns_them(heads, dim):
    """Tokens and heads transposed, of two sequences; a part of them; and one sequence twice."""
    a, gate, bias = arguments(10, heads, dim)
    a, gate = a.view(2, 5, heads, dim), gate.view(2, 5, heads, dim)
    apart = a.transpose(1, 2).contiguous().transpose(1, 2)
    longer = bf16(2, heads, 9, dim, seed=5).transpose(1, 2)[:, 2:7]
    same = a[:1].expand(2, 5, heads, dim)
    for given in (apart, longer, same):
        expected = run_triton(CHANGE, NODE, given.contiguous(), gate, bias)
        assert same_bits(run_triton(CHANGE, NODE, given, gate, bias), expected)
        assert_matches((given, gate, bias))


def test_negative_zero_keeps_its_sign():
    a = torch.tensor([[[[-0.0, 0.0]]]], dtype=torch.bfloat16, device=DEVICE)
    args = a, torch.full_like(a, -3.0), torch.zeros(1, dtype=torch.bfloat16, device=DEVICE)
    assert same_bits(run_triton(CHANGE, NODE, *args), a) and same_bits(NODE(*args), a)


@pytest.mark.parametrize("point", ["biased", "sigmoid"])
def test_one_rounding_less_would_be_noticed(point):
    args = arguments(64, 4, 64)
    expected = elements(NODE(*args))
    assert within(elements(spelled_out(*args)), expected, others(args))
    assert not within(elements(spelled_out(*args, skip=point)), expected, others(args))


def test_guard_says_why():
    a, gate, bias = arguments(4, 2, 64)
    assert refusal(CHANGE, NODE, a, gate, bias) == ""
    assert "do not match" in refusal(CHANGE, NODE, a, gate[:, :2], bias)
    assert "do not match" in refusal(CHANGE, NODE, a, gate, bias[:1])
    heads_apart = bf16(1, 2, 4, 64).transpose(1, 2)
    assert "strides" in refusal(CHANGE, NODE, a, heads_apart, bias)
    assert refusal(CHANGE, NODE, heads_apart, gate, bias) == ""
    rows_apart = bf16(4, 128)[:, :64]
    assert "strides" in refusal(CHANGE, NODE, rows_apart, rows_apart.contiguous(), bf16(4))
    values_apart = bf16(1, 4, 2, 128)[..., ::2]
    assert "strides" in refusal(CHANGE, NODE, values_apart, gate, bias)
    assert "torch.float32" in refusal(CHANGE, NODE, a.float(), gate, bias)


def test_heuristic_is_valid():
    for tokens in (1, 128, 16384):
        sizes = {"N": tokens, "W": 768}
        assert GateKnobs.heuristic(sizes).is_valid(sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 128, 16384], ids="bf16-T{}-H6-d128".format)
def test_matches_on_cuda(tokens):
    packed = bf16(1, tokens, 1792)
    gate = packed[..., 1024:].unflatten(-1, (6, 128))
    assert_matches((bf16(1, tokens, 6, 128, seed=1), gate, bf16(6, seed=3)))
