"""The latent experts' kernels of a few tokens against the reference, part by part and whole."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from optimized.latent_moe import CHANGE, LatentKnobs, choose_and_norm, enter
from reference.layers import centred_norm
from reference.muse_spark_config import PRESETS
from reference.muse_spark_moe import LatentMoE
from tests.optimized.kernel_checks import DEVICE, all_knobs, bf16, needs_kernels, refusal
from tests.optimized.kernel_checks import run_triton as run
from tests.reference.noise import assert_within

pytestmark = needs_kernels
SIZES = {"hidden": 64, "expert_width": 32, "expert_ff": 24, "experts": 8, "top_k": 2}
SHAPE = {"N": 2, "P": 4, "K": 2, "W": 64, "R": 64, "E": 8, "D": 32, "F": 24}
# Few programs: the interpreter takes milliseconds for each.
FEW = {"router_rows": 8, "pool_rows": 16, "up_rows": 8, "down_rows": 32}


def node(**changes) -> LatentMoE:
    config = replace(PRESETS["mini"], **{**SIZES, "gather_limit": 64, **changes})
    made = LatentMoE(config).to(DEVICE).requires_grad_(False)
    generator = torch.Generator(DEVICE).manual_seed(0)
    for name, tensor in made.state_dict().items():
        spread = 0.3 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5
        tensor.normal_(std=4 * spread if name == "gate.weight" else spread, generator=generator)
    return made


def few(shape=SHAPE) -> LatentKnobs:
    return replace(LatentKnobs.heuristic(shape), **FEW)


def orders(width: int, count: int = 16):
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        yield torch.randperm(width, generator=generator).to(DEVICE)


def reordered(reference: LatentMoE, x, count=16):
    """The reference with the sums over the model's width and the experts' inner width in other
    orders."""
    twin = node(hidden=x.shape[-1])
    state = reference.state_dict()
    for order, inner in zip(orders(x.shape[-1], count), orders(24, count), strict=True):
        moved = dict(state)
        for name in ("gate.weight", "pre_expert_proj.weight"):
            moved[name] = state[name][:, order]
        halves = state["experts.gate_up_proj"].unflatten(1, (2, -1))[:, :, inner]
        moved["experts.gate_up_proj"] = halves.flatten(1, 2)
        moved["experts.down_proj"] = state["experts.down_proj"][..., inner]
        twin.load_state_dict(moved)
        yield twin(x[..., order])


@pytest.mark.parametrize("tokens", [1, 3])
def test_matches_the_reference(tokens):
    reference, x = node(), bf16(tokens, 1, 64)
    found = run(CHANGE, reference, x, knobs=few())
    assert found.shape == x.shape
    assert_within(found, reference(x), reordered(reference, x))


@pytest.mark.parametrize(("rank", "width"), [(0, 64), (1, 64), (0, 40)], ids=str)
def test_logits_of_the_whole_row_and_pooled_of_a_part(rank, width):
    """As on one of two tensor-parallel ranks, where there is one."""
    reference = node(tp=2 if width == 64 else 1, rank=rank, hidden=width)
    x, part = bf16(2, width), reference.part
    shape = {**SHAPE, "W": width, "R": part}
    logits, pooled = enter(reference, x, few(shape))
    mine, weight = x[:, rank * part :][:, :part], reference.pre_expert_proj.weight
    router = reference.gate.weight
    others = [F.linear(x[:, o].float(), router[:, o]) for o in orders(width)]
    assert_within(logits, F.linear(x.float(), router), others)
    others = [F.linear(mine[:, o], weight[:, o]) for o in orders(part)]
    assert_within(pooled, F.linear(mine, weight), others)


@pytest.mark.parametrize("columns", [16, 1024])
def test_choice_and_norm(columns, monkeypatch):
    monkeypatch.setattr("optimized.latent_moe.NORM_COLUMNS", columns)
    reference, pooled = node(), bf16(3, 32)
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    gate, norm = reference.gate, reference.pre_expert_norm.weight
    scores = torch.sigmoid(logits * gate.logit_scale)
    order = (scores + gate.e_score_correction_bias).sort(descending=True, stable=True).indices
    weights, experts, z = choose_and_norm(reference, logits, pooled)
    assert experts.tolist() == order[:, :2].tolist()
    eps = torch.finfo(torch.float32).eps
    assert (weights - gate.weigh(scores, experts)).abs().max() <= 2 * eps
    others = [
        centred_norm(pooled[:, o], norm[o], reference.pool.eps)[:, o.argsort()] for o in orders(32)
    ]
    assert_within(z, centred_norm(pooled, norm, reference.pool.eps), others)


def test_every_knob_of_the_first_kernel_gives_the_same_function():
    reference, x, seen = node(), bf16(1, 64), 0
    router, weight = reference.gate.weight, reference.pre_expert_proj.weight
    logits = [F.linear(x[:, o].float(), router[:, o]) for o in orders(64)]
    pooled = [F.linear(x[:, o], weight[:, o]) for o in orders(64)]
    for knobs in all_knobs(CHANGE, SHAPE):
        if vars(knobs) | FEW != vars(LatentKnobs.heuristic(SHAPE)) | FEW:
            continue  # one of the experts', which have a test of their own
        found = enter(reference, x, knobs)
        assert_within(found[0], F.linear(x.float(), router), logits)
        assert_within(found[1], F.linear(x, weight), pooled)
        seen += 1
    assert seen >= 4


def test_guard_says_why():
    reference, x = node(), bf16(2, 1, 64)
    assert refusal(CHANGE, reference, x) == ""
    assert "9 tokens" in refusal(CHANGE, reference, bf16(9, 1, 64))
    assert "0 tokens" in refusal(CHANGE, reference, bf16(0, 1, 64))
    assert "strides" in refusal(CHANGE, reference, bf16(2, 1, 128)[..., ::2])
    assert "powers of two" in refusal(CHANGE, node(experts=12), x)
    assert "torch.float32" in refusal(CHANGE, reference, x.float())


def test_heuristic_is_valid():
    for width, part, inner in ((8192, 1024, 512), (8192, 8192, 4096), (256, 256, 128)):
        sizes = {**SHAPE, "K": 8, "P": 8, "W": width, "R": part, "D": 4096, "F": inner}
        assert LatentKnobs.heuristic(sizes).is_valid(sizes), sizes


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8], ids="bf16-N{}-tp8".format)
def test_matches_on_cuda(tokens):
    sizes = {"hidden": 8192, "expert_width": 4096, "experts": 256, "top_k": 8, "tp": 8}
    reference, x = node(**sizes, expert_ff=512), bf16(tokens, 8192)
    logits, pooled = enter(reference, x, LatentKnobs.heuristic({**SHAPE, "W": 8192, "R": 1024}))
    router, part = reference.gate.weight, x[:, :1024]
    others = [F.linear(x[:, o].float(), router[:, o]) for o in orders(8192, 8)]
    assert_within(logits, F.linear(x.float(), router), others)
    weight = reference.pre_expert_proj.weight
    others = [F.linear(part[:, o], weight[:, o]) for o in orders(1024, 8)]
    assert_within(pooled, F.linear(part, weight), others)
    assert run(CHANGE, reference, x[:, None]).isfinite().all()
