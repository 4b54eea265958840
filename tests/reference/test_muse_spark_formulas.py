"""Single formulas against values computed by hand.

Where a value is not exact in FP32, the allowance is one rounding of each operation that makes it.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from reference import muse_spark
from reference.layers import centred_norm, input_scaled_norm, rope_in_dtype, unit_norm
from reference.muse_spark import SoftCap
from reference.muse_spark_attention import OutputNormGate
from reference.muse_spark_moe import Router
from reference.muse_spark_residual import GatedResidualBoundary
from tests.reference import muse_spark_toy as toy
from tests.reference.muse_spark_toy import SMALL

BF16 = torch.bfloat16
FP32_EPS = torch.finfo(torch.float32).eps


def assert_near(found: Tensor, want: Tensor, operations: int) -> None:
    assert found.dtype == torch.float32
    assert ((found - want).abs() <= operations * FP32_EPS * want.abs()).all(), (found, want)


def bf16(*values: float) -> Tensor:
    return torch.tensor(values).bfloat16()


def test_norms_by_hand() -> None:
    """The root mean square of (1, 7) is 5. In BF16, 1 + 2^-8 is 1 and 1 + 3 * 2^-8 is 1 + 2^-6."""
    x = bf16(1.0, 7.0)
    assert unit_norm(x, 0.0).tolist() == bf16(0.2, 1.4).tolist()
    weight = bf16(2.0**-8, 3 * 2.0**-8)
    assert (1 + weight).tolist() == [1.0, 1 + 2.0**-6]
    assert centred_norm(x, weight, 0.0).tolist() == bf16(0.2, 1.4 * (1 + 2.0**-6)).tolist()
    scaled = 7 * (1 + 2.0**-6)  # 7.109375, halfway between the BF16 values 7.09375 and 7.125
    assert bf16(scaled).item() == 7.125
    rms = math.sqrt((1 + 7.125**2) / 2)
    assert input_scaled_norm(x, weight, 0.0).tolist() == bf16(1 / rms, 7.125 / rms).tolist()


def test_rotation_rounds_every_product() -> None:
    """In BF16: 3 * 0.80078125 = 2.40234375 -> 2.40625 and 5 * 0.59765625 = 2.98828125 -> 2.984375,
    whose difference -0.578125 is exact; rounded once it would be -0.5859375."""
    cos, sin = bf16(0.80078125).view(1, 1, 1), bf16(0.59765625).view(1, 1, 1)
    out = rope_in_dtype(bf16(3.0, 5.0).view(1, 1, 1, 2), cos, sin)
    assert out[0, 0, 0, 0] == -0.578125
    once = 3.0 * 0.80078125 - 5.0 * 0.59765625
    assert bf16(once).item() == -0.5859375


def test_tables_are_rounded_and_theta_is_500000() -> None:
    model = toy.build(BF16)
    step = model.step(torch.tensor([[3]]), muse_spark.cache(model.config, 1, 8, "cpu"))
    angle = 3 / 500000 ** (2 / SMALL.head_dim)
    assert step.cos[0, 0, 1] == bf16(math.cos(angle))[0]
    assert step.sin[0, 0, 1] == bf16(math.sin(angle))[0]


def test_full_layers_do_not_rotate() -> None:
    """What a sliding layer makes of q and k is a full layer's at position 0, and not later."""
    model = toy.build(torch.float32)
    sliding, full = (model.model.language_model.layers[i].self_attn.prepare for i in (0, 1))
    q, k = torch.randn(1, 2, 4, 32), torch.randn(1, 2, 2, 32)
    cache = muse_spark.cache(model.config, 1, 8, "cpu")
    step, (ring, kept) = model.step(torch.tensor([[0, 7]]), cache), cache.layers[:2]
    rotated = sliding(q, k, k, step.cos, step.sin, ring.k, ring.v, step.ring_slots)
    plain = full(q, k, k, kept.k, kept.v, step.full_slots)
    for ours, theirs in zip(rotated, plain, strict=True):
        assert torch.equal(ours[:, 0], theirs[:, 0])
        assert not torch.equal(ours[:, 1], theirs[:, 1])


