"""The experts' kernels against the reference: four roundings, ragged sizes, repeated experts."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from optimized.routed_experts import CHANGE, MAX_PAIRS, ExpertsKnobs
from reference.beam import Experts, configs
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

pytestmark = needs_kernels


def node(experts: int, width: int, inner: int) -> Experts:
    config = replace(
        configs["mini"], experts=experts, hidden=width, expert_ff=inner, gather_limit=64
    )
    made = Experts(config).to(DEVICE).requires_grad_(False)
    for seed, weight in enumerate(made.parameters()):
        weight.copy_(bf16(*weight.shape, scale=weight.shape[-1] ** -0.5, seed=seed))
    return made


def choices(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    rows = [torch.randperm(experts)[:top_k] for _ in range(tokens)]
    return torch.stack(rows).to(DEVICE) if rows else torch.empty(0, top_k, dtype=torch.int64)


def shares(experts: torch.Tensor) -> torch.Tensor:
    """Weights as a router gives them: positive, adding up to one."""
    drawn = torch.rand(experts.shape, generator=torch.Generator().manual_seed(7)) + 0.1
    return (drawn / drawn.sum(dim=-1, keepdim=True)).to(DEVICE)


def reordered(reference: Experts, x, experts, count=16):
    """The reference with both of its sums in `count` other orders."""
    twin = node(*reference.gate_up_proj.shape[:1], x.shape[1], reference.down_proj.shape[2])
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        order = torch.randperm(x.shape[1], generator=generator).to(DEVICE)
        inner = torch.randperm(reference.down_proj.shape[2], generator=generator).to(DEVICE)
        halves = reference.gate_up_proj.unflatten(1, (2, -1))
        twin.gate_up_proj.copy_(halves[:, :, inner][..., order].flatten(1, 2))
        twin.down_proj.copy_(reference.down_proj[..., inner])
        yield twin(x[:, order], shares(experts), experts)


def assert_matches(reference, x, experts, knobs=None):
    arguments = x, shares(experts), experts
    found = run_triton(CHANGE, reference, *arguments, knobs=knobs)
    assert found.shape == x.shape
    assert_within(found, reference(*arguments), reordered(reference, x, experts))


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "width", "inner"),
    [(1, 4, 16, 256, 64), (3, 2, 8, 160, 24), (2, 3, 4, 96, 33), (1, 1, 2, 7, 5)],
    ids=lambda value: str(value),
)
def test_matches_the_reference(tokens, top_k, experts, width, inner):
    reference = node(experts, width, inner)
    assert_matches(reference, bf16(tokens, width), choices(tokens, top_k, experts))


def test_matches_at_beams_width():
    knobs = ExpertsKnobs(
        up_rows=8,
        up_block=1024,
        up_warps=4,
        up_stages=0,
        down_rows=128,
        down_block=64,
        down_warps=4,
        down_held=0,
    )
    assert knobs.is_valid({"P": 1, "K": 1, "D": 5120, "F": 320})
    assert_matches(node(2, 5120, 320), bf16(1, 5120), choices(1, 1, 2), knobs)


def test_every_knob_gives_the_same_function():
    reference, x, experts = node(4, 160, 24), bf16(1, 160), choices(1, 1, 4)
    expected, seen = reference(x, shares(experts), experts), 0
    others = list(reordered(reference, x, experts))
    for knobs in all_knobs(CHANGE, {"P": 1, "K": 1, "D": 160, "F": 24}):
        found = run_triton(CHANGE, reference, x, shares(experts), experts, knobs=knobs)
        assert_within(found, expected, others)
        seen += 1
    assert seen >= 8


def test_no_tokens():
    reference = node(4, 64, 32)
    experts = choices(0, 4, 4).to(DEVICE)
    found = run_triton(CHANGE, reference, bf16(0, 64), shares(experts), experts)
    assert found.shape == (0, 64)


def test_rows_of_a_larger_tensor_and_the_same_expert_twice():
    reference = node(4, 64, 32)
    x = bf16(2, 192)[:, 64:128]
    assert_matches(reference, x, torch.tensor([[3, 3], [0, 3]], device=DEVICE))


def test_a_token_alone_gives_the_same_bits():
    reference, x, experts = node(8, 96, 32), bf16(3, 96), choices(3, 2, 8)
    weights = shares(experts)
    together = run_triton(CHANGE, reference, x, weights, experts)
    alone = run_triton(CHANGE, reference, x[2:3], weights[2:3], experts[2:3].contiguous())
    assert same_bits(together[2:3], alone)


def test_experts_in_the_rows_of_a_sort():
    reference, x = node(8, 64, 32), bf16(3, 64)
    ordered = torch.randn(3, 8, device=DEVICE).sort(dim=-1, stable=True).indices
    experts = ordered[:, :2]
    assert not experts.is_contiguous()
    assert_matches(reference, x, experts)


@pytest.mark.parametrize("held", [0, 1, 4])
def test_weights_held_ahead_change_nothing(held):
    reference, x, experts = node(8, 96, 40), bf16(2, 96), choices(2, 4, 8)
    knobs = replace(ExpertsKnobs.heuristic({"P": 8, "K": 4, "D": 96, "F": 40}), down_held=held)
    found = run_triton(CHANGE, reference, x, shares(experts), experts, knobs=knobs)
    assert same_bits(found, run_triton(CHANGE, reference, x, shares(experts), experts))


@pytest.mark.parametrize(("tokens", "programs"), [(1, 3), (2, 64)])
def test_programs_that_loop_over_tiles_change_nothing(tokens, programs):
    reference, x, experts = node(8, 160, 20), bf16(tokens, 160), choices(tokens, 2, 8)
    start = ExpertsKnobs.heuristic({"P": 2 * tokens, "K": 2, "D": 160, "F": 20})
    start = replace(start, up_rows=8, up_block=64)
    found, alone = (
        run_triton(CHANGE, reference, x, shares(experts), experts, knobs=knobs)
        for knobs in (replace(start, up_programs=programs), start)
    )
    assert same_bits(found, alone) and found.abs().sum() > 0


@pytest.mark.parametrize(("tokens", "slots", "inner", "held"), [(1, 4, 40, 3), (2, 3, 33, 0)])
def test_slots_across_threads_change_nothing(tokens, slots, inner, held):
    reference, x, experts = node(8, 70, inner), bf16(tokens, 70), choices(tokens, slots, 8)
    sizes = {"P": slots * tokens, "K": slots, "D": 70, "F": inner}
    start = replace(ExpertsKnobs.heuristic(sizes), up_rows=8, down_block=16, down_held=held)
    found, alone = (
        run_triton(CHANGE, reference, x, shares(experts), experts, knobs=knobs)
        for knobs in (replace(start, down_across=True), start)
    )
    assert same_bits(found, alone) and found.abs().sum() > 0


def test_a_sorts_first_columns_are_many_pairs_choice_too():
    reference, x, experts = node(8, 64, 32), bf16(40, 64), choices(40, 4, 8)
    experts = torch.cat((experts, experts), dim=1)[:, :4]
    assert MAX_PAIRS < experts.numel() and not experts.is_contiguous()
    assert_matches(reference, x, experts)


@pytest.mark.parametrize("point", ["gate_up", "activation", "output"])
def test_one_rounding_less_would_be_noticed(point):
    reference, x, experts = node(8, 256, 64), bf16(8, 256), choices(8, 4, 8)

    def rounded(value, name):
        return value if name == point else value.to(torch.bfloat16).float()

    weight = reference.gate_up_proj[experts].float()
    gate_up = rounded((weight @ x.float()[:, None, :, None]).squeeze(-1), "gate_up")
    gate, up = gate_up.chunk(2, dim=-1)
    hidden = rounded(F.silu(gate) * up, "activation")
    y = rounded((reference.down_proj[experts].float() @ hidden[..., None]).squeeze(-1), "output")
    weights = shares(experts)
    out = ((y * weights[..., None]).sum(dim=1) * reference.combine.scale).to(torch.bfloat16)
    others = reordered(reference, x, experts)
    assert not within(out, reference(x, weights, experts), others)


def test_guard_says_why():
    reference, x, experts = node(4, 64, 32), bf16(2, 64), choices(2, 2, 4)
    weights = shares(experts)
    assert refusal(CHANGE, reference, x, weights, experts) == ""
    assert "fit together" in refusal(CHANGE, reference, x[:1], weights, experts)
    assert "int32" in refusal(CHANGE, reference, x, weights, experts.int())
    assert "bfloat16" in refusal(CHANGE, reference, x, weights.bfloat16(), experts)
    assert "contiguous" in refusal(CHANGE, reference, bf16(2, 128)[:, ::2], weights, experts)
    assert "torch.float32" in refusal(CHANGE, reference, x.float(), weights, experts)


def test_heuristic_is_valid():
    for width, inner in ((5120, 320), (5120, 1280), (5120, 2560), (256, 64), (7, 5)):
        sizes = {"P": 8, "K": 8, "D": width, "F": inner}
        assert ExpertsKnobs.heuristic(sizes).is_valid(sizes), sizes


@pytest.mark.gpu
@pytest.mark.parametrize("inner", [320, 1280], ids="bf16-D5120-F{}".format)
@pytest.mark.parametrize("tokens", [1, 8], ids="N{}".format)
def test_matches_on_cuda(tokens, inner):
    assert_matches(node(16, 5120, inner), bf16(tokens, 5120), choices(tokens, 8, 16))
