"""The kernels that prepare queries and keys: both equations, the cache write, every layout."""

import pytest
import torch

from optimized import qk_norm_rope, qk_norm_scale, qk_unit_norm, qk_unit_norm_rope
from optimized.qk_norm import QKKnobs
from reference.beam import LayerCache, QKNormRope, QKNormScale, rope
from reference.cache import write_slots
from reference.layers import rope_in_dtype
from reference.muse_spark_attention import QKUnitNorm, QKUnitNormRope
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

EPS = 1e-6
pytestmark = needs_kernels
REGIONS = [
    pytest.param(qk_norm_rope.CHANGE, QKNormRope(EPS), id="rope"),
    pytest.param(qk_norm_scale.CHANGE, QKNormScale(EPS), id="scale"),
    pytest.param(qk_unit_norm_rope.CHANGE, QKUnitNormRope(EPS, 5.473), id="unit-rope"),
    pytest.param(qk_unit_norm.CHANGE, QKUnitNorm(EPS, 5.473), id="unit"),
]


def arguments(node, shape, scale=1.0, packed=False, capacity=40, window=None, first=3):
    """(q, k, v, weights and tables as the node takes them, caches, slots) for shape (B, T, H, Hkv,
    d); `packed` makes q, k, v slices of one projection's output."""
    batch, steps, heads, kv_heads, dim = shape
    widths = [heads * dim, kv_heads * dim, kv_heads * dim]
    if packed:
        parts = bf16(batch, steps, sum(widths) + dim, scale=scale).split([*widths, dim], dim=-1)
    else:
        parts = [bf16(batch, steps, w, scale=scale, seed=i) for i, w in enumerate(widths)]
    q, k, v = (part.unflatten(-1, (-1, dim)) for part in parts[:3])
    weights = (torch.rand(2, dim, device=DEVICE) + 0.5).to(torch.bfloat16)
    positions = torch.arange(first, first + steps, device=DEVICE).expand(batch, steps)
    positions = positions + 2 * torch.arange(batch, device=DEVICE)[:, None]
    extras: list[torch.Tensor] = []
    if isinstance(node, QKNormRope | QKNormScale):
        extras += weights
    if isinstance(node, QKNormRope | QKUnitNormRope):
        angles = torch.rand(batch, steps, dim // 2, device=DEVICE) * 6.3
        kind = torch.float32 if isinstance(node, QKNormRope) else torch.bfloat16
        extras += angles.cos().to(kind), angles.sin().to(kind)
    if isinstance(node, QKNormScale):
        extras.append(torch.rand(batch, steps, device=DEVICE) + 0.5)
    slots = write_slots(positions, capacity, window)
    size = batch, (window or capacity) + 1, kv_heads, dim
    caches = (bf16(*size, seed=5), bf16(*size, seed=6))
    return [q, k, v, *extras, *caches, slots]


def reference(node, args):
    """(q, k, k_cache, v_cache) as the reference leaves them; the arguments stay as they are."""
    *rest, k_cache, v_cache, slots = args
    caches = k_cache.clone(), v_cache.clone()
    return *node(*rest, *caches, slots), *caches


def candidate(change, node, args, knobs=None):
    *rest, k_cache, v_cache, slots = args
    caches = k_cache.clone(), v_cache.clone()
    return *run_triton(change, node, *rest, *caches, slots, knobs=knobs), *caches


def reordered(node, args, count=16):
    """The reference with the reduction over a head's dimension in other orders. RoPE ties column i
    to column i + d / 2, so both move together."""
    half = args[0].shape[-1] // 2
    outputs, slots = ([], [], []), args[-1]
    for seed in range(count):
        order = torch.randperm(half, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        both = torch.cat((order, order + half))
        moved = [
            a[..., both] if a.shape[-1] == 2 * half else a[..., order] if a.dim() == 3 else a
            for a in args[:-1]
        ]
        for output, y in zip(outputs, reference(node, [*moved, slots])[:3], strict=True):
            output.append(y[..., both.argsort()])
    return outputs


def assert_matches(change, node, args, knobs=None, count=16):
    ours, theirs = candidate(change, node, args, knobs), reference(node, args)
    noise = reordered(node, args, count)
    for a, b, others in zip(ours[:3], theirs[:3], noise, strict=True):
        assert_within(a, b, others)
    assert same_bits(ours[3], theirs[3])
    batch = torch.arange(args[0].shape[0], device=DEVICE)[:, None]
    assert same_bits(ours[2][batch, args[-1]], ours[1])
    untouched = torch.ones(theirs[2].shape[:2], dtype=torch.bool, device=DEVICE)
    untouched[batch, args[-1]] = False
    assert same_bits(ours[2][untouched], args[-3][untouched])


@pytest.mark.parametrize(
    ("shape", "scale", "packed"),
    [
        ((1, 1, 4, 2, 64), 1.0, False),
        ((2, 1, 6, 1, 128), 1.0, True),
        ((1, 37, 1, 1, 16), 1.0, True),
        ((2, 3, 5, 1, 32), 1e-4, True),
        ((2, 3, 2, 2, 32), 1e4, False),
    ],
    ids=str,
)
@pytest.mark.parametrize(("change", "node"), REGIONS)
def test_matches_the_reference(change, node, shape, scale, packed):
    assert_matches(change, node, arguments(node, shape, scale, packed))


@pytest.mark.parametrize(("change", "node"), REGIONS)
def test_every_knob_gives_the_same_function(change, node):
    args = arguments(node, (1, 2, 6, 2, 32))
    seen = 0
    for rows in (1, 16384):
        for knobs in all_knobs(change, {"T": rows, "H": 6, "Hkv": 2, "d": 32}):
            assert_matches(change, node, args, knobs=knobs, count=4)
            seen += 1
    assert seen >= 8


@pytest.mark.parametrize(("change", "node"), REGIONS)
def test_programs_of_several_rows(change, node):
    """One holds rows of two sequences, the last is not full."""
    args = arguments(node, (2, 11, 6, 2, 32), packed=True)
    assert_matches(change, node, args, QKKnobs(warps=4, heads=4, rows=8), count=4)


@pytest.mark.parametrize(("change", "node"), REGIONS)
def test_no_tokens(change, node):
    args = arguments(node, (1, 1, 4, 2, 32))
    steps = [i for i, arg in enumerate(args) if arg.shape[:2] == (1, 1)]
    args = [arg[:, :0] if i in steps else arg for i, arg in enumerate(args)]
    before = args[-3].clone()
    q, k = run_triton(change, node, *args)
    assert q.shape == (1, 0, 4, 32)
    assert k.shape == (1, 0, 2, 32)
    assert same_bits(args[-3], before)


def test_the_ring_wraps_and_early_tokens_go_to_the_spare_slot():
    """A prompt longer than the window leaves its last W tokens; of the others any may be last."""
    node, window = QKNormRope(EPS), 8
    args = arguments(node, (2, 11, 1, 2, 32), window=window, first=6)
    assert (args[-1] == window).any()
    assert not args[-1][0].sort().values.equal(args[-1][0])  # slots wrap
    ours = candidate(qk_norm_rope.CHANGE, node, args)
    theirs = reference(node, args)
    assert same_bits(ours[3][:, :-1], theirs[3][:, :-1])
    assert_within(ours[2][:, :-1], theirs[2][:, :-1], [n[:, :-1] for n in reordered(node, args)[2]])
    k = theirs[1][args[-1] == window].flatten(1)
    rounding = theirs[2].abs().max() * torch.finfo(torch.bfloat16).eps
    for spare in ours[2][:, -1].flatten(1):
        assert (spare - k).abs().amax(dim=1).min() <= rounding


def elided(node, args, point):
    """The reference's q with one interior rounding left out, or none."""

    def rounded(value, name):
        return value if name == point else value.to(torch.bfloat16).float()

    q = args[0].float()
    normed = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + EPS)
    if isinstance(node, QKNormRope | QKNormScale):
        normed = rounded(normed * args[3].float(), "norm")
        if isinstance(node, QKNormRope):
            return rope(normed, *args[5:7]).to(torch.bfloat16)
        return (normed * args[5][:, :, None, None]).to(torch.bfloat16)
    scaled = rounded(rounded(normed, "norm") * node.q_factor, "factor")
    if isinstance(node, QKUnitNorm):
        return scaled.to(torch.bfloat16)
    if point == "rotation":
        return rope(scaled, *(table.float() for table in args[3:5])).to(torch.bfloat16)
    if point == "factor":  # what follows would round it
        a, b = scaled.chunk(2, dim=-1)
        cos, sin = (table.float()[:, :, None] for table in args[3:5])
        products = [rounded(y, "") for y in (a * cos, b * sin, b * cos, a * sin)]
        return torch.cat((products[0] - products[1], products[2] + products[3]), -1).bfloat16()
    return rope_in_dtype(scaled.to(torch.bfloat16), *args[3:5])


@pytest.mark.parametrize(("change", "node"), REGIONS)
def test_one_rounding_less_would_be_noticed(change, node):
    args = arguments(node, (1, 16, 4, 2, 64))
    theirs, noise = reference(node, args)[0], reordered(node, args)[0]
    assert within(elided(node, args, None), theirs, noise)
    points = ["norm", "factor", "rotation"] if isinstance(node, QKUnitNormRope) else ["norm"]
    for point in points:
        assert not within(elided(node, args, point), theirs, noise), point


@pytest.mark.parametrize(("change", "node"), REGIONS)
def test_guard_says_why(change, node):
    args = arguments(node, (2, 3, 4, 2, 32))
    assert refusal(change, node, *args) == ""

    def changed(index, value):
        return refusal(change, node, *(value if i == index else a for i, a in enumerate(args)))

    assert "torch.float32" in changed(0, args[0].float())
    assert "head dimension 24" in refusal(change, node, *arguments(node, (1, 1, 2, 1, 24)))
    assert "strides" in changed(1, args[1].transpose(2, 3).contiguous().transpose(2, 3))
    assert "fit together" in changed(2, args[2][:, :2])
    assert "slots" in changed(len(args) - 1, args[-1].int())
    assert "k_cache" in changed(len(args) - 3, args[-3][:, :, :1])
    if len(args) > 6:
        assert "contiguous torch." in changed(len(args) - 4, args[-4].double())


def test_many_rows_are_served_together():
    sizes = {"T": 16384, "H": 6, "Hkv": 1, "d": 128}
    assert QKKnobs.heuristic(sizes) == QKKnobs(warps=4, heads=8, rows=8)
    assert QKKnobs.heuristic(sizes | {"T": 256}) == QKKnobs(warps=1, heads=1, rows=1)


def test_heuristic_is_valid_for_any_shape():
    for rows in (1, 256, 257, 16384):
        for heads, kv_heads in ((1, 1), (6, 1), (48, 8)):
            for dim in (16, 64, 128, 256):
                shape = {"T": rows, "H": heads, "Hkv": kv_heads, "d": dim}
                assert QKKnobs.heuristic(shape).is_valid(shape), shape


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8, 128], ids="bf16-B{}-H6-d128".format)
@pytest.mark.parametrize(("change", "node"), REGIONS)
def test_decode_on_cuda(change, node, batch):
    args = arguments(node, (batch, 1, 6, 1, 128), packed=True, capacity=512, window=512)
    assert_matches(change, node, args)
    for knobs in all_knobs(change, {"T": batch, "H": 6, "Hkv": 1, "d": 128}):
        assert_matches(change, node, args, knobs=knobs, count=4)


@pytest.mark.gpu
@pytest.mark.parametrize(("change", "node"), REGIONS)
def test_prefill_on_cuda(change, node):
    args = arguments(node, (8, 2048, 6, 1, 128), packed=True, capacity=2100)
    assert_matches(change, node, args, count=4)


def test_caches_of_the_reference_fit():
    """The layout that `reference.cache` makes is one that the guard takes."""
    cache = LayerCache(bf16(2, 41, 2, 32), bf16(2, 41, 2, 32), None)
    args = arguments(QKNormScale(EPS), (2, 1, 4, 2, 32))
    args[-3:-1] = cache.k, cache.v
    assert refusal(qk_norm_scale.CHANGE, QKNormScale(EPS), *args) == ""
