"""Pooler, its norm and unpooler against the reference: every kind of norm, rows and columns of
larger tensors."""

import pytest
import torch
import torch.nn.functional as F

from optimized import pooler, unpooler
from optimized.row_norm import RowNormKnobs, row_norm
from reference.layers import centred_norm, input_scaled_norm, rms_norm, unit_norm
from reference.muse_spark_moe import Pooler, Unpooler
from tests.optimized.kernel_checks import DEVICE, bf16, needs_kernels, refusal, run_triton
from tests.reference.noise import assert_within, within

pytestmark = needs_kernels
EPS = 1e-5
NODE = Pooler(EPS)
NORMS = {
    "weighted": rms_norm,
    "centred": centred_norm,
    "input_scaled": input_scaled_norm,
    "unit": lambda x, weight, eps: unit_norm(x, eps),
}


def orders(width: int, count: int):
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        yield torch.randperm(width, generator=generator).to(DEVICE)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(
    ("shape", "knobs"),
    [((1, 256), None), ((7, 96), RowNormKnobs(warps=1, rows=4)), ((0, 64), None), ((3, 7), None)],
    ids=str,
)
def test_norms(kind, shape, knobs):
    x, weight, norm = bf16(*shape), bf16(shape[-1], scale=0.3, seed=1), NORMS[kind]
    found = row_norm(x, None if kind == "unit" else weight, EPS, kind, knobs)
    assert found.shape == x.shape
    if x.numel():
        others = [norm(x[:, o], weight[o], EPS)[:, o.argsort()] for o in orders(shape[-1], 16)]
        assert_within(found, norm(x, weight, EPS), others)


def test_norms_differ_by_more_than_noise():
    x, weight = bf16(32, 128), bf16(128, scale=0.3, seed=1)
    every = {kind: norm(x, weight, EPS) for kind, norm in NORMS.items()}
    for kind, norm in NORMS.items():
        others = [norm(x[:, o], weight[o], EPS)[:, o.argsort()] for o in orders(128, 8)]
        passes = [other for other, y in every.items() if within(y, every[kind], others)]
        assert passes == [kind]


def arguments(rows: int, width: int, outputs: int):
    weight = bf16(outputs, width, scale=width**-0.5, seed=2)
    return bf16(rows, width), weight, bf16(outputs, scale=0.3, seed=3)


def reordered(args, count=16):
    x, weight, norm = args
    for inner, outer in zip(
        orders(x.shape[1], count), orders(len(weight), count + 1), strict=False
    ):
        yield NODE(x[:, inner], weight[outer][:, inner], norm[outer])[:, outer.argsort()]


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_pooler_matches_the_reference(rows):
    args = arguments(rows, 64, 96)
    assert_within(run_triton(pooler.CHANGE, NODE, *args), NODE(*args), reordered(args))


def test_columns_of_wider_rows():
    """As on one of several ranks, which has a part of the inputs."""
    x, weight, norm = arguments(2, 64, 32)
    for rows in (2, 1):
        args = torch.cat((x, x), dim=1)[:rows, 64:], weight, norm
        assert_within(run_triton(pooler.CHANGE, NODE, *args), NODE(*args), reordered(args))
        node = Unpooler(64, 32, torch.bfloat16).to(DEVICE).requires_grad_(False)
        node.weight.copy_(weight)
        others = [F.linear(args[0][:, o], weight[:, o]) for o in orders(64, 16)]
        assert_within(run_triton(unpooler.CHANGE, node, args[0]), node(args[0]), others)


def test_the_product_is_rounded_before_its_norm():
    args = x, weight, norm = arguments(64, 128, 128)
    wide = x.float() @ weight.float().T
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    found = (scaled * (1 + norm).float()).bfloat16()
    assert not within(found, NODE(*args), reordered(args))


def test_guard_says_why():
    x, weight, norm = arguments(2, 64, 32)
    assert refusal(pooler.CHANGE, NODE, x, weight, norm) == ""
    assert "contiguous" in refusal(pooler.CHANGE, NODE, x, weight.T.contiguous().T, norm)
    assert "norm's weight" in refusal(pooler.CHANGE, NODE, x, weight, norm[:16])
    assert "strides" in refusal(pooler.CHANGE, NODE, bf16(2, 128)[:, ::2], weight, norm)
    assert "torch.float32" in refusal(pooler.CHANGE, NODE, x.float(), weight, norm)


def test_heuristic_is_valid():
    for rows in (1, 256, 257, 16384):
        for width in (1, 7, 128, 4096, 8192, 16384):
            sizes = {"N": rows, "D": width}
            assert RowNormKnobs.heuristic(sizes).is_valid(sizes), sizes


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 128, 16384], ids="bf16-N{}-1024-4096".format)
def test_matches_on_cuda(rows):
    args = arguments(rows, 1024, 4096)
    assert_within(run_triton(pooler.CHANGE, NODE, *args), NODE(*args), list(reordered(args, 4)))
