"""The gated boundary's kernel against the reference: every norm, every rounding point."""

import pytest
import torch

from optimized.gated_boundary import CHANGE, GatedBoundaryKnobs
from reference.muse_spark_config import PRESETS
from reference.muse_spark_residual import GatedResidualBoundary
from tests.optimized.kernel_checks import (
    DEVICE,
    all_knobs,
    bf16,
    needs_kernels,
    refusal,
    run_triton,
)
from tests.reference.noise import assert_within, within

pytestmark = needs_kernels
NODES = {
    name: GatedResidualBoundary(PRESETS["mini"], scaled=scaled, centred=centred)
    for name, scaled, centred in (
        ("attention", False, True),
        ("experts", True, True),
        ("head", True, False),
    )
}


def arguments(node, rows: int, width: int, scale: float = 1.0):
    generator = torch.Generator(DEVICE).manual_seed(3)
    y, h = bf16(1, rows, width, scale=scale, seed=1), bf16(1, rows, width, seed=2)
    gate = torch.randn(width, generator=generator, device=DEVICE) * 0.5
    weights = torch.rand(2, width, generator=generator, device=DEVICE)
    post, pre = (
        weights - torch.tensor([[0.5], [0.5 if node.centred else -0.5]], device=DEVICE)
    ).bfloat16()
    return y, h, gate, post if node.scaled else None, pre


def reordered(node, args, count=16):
    """The reference with its two reductions in `count` other orders, per output."""
    outputs = [], []
    for seed in range(count):
        order = torch.randperm(args[0].shape[-1], generator=torch.Generator().manual_seed(seed))
        order = order.to(DEVICE)
        moved = (a if a is None else a[..., order] for a in args)
        for output, y in zip(outputs, node(*moved), strict=True):
            output.append(y[..., order.argsort()])
    return outputs


def assert_matches(node, args, knobs=None, count=16):
    found = run_triton(CHANGE, node, *args, knobs=knobs)
    for ours, theirs, others in zip(found, node(*args), reordered(node, args, count), strict=True):
        assert_within(ours, theirs, others)


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize(
    ("rows", "width", "scale"),
    [(1, 256, 1.0), (9, 96, 1.0), (3, 7, 1.0), (16, 64, 1e-4), (16, 64, 1e4)],
    ids=str,
)
def test_matches_the_reference(name, rows, width, scale):
    assert_matches(NODES[name], arguments(NODES[name], rows, width, scale))


@pytest.mark.parametrize("name", NODES)
def test_matches_at_full_width(name):
    assert_matches(NODES[name], arguments(NODES[name], 2, 8192), count=8)


def test_every_knob_gives_the_same_function():
    node = NODES["experts"]
    args, seen = arguments(node, 6, 320), 0
    for rows in (6, 16384):
        for knobs in all_knobs(CHANGE, {"T": rows, "D": 320}):
            assert_matches(node, args, knobs=knobs, count=4)
            seen += 1
    assert seen >= 8


def test_gates_wide_open_and_shut():
    """alpha is the floor's root where the gate is open, and h passes where it is shut."""
    node = NODES["attention"]
    y, h, gate, post, pre = arguments(node, 4, 64)
    gate = torch.where(torch.arange(64, device=DEVICE) % 2 == 0, 60.0, -60.0)
    assert_matches(node, (y, h, gate, post, pre))
    found, _ = run_triton(CHANGE, node, y, h, gate, post, pre)
    assert torch.equal(found[..., 1::2], h[..., 1::2])


def test_rows_of_a_packed_tensor_and_none():
    node = NODES["experts"]
    _, h, *rest = arguments(node, 10, 64)
    assert_matches(node, (bf16(2, 5, 192)[..., 64:128], h.view(2, 5, 64), *rest))
    empty = arguments(node, 0, 64)
    assert run_triton(CHANGE, node, *empty)[1].shape == (1, 0, 64)


def elided(node, args, point):
    """The reference's equations with one of the interior roundings left out."""
    y, h, gate, post, pre = args

    def rounded(value, name):
        return value if name == point else value.bfloat16().float()

    def norm(value, eps):
        return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)

    wide = rounded(y.float() * rounded(1 + post.float(), "post_factor"), "scaled")
    normed = rounded(norm(wide, node.post_eps), "post_norm")
    w = gate / node.temperature
    beta = torch.sigmoid(w)
    alpha = (torch.sigmoid(-w) * (1 + beta)).clamp(min=node.floor).sqrt()
    added = rounded(alpha * h.float() + beta * normed, "sum")
    x = norm(added, node.eps) * rounded(1 + pre.float(), "pre_factor")
    return added.bfloat16(), x.bfloat16()


@pytest.mark.parametrize("point", ["post_factor", "scaled", "post_norm", "sum", "pre_factor"])
def test_one_rounding_less_would_be_noticed(point):
    node = NODES["experts"]
    args = arguments(node, 64, 256)
    others, expected = reordered(node, args), node(*args)
    found = elided(node, args, point)
    passes = [within(o, r, n) for o, r, n in zip(found, expected, others, strict=True)]
    assert passes == [point in ("sum", "pre_factor"), False]
    whole = elided(node, args, None)
    assert all(within(o, r, n) for o, r, n in zip(whole, expected, others, strict=True))


def test_heuristic_is_valid_for_any_shape():
    for rows in (1, 256, 257, 16384):
        for width in (1, 7, 64, 320, 4096, 8192, 16384):
            sizes = {"T": rows, "D": width}
            assert GatedBoundaryKnobs.heuristic(sizes).is_valid(sizes), sizes


def test_guard_says_why():
    node = NODES["experts"]
    y, h, gate, post, pre = arguments(node, 4, 64)
    assert refusal(CHANGE, node, y, h, gate, post, pre) == ""
    assert "fp32" in refusal(CHANGE, node, y, h, gate.bfloat16(), post, pre)
    assert "fp32" in refusal(CHANGE, node, y, h, gate[:32], post, pre)
    assert "post-norm" in refusal(CHANGE, node, y, h, gate, None, pre)
    assert "torch.float32" in refusal(CHANGE, node, y.float(), h, gate, post, pre)
    assert "fit together" in refusal(CHANGE, node, y, h[:, :2], gate, post, pre)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("rows", [1, 8, 300, 16384], ids="bf16-T{}-D8192".format)
def test_matches_on_cuda(name, rows):
    args = arguments(NODES[name], rows, 8192)
    assert_matches(NODES[name], args, count=4 if rows > 128 else 16)
    if rows in (1, 300):
        for knobs in all_knobs(CHANGE, {"T": rows, "D": 8192}):
            assert_matches(NODES[name], args, knobs=knobs, count=4)
