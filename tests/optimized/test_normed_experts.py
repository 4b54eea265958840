"""The normed experts' kernels against the reference: seven roundings, few pairs and many."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from optimized.expert_knobs import MAX_PAIRS
from optimized.grouped_experts import GroupedKnobs
from optimized.norm_combine import NormCombineKnobs, norm_combine
from optimized.normed_experts import CHANGE
from optimized.pair_products import PairKnobs
from reference.experts import Combine
from reference.layers import input_scaled_norm
from reference.muse_spark_config import PRESETS
from reference.muse_spark_moe import Experts
from tests.optimized.kernel_checks import (
    DEVICE,
    all_knobs,
    bf16,
    needs_kernels,
    refusal,
    run_triton,
)
from tests.optimized.test_routed_experts import choices, shares
from tests.reference.noise import assert_within, within

pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Of the sort, which the interpreter runs slowly and which has tests of its own."""
    monkeypatch.setattr("optimized.expert_sort.PAIRS", 32)


def node(experts: int, width: int, inner: int) -> Experts:
    sizes = {"experts": experts, "expert_width": width, "expert_ff": inner, "gather_limit": 64}
    made = Experts(replace(PRESETS["mini"], **sizes)).to(DEVICE).requires_grad_(False)
    for seed, weight in enumerate(made.parameters()):
        weight.copy_(bf16(*weight.shape, scale=weight.shape[-1] ** -0.5, seed=seed))
    made.post_expert_norm.weight.copy_(bf16(width, scale=0.3, seed=9))
    return made


def few(width: int, inner: int) -> PairKnobs:
    """Knobs for few programs: the interpreter takes milliseconds for each."""
    heuristic = PairKnobs.heuristic({"P": 1, "K": 1, "D": width, "F": inner})
    return replace(heuristic, up_rows=8, down_rows=32)


def reordered(reference: Experts, z, experts, count=16):
    """The reference with both of its products' sums in `count` other orders."""
    width, inner = reference.down_proj.shape[1:]
    twin = node(len(reference.down_proj), width, inner)
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        order = torch.randperm(width, generator=generator).to(DEVICE)
        into = torch.randperm(inner, generator=generator).to(DEVICE)
        halves = reference.gate_up_proj.unflatten(1, (2, -1))
        twin.gate_up_proj.copy_(halves[:, :, into][..., order].flatten(1, 2))
        twin.down_proj.copy_(reference.down_proj[:, order][..., into])
        twin.post_expert_norm.weight.copy_(reference.post_expert_norm.weight[order])
        yield twin(z[:, order], shares(experts), experts)[:, order.argsort()]


def assert_matches(reference, z, experts, knobs=None, count=16):
    arguments = z, shares(experts), experts
    found = run_triton(CHANGE, reference, *arguments, knobs=knobs)
    assert found.shape == z.shape
    assert_within(found, reference(*arguments), reordered(reference, z, experts, count))


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "width", "inner"),
    [(1, 2, 8, 96, 32), (3, 2, 8, 40, 24), (1, 1, 2, 7, 5)],
    ids=str,
)
def test_few_pairs(tokens, top_k, experts, width, inner):
    reference = node(experts, width, inner)
    knobs = few(width, inner) if width > 8 else None
    assert_matches(reference, bf16(tokens, width), choices(tokens, top_k, experts), knobs)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "width", "inner"),
    [(40, 2, 8, 64, 32), (33, 3, 5, 72, 40)],
    ids=str,
)
def test_many_pairs(tokens, top_k, experts, width, inner):
    reference = node(experts, width, inner)
    assert tokens * top_k > MAX_PAIRS
    assert_matches(reference, bf16(tokens, width), choices(tokens, top_k, experts), count=8)


def test_every_knob_gives_the_same_function():
    reference, z, experts = node(4, 16, 6), bf16(1, 16), choices(1, 1, 4)
    others, seen = list(reordered(reference, z, experts)), 0
    expected = reference(z, shares(experts), experts)
    for knobs in all_knobs(CHANGE, {"P": 1, "K": 1, "D": 16, "F": 6}):
        found = run_triton(CHANGE, reference, z, shares(experts), experts, knobs=knobs)
        assert_within(found, expected, others)
        seen += 1
    assert seen >= 8


@pytest.mark.parametrize(
    ("stages", "up_stages", "programs"), [(0, 0, 0), (2, 2, 0), (0, 2, 3)], ids=str
)
def test_sums_in_several_steps(stages, up_stages, programs):
    knobs = PairKnobs(
        up_rows=8,
        up_block=32,
        up_stages=up_stages,
        up_programs=programs,
        up_warps=4,
        down_rows=32,
        down_block=16,
        down_stages=stages,
        down_warps=4,
        sum_columns=64,
        sum_warps=4,
    )
    assert knobs.is_valid({"P": 4, "K": 2, "D": 72, "F": 24})
    assert_matches(node(4, 72, 24), bf16(2, 72), choices(2, 2, 4), knobs)


