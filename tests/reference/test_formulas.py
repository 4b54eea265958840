"""Formulas of the specification against values worked out by hand.

Where a value is not exact in FP32, the allowance is one rounding of each operation that makes it.
"""

import math

import pytest
import torch
from torch import Tensor

from reference import beam
from reference.beam import BeamConfig, Combine, ResidualBoundary, SwiGLU, rms_norm, rope
from tests.reference import small

FP32_EPS = torch.finfo(torch.float32).eps
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def step_at(position: int, c: BeamConfig | None = None) -> beam.Step:
    model = beam.build(c or small.small(torch.float32), "meta", 0)
    cache = beam.cache(model.config, 1, 1, "cpu")
    return model.step(torch.tensor([[position]]), cache)


@DTYPES
def test_rms_norm(dtype: torch.dtype) -> None:
    """Mean squares of 4 (3 plus an epsilon of 1) and of 16: roots that are exact."""
    x = torch.tensor([[1.0, 1.0, 1.0, 3.0], [0.0, 0.0, 0.0, -8.0]], dtype=dtype)
    weight = torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=dtype)
    assert rms_norm(x[:1], weight, 1.0).tolist() == [[0.5, 1.0, 0.25, 2.25]]
    assert rms_norm(x[1:], weight, 0.0).tolist() == [[0.0, 0.0, 0.0, -3.0]]
    assert rms_norm(x, weight, 1.0).dtype == dtype


@pytest.mark.parametrize(
    ("p", "factor"),
    [(1, 1.0000488173994806), (2048, 1.0717734625362931), (1 << 20, 1.8664301291501608)],
    ids=["p1", "p2048", "p1M"],
)
def test_ssmax_factor(p: int, factor: float) -> None:
    """(1 + p / 2048)^0.1 for the 1-based position p."""
    found = step_at(p - 1).q_scale.item()
    assert abs(found - factor) < 2 * FP32_EPS * factor  # the logarithm and the exponential


@pytest.mark.parametrize(
    ("n", "y_scale", "h_scale"),
    [
        (2, 0.7071067811865476, 0.7071067811865476),
        (3, 0.5773502691896258, 0.8164965809277260),
        (105, 0.0975900072948533, 0.9952267030562386),
    ],
)
def test_residual_coefficients(n: int, y_scale: float, h_scale: float) -> None:
    boundary = ResidualBoundary(n, 1e-6)
    as_fp32 = torch.tensor([boundary.y_scale, boundary.h_scale])
    assert torch.equal(as_fp32, torch.tensor([y_scale, h_scale]))


def test_residual_add_numbers() -> None:
    """The embedding is the first term; 52 layers add terms 2 to 105."""
    layers = beam.build(beam.configs["full"], "meta", 0).model.layers
    numbers = [n for layer in layers for n in (layer.attn_boundary.n, layer.mlp_boundary.n)]
    assert numbers == list(range(2, 106))


def test_residual_boundary_rounds_each_product_and_the_sum() -> None:
    """n = 2 on values where rounding the products first shows: worked in exact arithmetic."""
    y = torch.tensor([[1.0, 1.0, 1.0, 3.0]]).bfloat16()
    h = torch.tensor([[1.0, 2.0, -1.0, 0.0078125]]).bfloat16()
    one = torch.ones(4).bfloat16()
    new_h, _ = ResidualBoundary(2, 1.0)(y, h, one, one)
    # y' = y / 2; 0.5 * 0.70711 rounds to 0.353515625, 1.5 * 0.70711 to 1.0625, h's terms to
    # 0.70703125, 1.4140625, -0.70703125 and 0.005523681640625.
    assert new_h.tolist() == [[1.0625, 1.765625, -0.353515625, 1.0703125]]


def test_rope_at_position_0_changes_nothing() -> None:
    x = torch.randn(1, 1, 2, 32, generator=torch.Generator().manual_seed(0))
    step = step_at(0)
    assert torch.equal(rope(x, step.cos, step.sin), x)


