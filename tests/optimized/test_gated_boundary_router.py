"""The gated boundary with its router, plain and in TF32, and the judge on both."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness import region
from harness.added import to_tf32
from harness.judge import judge_region
from harness.policy import Policy
from harness.workload import Workload
from optimized import gated_boundary_router, gated_boundary_router_tf32, latent_moe
from optimized.change import Implementation, apply_change, replace_forward, shape_key, share
from optimized.gated_boundary_router import GatedRouterKnobs, cross_and_route, experts_of, leave
from optimized.gated_boundary_router_tf32 import MatmulKnobs, cross_then_route
from optimized.latent_moe import LatentKnobs
from reference import models
from reference.muse_spark import Layer
from tests.optimized.kernel_checks import DEVICE, all_knobs, bf16, needs_kernels, refusal
from tests.optimized.test_latent_moe import few as few_programs
from tests.optimized.test_latent_moe import node as latent_experts
from tests.optimized.test_latent_moe import reordered
from tests.reference.noise import assert_within

pytestmark = needs_kernels
PLAIN, TF32 = gated_boundary_router.CHANGE, gated_boundary_router_tf32.CHANGE
LATENT = latent_moe.CHANGE
ALLOWED = Policy(
    permutations=2, allow_elided=True, allow_added=frozenset(("matmul_operands_tf32",))
)


@functools.cache
def one_layer(full: bool = False) -> Workload:
    """Muse Spark with one narrow layer."""
    file = models.load("muse-spark")
    small = {"layers": 1, "hidden": 64, "query_heads": 2, "kv_heads": 1, "head_dim": 16}
    small |= {"window": 8, "experts": 8, "top_k": 2, "expert_width": 32, "expert_ff": 32}
    small |= {"vocabulary": 64, "image_id": 61, "video_id": 62, "audio_id": 63}
    config = replace(file.configs["mini"], **small, vision=None, audio=None)
    found = torch.device("cpu" if DEVICE == "cpu" else "cuda")
    return Workload(name="muse-spark", preset="one", device=found, seed=0, file=file, config=config)


def layer(width: int = 64, experts: int = 8) -> Layer:
    c = replace(one_layer().config, hidden=width, experts=experts)
    made = Layer(c, 0).to(DEVICE).requires_grad_(False)
    generator = torch.Generator(DEVICE).manual_seed(0)
    for name, tensor in made.state_dict().items():
        scale = 0.3 if name.endswith(("norm.weight", "gate")) else tensor.shape[-1] ** -0.5
        tensor.normal_(std=scale, generator=generator)
    return made


def expected(node, y, h, *, tf32=False):
    """(h, x, logits) by the reference; the router's in TF32 from x before its rounding."""
    gate, pre = node.post_attention_residual_gate.gate, node.pre_feedforward_layernorm.weight
    h, x = node.attn_boundary(y, h, gate, None, pre)
    read, weight = x.flatten(0, 1).float(), node.mlp.gate.weight
    if tf32:
        wide = h.flatten(0, 1).float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + node.attn_boundary.eps)
        read, weight = to_tf32(wide * inverse * (1 + pre).float()), to_tf32(weight)
    return h, x, F.linear(read, weight)


def assert_matches(node, found, y, h, *, tf32):
    """Within what other orders of both reductions give."""
    width = y.shape[-1]
    others = []
    for seed in range(16):
        order = torch.randperm(width, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        back, moved = order.argsort(), layer(width, len(node.mlp.gate.weight))
        for a in (
            moved.post_attention_residual_gate.gate,
            moved.pre_feedforward_layernorm.weight,
            moved.mlp.gate.weight,
        ):
            a.copy_(a[..., order])
        h_, x_, logits = expected(moved, y[..., order], h[..., order], tf32=tf32)
        others.append((h_[..., back], x_[..., back], logits))
    ours = expected(node, y, h, tf32=tf32)
    for mine, theirs, noise in zip(found, ours, zip(*others, strict=True), strict=True):
        assert mine.dtype == theirs.dtype
        assert_within(mine, theirs, list(noise))


@pytest.mark.parametrize("tf32", [False, True], ids=["fp32", "tf32"])
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (3, 320), (8, 128)], ids=str)
def test_a_few_tokens(tokens, width, tf32):
    node, y, h = layer(width, 10), bf16(tokens, 1, width), bf16(tokens, 1, width, seed=1)
    for knobs in itertools.islice(all_knobs(PLAIN, {"N": tokens, "D": width}), 0, None, 3):
        found = cross_and_route(node, y, h, knobs, tf32=tf32)
        assert_matches(node, found, y, h, tf32=tf32)


@pytest.mark.parametrize(("tokens", "width"), [(17, 64), (9, 320)], ids=str)
def test_many_tokens_on_tensor_cores(tokens, width):
    node, y, h = layer(width, 24), bf16(1, tokens, width), bf16(1, tokens, width, seed=1)
    start = MatmulKnobs.heuristic({"N": tokens, "D": width, "E": 24})
    for knobs in (start, replace(start, row_tile=16, columns=16, block=16, splits=2)):
        h_out, x, logits = cross_then_route(node, y, h, knobs)
        assert_matches(node, (h_out, x, logits.sum(0)), y, h, tf32=True)


