"""The interpreter's correction, the exact functions, and the layout checks."""

import ast
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from optimized import triton_support
from optimized.triton_support import (
    INTERPRETED,
    exp_fp32,
    fma_fp32,
    launch,
    outside_domain,
    round_to_bf16,
    row_stride,
    sigmoid_fp32,
    silu_fp32,
)
from tests.optimized.kernel_checks import DEVICE, needs_kernels, same_bits

interpreted_only = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")


@triton.jit
def _functions(x_ptr, exp_ptr, sigmoid_ptr, silu_ptr, bf16_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(exp_ptr + i, exp_fp32(x))
    tl.store(sigmoid_ptr + i, sigmoid_fp32(x))
    tl.store(silu_ptr + i, silu_fp32(x))
    tl.store(bf16_ptr + i, x)


def _evaluate(x):
    assert x.numel() % 1024 == 0
    out = [torch.empty_like(x) for _ in range(3)]
    out.append(torch.empty_like(x, dtype=torch.bfloat16))
    with np.errstate(over="ignore", invalid="ignore"):  # a GPU does not warn of inf and NaN either
        launch(_functions, (x.numel() // 1024,), x, *out, num_warps=4, BLOCK=1024)
    return out


@needs_kernels
def test_kernels_round_to_nearest_even():
    """Random values, all ties between two BF16 values of one binade, and the special ones."""
    ties = (torch.arange(128, dtype=torch.int32) << 16) + 0x3F808000
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 3.4e38, -3.4e38, 1e-40, -1e-45])
    x = torch.randn(2048)
    x[:128], x[128:136] = ties.view(torch.float32), special
    rounded = _evaluate(x.to(DEVICE))[3]
    assert same_bits(rounded.cpu(), x.to(torch.bfloat16))


@interpreted_only
def test_the_interpreters_own_rounding_is_wrong():
    """When this fails, upstream rounds to nearest and the correction can go."""
    from triton.runtime import interpreter

    x = torch.randn(4096)
    (original,) = triton_support.interpreter_conversion
    for mode in (None, interpreter._ir.ROUNDING_MODE.RTNE):
        bits = original(x.numpy(), tl.float32, tl.bfloat16, mode).astype(np.int16)
        wrong = torch.from_numpy(bits) != x.to(torch.bfloat16).view(torch.int16)
        if mode is None:
            assert 0.4 < wrong.float().mean().item() < 0.6
    corrected = interpreter._convert_float(x.numpy(), tl.float32, tl.bfloat16, None)
    assert same_bits(torch.from_numpy(corrected.view(np.int16)), x.to(torch.bfloat16))


@interpreted_only
def test_the_interpreters_own_widening_is_wrong():
    """When this fails, upstream widens denormals correctly and that correction can go."""
    from triton.runtime import interpreter

    bits = np.arange(2**16, dtype=np.uint16)
    exact = bits.astype(np.uint32) << 16
    (original,) = triton_support.interpreter_conversion
    wrong = original(bits, tl.bfloat16, tl.float32, None) != exact
    assert 0 < wrong.sum() <= 2 * 127  # the denormals of both signs
    assert (interpreter._convert_float(bits, tl.bfloat16, tl.float32, None) == exact).all()


@interpreted_only
def test_rounding_toward_zero_stays_available():
    from triton.runtime import interpreter

    x = np.array([1.00390625 + 2**-8], dtype=np.float32)
    mode = interpreter._ir.ROUNDING_MODE.RTZ
    assert interpreter._convert_float(x, tl.float32, tl.bfloat16, mode)[0] == 0x3F80 + 1


def test_round_to_bf16_of_nan_is_nan():
    bits = round_to_bf16(np.array([np.nan, -np.nan], dtype=np.float32))
    assert torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).isnan().all()


@pytest.mark.parametrize(
    "x, y, z, expected",
    [
        # The product's last bit, which its own rounding to FP32 would lose, is all that is left.
        (1 + 2**-12, 1 + 2**-12, -(1 + 2**-11), 2**-24),
        # Just below and just above a tie of FP32, by less than FP64 sees; 2^46 + 1 is the product.
        (2**-24 * (1 + 2**-23), 1 - 2**-23, 1 + 2**-23, 1 + 2**-23),
        (8392705 * 2**-47, 8384513 * 2**-23, 1.0, 1 + 2**-23),
        (8392705 * 2**-47, -8384513 * 2**-23, -1.0, -(1 + 2**-23)),
        (np.inf, 1.0, 1.0, np.inf),
        (1e30, 1e30, 0.0, np.inf),
        (0.0, 1.0, -0.0, 0.0),
    ],
)
def test_fused_multiply_add_rounds_once(x, y, z, expected):
    with np.errstate(over="ignore", invalid="ignore"):
        actual = fma_fp32(*(np.array([value], dtype=np.float32) for value in (x, y, z)))
    assert actual.dtype == np.float32
    assert actual[0] == expected