def test_rope_at_position_1_turns_halves_by_their_frequency() -> None:
    """Unit vectors of the first and last pair of a head of 32: angles 1 and theta^(-30/32)."""
    step, half = step_at(1), 16
    for pair in (0, half - 1):
        angle = 10000.0 ** (-2 * pair / 32)
        x = torch.zeros(1, 1, 1, 32)
        x[..., pair] = 1.0
        turned = rope(x, step.cos, step.sin).flatten()
        want = torch.zeros(32, dtype=torch.float64)
        want[pair], want[pair + half] = math.cos(angle), math.sin(angle)
        # The power, the reciprocal, the sine: a rounding each, on angles of at most 1.
        assert (turned - want).abs().max() < 3 * FP32_EPS


@pytest.mark.parametrize(
    ("logit", "capped"),
    [(0.0, 0.0), (30.0, 22.847824678672947), (-3.0, -2.9900398), (1000.0, 30.0)],
)
@DTYPES
def test_soft_cap(logit: float, capped: float, dtype: torch.dtype) -> None:
    """FP32 whatever the head's dtype; these logits are exact in BF16."""
    model = small.build(dtype, layers=1)

    def constant(module, args, output: Tensor) -> Tensor:
        return torch.full_like(output, logit)

    model.lm_head.register_forward_hook(constant)
    found = small.run(model, small.tokens(1, 3), [3])
    assert found.dtype == torch.float32
    assert found.unique().numel() == 1
    # The quotient, the tangent and the product are rounded; `capped` has eight digits at least.
    assert abs(found[0, 0, 0].item() - capped) <= 3 * FP32_EPS * abs(capped)


def test_swiglu() -> None:
    gate, up = torch.tensor([0.0, 1.0, -1.0]), torch.tensor([5.0, 2.0, 4.0])
    found = SwiGLU()(gate, up)
    want = [0.0, 2 / (1 + math.exp(-1)), -4 / (1 + math.exp(1))]
    for value, expected in zip(found.tolist(), want, strict=True):
        assert abs(value - expected) <= 3 * FP32_EPS * abs(expected)


def test_combine_adds_in_slot_order_and_rounds_once_after_the_scale() -> None:
    """Columns: in FP32 1 + 2^25 - 2^25 is 0 in this order and 1 in the other; 257 * 2.5 = 642.5 is
    644 in BF16, and 640 if 257 had been rounded first."""
    big = 2.0**25
    y = torch.tensor([[[1.0, 256.0], [big, 0.5], [-big, 0.5]]]).bfloat16()
    assert Combine(2.5)(y, torch.ones(1, 3)).tolist() == [[0.0, 644.0]]
    assert Combine(2.5)(y.flip(1), torch.ones(1, 3)).tolist() == [[2.5, 644.0]]
    weights = torch.tensor([[0.5, 0.0, 0.25]])
    assert Combine(1.0)(y[..., 1:], weights).tolist() == [[128.0]]


def test_layer_kinds_of_the_full_model() -> None:
    c = beam.configs["full"]
    full = [i for i in range(c.layers) if c.is_full(i)]
    assert full == [5, 11, 17, 23, 29, 35, 41, 47, 51]
    assert [i for i in range(c.layers) if c.is_dense(i)] == [0, 1, 2]


def test_every_preset_has_every_layer_kind() -> None:
    for c in beam.configs.values():
        kinds = {(c.is_full(i), c.is_dense(i)) for i in range(c.layers)}
        want = {(False, True), (False, False), (True, False)}
        assert kinds >= want, c


def test_weights_follow_from_the_seed() -> None:
    one, same, other = (small.build(torch.bfloat16, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[n], same[n]) for n in one)
    assert not any(torch.equal(one[n], other[n]) for n in one)
    norms = torch.cat([t for n, t in one.items() if "norm" in n])
    assert norms.min() >= 0.5 and norms.max() <= 1.5
    assert all((t != 0).any() for n, t in one.items() if n.endswith("bias"))