def test_the_router_reads_what_the_experts_do_not():
    """x is the rounded norm in both; TF32's logits are not those of the rounded norm."""
    node, y, h = layer(128, 16), bf16(2, 1, 128), bf16(2, 1, 128, seed=1)
    knobs = GatedRouterKnobs.heuristic({"N": 2, "D": 128})
    plain, tf32 = (cross_and_route(node, y, h, knobs, tf32=t) for t in (False, True))
    assert torch.equal(plain[1], tf32[1])
    apart = (plain[2] - tf32[2]).abs().mean() / plain[2].abs().mean()
    assert 2**-12 < apart < 2**-7


def test_refuses_what_it_is_not_made_for():
    node = layer()
    args = bf16(1, 1, 64), bf16(1, 1, 64), None, None, bf16(64)
    many = bf16(1, 9, 64), bf16(1, 9, 64), None, None, bf16(64)
    assert refusal(PLAIN, node, *args) == refusal(TF32, node, *args) == ""
    assert "9 tokens" in refusal(PLAIN, node, *many) and refusal(TF32, node, *many) == ""
    node.mlp.applied = "inductor:latent_moe"
    for change in (PLAIN, TF32):
        assert "replaced by inductor:latent_moe" in refusal(change, node, *args)


def test_experts_replaced_as_a_whole_go_on_from_the_logits():
    """In `latent_moe`'s kernels, with the knobs it was tuned to."""
    asked: list[str] = []

    class Tuned(LatentKnobs):
        def of(self, product):
            asked.append(product)
            return super().of(product)

    reference, x = latent_experts(), bf16(2, 1, 64)
    key = shape_key(latent_moe.shape(reference, x))
    tuned = {key: Tuned(**vars(few_programs()))}
    mlp = replace_forward(reference, LATENT, LATENT.implementation("triton"), tuned)
    logits = F.linear(x.flatten(0, 1).float(), reference.gate.weight)
    found = experts_of(mlp, x, logits[None])
    assert asked == ["up", "down", "sum"]
    assert_within(found, reference(x), reordered(reference, x))
    other = experts_of(mlp, x, -logits[None])
    assert not torch.equal(other, found)


def test_the_experts_come_first_or_later():
    """A layer whose experts `latent_moe` replaced is taken; in one that was taken it can follow."""
    args = bf16(1, 1, 64), bf16(1, 1, 64), None, None, bf16(64)
    layers = nn.ModuleList([layer()])
    assert apply_change(layers, LATENT, "triton") == ["0.mlp"]
    assert refusal(PLAIN, layers[0], *args) == refusal(TF32, layers[0], *args) == ""
    assert apply_change(layers, PLAIN, "triton") == ["0"]
    layers = nn.ModuleList([layer()])
    apply_change(layers, PLAIN, "triton")
    assert apply_change(layers, LATENT, "triton") == ["0.mlp"]
    assert (layers[0].applied, layers[0].mlp.applied) == (PLAIN.name, LATENT.name)
    assert layers[0].replaces().mlp is layers[0].mlp and layers[0].declines(*args) is None


def rounding_router(node, knobs):
    """The TF32 router, fed by the rounded norm."""

    def forward(h, x, step, cache, next_norm):
        y = node.self_attn(x, step, cache)
        gate, pre = node.post_attention_residual_gate.gate, node.pre_feedforward_layernorm.weight
        h, x = node.attn_boundary(y, h, gate, None, pre)
        logits = to_tf32(x.flatten(0, 1).float()) @ to_tf32(node.mlp.gate.weight).T
        return leave(node, experts_of(node.mlp, x, logits[None]), h, next_norm)

    return forward


def verdict(change, policy, build=None):
    work = one_layer()
    if build is not None:
        by_hand = Implementation(backend="triton", devices=("cpu", "cuda"), build=build)
        change = replace(change, implementations=(by_hand,))
    candidate = share(work.model)
    apply_change(candidate, change, "triton")
    return judge_region(work.model, candidate, change, "triton", work, 1, policy=policy)


def observed(found):
    return {p.point: p.observed for p in found.points}


@pytest.mark.long
def test_the_judge_accepts_each_under_its_own_contract():
    plain = verdict(PLAIN, Policy(permutations=2))
    assert plain.passed, plain.reason
    x = gated_boundary_router_tf32.X_IN_ROUTER.removesuffix(" in mlp.gate")
    assert observed(plain)[x] == "kept"
    refused = verdict(TF32, Policy(permutations=2))
    assert refused.reason is not None and "allows no elided rounding" in refused.reason
    tf32 = verdict(TF32, ALLOWED)
    assert tf32.passed, tf32.reason
    assert observed(tf32)[gated_boundary_router_tf32.X_IN_ROUTER] == "elided"
    assert observed(tf32)[gated_boundary_router_tf32.TF32_IN_ROUTER] == "added"
    assert observed(tf32)[x] == "kept"


@pytest.mark.long
def test_the_judge_refuses_another_router_than_the_contract_says(monkeypatch):
    monkeypatch.setattr(region, "SAMPLES", 0)  # no search for what explains it
    use = gated_boundary_router_tf32.X_IN_ROUTER
    rounds = verdict(TF32, ALLOWED, rounding_router)
    assert rounds.reason is not None and f"`{use}`" in rounds.reason
    assert observed(rounds)[use] == "kept"
