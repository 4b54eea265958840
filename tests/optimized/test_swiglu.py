"""The SwiGLU kernel against the reference: its one rounding, layouts, special values."""

import pytest
import torch
import torch.nn.functional as F

from optimized import rounded_swiglu
from optimized.swiglu import CHANGE, SwiGLUKnobs
from reference.beam import SwiGLU
from reference.layers import RoundedSwiGLU
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
NODE = SwiGLU()


def others(gate, up):
    """The reference with silu off by one FP32 ULP either way."""
    return [elements((s(gate.float()) * up.float()).to(gate.dtype)) for s in nudged(F.silu)]


def assert_matches(gate, up, knobs=None):
    found = run_triton(CHANGE, NODE, gate, up, knobs=knobs)
    assert found.shape == gate.shape and found.is_contiguous()
    assert_within(elements(found), elements(NODE(gate, up)), others(gate, up))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0], ids="scale{}".format)
@pytest.mark.parametrize("shape", [(1, 1, 320), (1, 37, 64), (5, 7), (3,)], ids=str)
def test_matches_the_reference(shape, scale):
    assert_matches(bf16(*shape, scale=scale, seed=1), bf16(*shape, seed=2))


def test_halves_of_one_projection():
    gate, up = bf16(2, 5, 640).chunk(2, dim=-1)
    assert gate.stride(-2) == 640
    assert_matches(gate, up)


def test_every_bf16_gate():
    """All finite BF16 values as gates: at most the elements that one FP32 ULP decides."""
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gate = gate[gate.isfinite()].to(DEVICE)
    assert_matches(gate, torch.ones_like(gate))


def test_every_knob_gives_the_same_bits():
    gate, up = bf16(9, 320, seed=1), bf16(9, 320, seed=2)
    expected, seen = run_triton(CHANGE, NODE, gate, up), 0
    for rows in (9, 16384):
        for knobs in all_knobs(CHANGE, {"N": rows, "F": 320}):
            seen += 1
            assert same_bits(run_triton(CHANGE, NODE, gate, up, knobs=knobs), expected)
    assert seen >= 8


def test_nothing_to_do():
    empty = bf16(1, 0, 64)
    assert run_triton(CHANGE, NODE, empty, empty).shape == (1, 0, 64)


def test_zeros_keep_their_sign():
    gate = torch.tensor([0.0, -0.0, 1.0, -1.0], dtype=torch.bfloat16, device=DEVICE)
    up = torch.tensor([1.0, 1.0, -0.0, -0.0], dtype=torch.bfloat16, device=DEVICE)
    assert same_bits(run_triton(CHANGE, NODE, gate, up), NODE(gate, up))


def test_one_rounding_more_would_be_noticed():
    gate, up = bf16(64, 256, seed=1), bf16(64, 256, seed=2)
    twice = F.silu(gate.float()).to(torch.bfloat16) * up
    assert not within(elements(twice), elements(NODE(gate, up)), others(gate, up))


def rounded(gate, up, silu=F.silu):
    return (silu(gate.float()).to(gate.dtype).float() * up.float()).to(gate.dtype)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0], ids="scale{}".format)
def test_silu_rounded_before_its_product(scale):
    gate, up = bf16(9, 80, scale=scale, seed=1), bf16(9, 80, seed=2)
    node, change = RoundedSwiGLU(), rounded_swiglu.CHANGE
    noise = [elements(rounded(gate, up, silu)) for silu in nudged(F.silu)]
    found = run_triton(change, node, gate, up)
    assert_within(elements(found), elements(node(gate, up)), noise)
    assert not within(elements(NODE(gate, up)), elements(node(gate, up)), noise)


def test_guard_says_why():
    gate, up = bf16(4, 64), bf16(4, 64)
    assert refusal(CHANGE, NODE, gate, up) == ""
    assert "equal shapes" in refusal(CHANGE, NODE, gate, up[:2])
    assert "strides" in refusal(CHANGE, NODE, gate[:, ::2], up[:, ::2])
    assert "torch.float32" in refusal(CHANGE, NODE, gate, up.float())


def test_heuristic_is_valid():
    for rows in (1, 128, 16384):
        sizes = {"N": rows, "F": 2560}
        assert SwiGLUKnobs.heuristic(sizes).is_valid(sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [320, 2560], ids="F{}".format)
@pytest.mark.parametrize("rows", [1, 8, 128, 16384], ids="bf16-T{}".format)
def test_matches_on_cuda(rows, width):
    gate, up = bf16(1, rows, 2 * width).chunk(2, dim=-1)
    assert_matches(gate, up)