def test_rows_of_a_larger_tensor_an_expert_twice_and_no_tokens():
    reference = node(4, 64, 32)
    twice = torch.tensor([[3, 3], [0, 3]], device=DEVICE)
    assert_matches(reference, bf16(2, 192)[:, 64:128], twice, few(64, 32))
    none = choices(0, 2, 4).to(DEVICE)
    assert run_triton(CHANGE, reference, bf16(0, 64), shares(none), none).shape == (0, 64)


@pytest.mark.parametrize("tokens", [2, 17])
def test_norms_and_sum(tokens):
    """Every split of the columns, in order and by place."""
    y, norm = bf16(tokens, 3, 320), bf16(320, scale=0.3, seed=1)
    weights, combine = torch.rand(tokens, 3, device=DEVICE), Combine(1.5)
    expected = combine(input_scaled_norm(y, norm, 1e-8), weights)
    others = []
    for seed in range(16):
        order = torch.randperm(320, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        moved = combine(input_scaled_norm(y[..., order], norm[order], 1e-8), weights)
        others.append(moved[:, order.argsort()])
    places = torch.randperm(3 * tokens, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    sorted_rows = torch.empty_like(y).flatten(0, 1).index_copy_(0, places, y.flatten(0, 1))
    for columns in (256, 512) if tokens == 2 else (512,):
        knobs = NormCombineKnobs(columns=columns, warps=4)
        assert knobs.is_valid({"N": tokens, "K": 3, "D": 320})
        found = norm_combine(y, weights, norm, 1e-8, 1.5, knobs=knobs)
        assert_within(found, expected, others)
        found = norm_combine(
            sorted_rows, weights, norm, 1e-8, 1.5, places=places.int(), knobs=knobs
        )
        assert_within(found, expected, others)


@pytest.mark.parametrize("point", ["gate_up", "silu", "hidden", "output", "scaled", "norm"])
def test_one_rounding_less_would_be_noticed(point):
    reference, z, experts = node(8, 256, 64), bf16(8, 256), choices(8, 4, 8)

    def rounded(value, name):
        return value if name == point else value.bfloat16().float()

    weight, norm = reference.gate_up_proj[experts].float(), reference.post_expert_norm
    gate_up = rounded((weight @ z.float()[:, None, :, None]).squeeze(-1), "gate_up")
    gate, up = gate_up.chunk(2, dim=-1)
    hidden = rounded(rounded(F.silu(gate), "silu") * up, "hidden")
    y = rounded((reference.down_proj[experts].float() @ hidden[..., None]).squeeze(-1), "output")
    y = rounded(y * (1 + norm.weight).float(), "scaled")
    y = rounded(y * torch.rsqrt(y.square().mean(-1, keepdim=True) + norm.eps), "norm")
    weights = shares(experts)
    out = (y * weights[..., None]).sum(dim=1).bfloat16()
    others = reordered(reference, z, experts)
    assert not within(out, reference(z, weights, experts), others)


def test_experts_in_the_rows_of_a_sort():
    reference, z = node(8, 64, 32), bf16(3, 64)
    ordered = torch.randn(3, 8, device=DEVICE).sort(dim=-1, stable=True).indices
    assert not ordered[:, :2].is_contiguous()
    assert_matches(reference, z, ordered[:, :2])


def test_guard_says_why():
    reference, z, experts = node(4, 64, 32), bf16(2, 64), choices(2, 2, 4)
    weights = shares(experts)
    assert refusal(CHANGE, reference, z, weights, experts) == ""
    assert "fit together" in refusal(CHANGE, reference, z[:1], weights, experts)
    assert "torch.float32" in refusal(CHANGE, reference, z.float(), weights, experts)
    reference.post_expert_norm.weight = torch.nn.Parameter(bf16(128)[::2])
    assert "strided" in refusal(CHANGE, reference, z, weights, experts)


def test_heuristics_are_valid():
    kind = CHANGE.implementation("triton").knobs
    assert kind is not None
    for width, inner in ((4096, 512), (4096, 4096), (128, 128), (7, 5)):
        for pairs in (8, 64, 1024, 131072):
            shape = {"P": pairs, "K": 8, "E": 256, "D": width, "F": inner}
            chosen = kind.heuristic(shape)
            assert isinstance(chosen, GroupedKnobs if pairs > MAX_PAIRS else PairKnobs)
            assert chosen.is_valid(shape), shape
            values = {name: options[0] for name, options in kind.candidates(shape).items()}
            assert type(kind(**values)) is type(chosen)
        for tokens in (1, 16384):
            sizes = {"N": tokens, "K": 8, "D": width}
            assert NormCombineKnobs.heuristic(sizes).is_valid(sizes), sizes


@pytest.mark.gpu
@pytest.mark.parametrize("inner", [512, 4096], ids="bf16-D4096-F{}".format)
@pytest.mark.parametrize("tokens", [1, 8, 128, 4096], ids="N{}".format)
def test_matches_on_cuda(tokens, inner):
    reference = node(16, 4096, inner)
    assert_matches(reference, bf16(tokens, 4096), choices(tokens, 8, 16), count=4)