def test_a_query_is_scaled_by_its_factor() -> None:
    """(1, 7) over its root mean square of 5, times 5.4730064863875; the key as it is."""
    model = toy.build(torch.float32)
    prepare = model.model.language_model.layers[1].self_attn.prepare
    q = torch.tensor([1.0, 7.0]).view(1, 1, 1, 2)
    memory = torch.zeros(1, 2, 1, 2)
    slots = torch.zeros(1, 1, dtype=torch.int64)
    got_q, got_k = prepare(q, q, q, memory, memory.clone(), slots)
    want = torch.tensor([1.0, 7.0]) / math.sqrt(25 + 1e-5)
    assert_near(got_k.flatten(), want, 6)
    assert_near(got_q.flatten(), want * 5.4730064863875, 7)
    assert torch.equal(memory[0, 0, 0], got_k.flatten())


def test_gated_sum_by_hand() -> None:
    """w = 0.3 ln 3 / 0.3: beta = 3/4, alpha = sqrt(1/4 * 7/4)."""
    boundary = GatedResidualBoundary(SMALL, scaled=False, centred=False)
    gate = torch.full((2,), 0.3 * math.log(3.0))
    y, h = torch.tensor([[[1.0, 7.0]]]), torch.tensor([[[2.0, -4.0]]])
    got, x = boundary(y, h, gate, None, torch.ones(2))
    want = math.sqrt(7) / 4 * h + 0.75 * y / 5
    assert_near(got, want, 12)
    assert_near(x, got / got.square().mean().add(1e-5).sqrt(), 6)


def test_output_norm_and_gate_by_hand() -> None:
    a, gate = torch.tensor([[[[1.0, 7.0]]]]), torch.tensor([[[[0.0, math.log(3.0)]]]])
    got = OutputNormGate(0.0)(a, gate)
    assert_near(got, torch.tensor([[[[0.2 * 0.5, 1.4 * 0.75]]]]), 10)


def test_soft_cap_rounds_four_times() -> None:
    logits = bf16(37.25, -1000.0)
    scaled = (logits.float() * 0.1767766952966369).bfloat16()
    inner = torch.tanh((scaled.float() / 20.0).bfloat16().float()).bfloat16()
    want = (inner.float() * 20.0).bfloat16()
    got = SoftCap(0.1767766952966369, 20.0)(logits)
    assert got.tolist() == want.tolist()
    assert got[1] == -20.0


@pytest.fixture
def router() -> Router:
    """Four experts, the best two; logits are the input's first four values times 4 * 0.25."""
    router = Router(replace(SMALL, hidden=4, experts=4, top_k=2, logit_scale=0.25))
    with torch.no_grad():
        router.weight.copy_(4 * torch.eye(4))
        router.e_score_correction_bias.zero_()
    return router


def test_router_by_hand(router: Router) -> None:
    """Scores 1/2, 3/4, 1/4, 9/10: experts 3 and 1, weights 9/10 and 3/4 over 33/20."""
    x = torch.tensor([[0.0, math.log(3.0), -math.log(3.0), math.log(9.0)]])
    weights, experts = router(x)
    assert experts.tolist() == [[3, 1]]
    assert_near(weights, torch.tensor([[18 / 33, 15 / 33]]), 8)


def test_the_bias_chooses_and_does_not_weigh(router: Router) -> None:
    router.e_score_correction_bias[2] = 1.0
    x = torch.tensor([[0.0, math.log(3.0), -math.log(3.0), math.log(9.0)]])
    weights, experts = router(x)
    assert experts.tolist() == [[2, 3]]
    assert_near(weights, torch.tensor([[5 / 23, 18 / 23]]), 8)


def test_ties_go_to_the_lower_index(router: Router) -> None:
    assert router(torch.zeros(1, 4))[1].tolist() == [[0, 1]]
    assert router(torch.tensor([[0.0, 1.0, 1.0, 1.0]]))[1].tolist() == [[1, 2]]
