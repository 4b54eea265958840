"""Norms that are no part of a boundary, and the logits' cap, against the reference."""

import pytest
import torch

from optimized import centred_norm, logit_cap, rms_norm
from optimized.row_norm import RowNormKnobs
from reference.beam import LogitCap
from reference.layers import CentredNorm, RMSNorm
from tests.optimized.kernel_checks import (
    DEVICE,
    all_knobs,
    bf16,
    needs_kernels,
    refusal,
    run_triton,
    same_bits,
)
from tests.reference.noise import assert_within

pytestmark = needs_kernels
EPS = 1e-5


def norm(width: int, kind: type[RMSNorm] = RMSNorm) -> RMSNorm:
    node = kind(width, EPS, torch.bfloat16).to(DEVICE)
    node.weight.data.copy_(bf16(width, scale=0.3, seed=1))
    return node


def orders(node: RMSNorm, x: torch.Tensor):
    for seed in range(16):
        order = torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(seed))
        other = type(node)(x.shape[-1], EPS, torch.bfloat16).to(DEVICE)
        other.weight.data.copy_(node.weight[order])
        yield other(x[..., order])[..., order.argsort()]


@torch.no_grad()
@pytest.mark.parametrize("shape", [(1, 1, 256), (2, 3, 100), (300, 64), (0, 64)], ids=str)
@pytest.mark.parametrize(
    ("change", "kind"),
    [(rms_norm.CHANGE, RMSNorm), (centred_norm.CHANGE, CentredNorm)],
    ids=["weighted", "centred"],
)
def test_norms_whole_rows(change, kind, shape):
    x, node = bf16(*shape), norm(shape[-1], kind)
    found = run_triton(change, node, x)
    assert found.shape == x.shape
    if x.numel():
        assert_within(found, node(x), orders(node, x))
        wide = bf16(*shape[:-1], shape[-1] + 8)[..., : shape[-1]]
        assert_within(run_triton(change, node, wide), node(wide), orders(node, wide))


@torch.no_grad()
def test_every_valid_knob_serves():
    x, node, seen = bf16(2, 128), norm(128), 0
    for knobs in all_knobs(rms_norm.CHANGE, {"N": 2, "D": 128}):
        assert_within(run_triton(rms_norm.CHANGE, node, x, knobs=knobs), node(x), orders(node, x))
        seen += 1
    assert seen >= 1
    for rows in (1, 16384):
        sizes = {"N": rows, "D": 5120}
        assert RowNormKnobs.heuristic(sizes).is_valid(sizes)


def test_the_norms_guard_says_why():
    node = norm(64)
    assert refusal(rms_norm.CHANGE, node, bf16(4, 64)) == ""
    assert "strides" in refusal(rms_norm.CHANGE, node, bf16(4, 128)[:, ::2])
    assert "weight is (64,)" in refusal(rms_norm.CHANGE, node, bf16(4, 32))
    assert "torch.float32" in refusal(rms_norm.CHANGE, node, bf16(4, 64).float())


@pytest.mark.parametrize("shape", [(1, 1, 509), (3, 64), (0, 8)], ids=str)
def test_caps_logits(shape):
    """FP32, within twice the reference's distance from FP64; zeros keep their sign."""
    x, node = bf16(*shape, scale=60.0), LogitCap(50.0)
    if x.numel():
        x[..., :2] = torch.tensor([0.0, -0.0])
    found = run_triton(logit_cap.CHANGE, node, x)
    assert found.shape == x.shape and found.dtype == torch.float32
    if not x.numel():
        return
    exact = 50.0 * torch.tanh(x.double() / 50.0)
    theirs = float((node(x) - exact).norm() / exact.norm())
    assert 0 < float((found - exact).norm() / exact.norm()) < 2 * theirs < 2e-7
    assert same_bits(found[..., :2], x[..., :2].float())


def test_every_knob_caps_alike():
    x, node = bf16(2, 300, scale=60.0), LogitCap(50.0)
    expected, seen = run_triton(logit_cap.CHANGE, node, x), 0
    for knobs in all_knobs(logit_cap.CHANGE, {"N": 2, "V": 300}):
        assert same_bits(run_triton(logit_cap.CHANGE, node, x, knobs=knobs), expected)
        seen += 1
    assert seen >= 6
    assert "strides" in refusal(logit_cap.CHANGE, node, x[:, ::2])


def test_what_is_not_finite_is_capped_alike():
    x, node = torch.tensor([torch.inf, -torch.inf, torch.nan], device=DEVICE), LogitCap(50.0)
    x = x.bfloat16()
    found = run_triton(logit_cap.CHANGE, node, x)
    assert torch.equal(found.nan_to_num(7.0), node(x).nan_to_num(7.0))