@needs_kernels
def test_functions_are_as_accurate_as_pytorchs():
    """Largest error against FP64 in FP32 ULPs: at most one ULP beyond PyTorch's own."""
    x = (torch.randn(65536) * 12).to(DEVICE)
    exponential, sigmoid, silu, _ = _evaluate(x)
    wide = x.double()
    cases = (
        (exponential, torch.exp(x), torch.exp(wide)),
        (sigmoid, torch.sigmoid(x), torch.sigmoid(wide)),
        (silu, torch.nn.functional.silu(x), torch.nn.functional.silu(wide)),
    )
    for ours, theirs, golden in cases:
        _, exponent = torch.frexp(golden)
        ulp = torch.ldexp(torch.ones_like(golden), exponent - 24)
        ours_off, theirs_off = (((y.double() - golden) / ulp).abs().max() for y in (ours, theirs))
        assert ours_off <= theirs_off + 1


@triton.jit
def _short_exp(x_ptr, exp_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(exp_ptr + i, exp_fp32(tl.load(x_ptr + i), True))


@pytest.mark.gpu
def test_functions_are_pytorchs_bit_for_bit_on_a_card():
    x = torch.cat((torch.randn(2**20) * 12, torch.randn(2**20))).to(DEVICE)
    x[:6] = torch.tensor([torch.inf, -torch.inf, 1000.0, -1000.0, 88.7, -103.0])
    launch(
        _short_exp, (x.numel() // 1024,), x, short := torch.empty_like(x), num_warps=4, BLOCK=1024
    )
    assert same_bits(short, torch.exp(x))
    exponential, sigmoid, silu, _ = _evaluate(x)
    assert same_bits(exponential, torch.exp(x))
    assert same_bits(sigmoid, torch.sigmoid(x))
    assert same_bits(silu, torch.nn.functional.silu(x))


@needs_kernels
def test_functions_at_the_ends():
    x = torch.zeros(1024)
    x[:6] = torch.tensor([torch.inf, -torch.inf, 1000.0, -1000.0, 88.7, torch.nan])
    exponential, sigmoid, silu, _ = (y.cpu() for y in _evaluate(x.to(DEVICE)))
    assert exponential[:4].tolist() == [torch.inf, 0.0, torch.inf, 0.0]
    assert exponential[4].isfinite() and exponential[5].isnan() and exponential[6] == 1
    assert sigmoid[:4].tolist() == [1.0, 0.0, 1.0, 0.0] and sigmoid[6] == 0.5
    assert silu[2:4].tolist() == [1000.0, 0.0] and silu[5].isnan()


def test_row_stride_of_views():
    packed = torch.zeros(2, 3, 40)
    assert row_stride(packed) == 40
    assert row_stride(packed[..., 8:16]) == 40
    assert row_stride(packed[..., 8:32].unflatten(-1, (3, 8)), inner=2) == 40
    assert row_stride(packed[:1, :1]) == 40
    assert row_stride(packed[:, :, ::2]) is None
    assert row_stride(packed[:, :2]) is None
    assert row_stride(packed.transpose(0, 1)) is None
    assert row_stride(packed[0, 0]) == 40
    assert row_stride(packed[:, 1]) == 120


def test_row_stride_agrees_with_addresses():
    """Every element of an accepted view is where the stride says, for all slices of a small one."""
    base = torch.arange(2 * 3 * 4).view(2, 3, 4)
    accepted = 0
    for b, t, d in itertools.product(
        (slice(0, 1), slice(None)), (slice(0, 2), slice(None)), (1, 2)
    ):
        view = base[b, t, ::d]
        if (stride := row_stride(view)) is None:
            continue
        accepted += 1
        rows = view.flatten(0, 1)
        for i, row in enumerate(rows):
            assert row.tolist() == list(range(i * stride, i * stride + view.shape[-1]))
    assert accepted >= 3


def test_outside_domain_names_the_argument():
    assert "h is torch.float32" in str(outside_domain(h=torch.zeros(2)))


def test_no_switch_of_a_kernel_is_text_by_default():
    """Triton 3.6 hands a default that is text on as it is, where numbers become constants."""
    texts, seen = [], 0
    for path in Path(triton_support.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "triton.jit" in map(
                ast.unparse, node.decorator_list
            ):
                seen += 1
                given = (d for d in node.args.defaults if isinstance(d, ast.Constant))
                texts += [f"{path.name}: {node.name}" for d in given if isinstance(d.value, str)]
    assert seen > 50 and texts == []
