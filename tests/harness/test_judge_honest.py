"""Honest changes pass, whatever the seed, and models that the product does not know are judged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.cases import storages
from harness.errors import SelfTestError
from harness.examine import Examination
from harness.judge import self_test
from harness.observe import observe
from harness.records import Verdict
from harness.region import RegionCases
from optimized.change import Contract
from tests.harness.judged import case_of, change, changed, judged, mini, normed, toy

SEEDS = range(20)


def identity(node: nn.Module) -> Callable[..., Any]:
    return node.forward


def reordered_add_norm(node: Any) -> Callable[..., Any]:
    """Sums in another order, the division as a product: what a kernel does."""

    def forward(x: Tensor, residual: Tensor):
        residual = residual + x
        order = torch.arange(x.shape[-1] - 1, -1, -1)
        wide = residual.float()
        total = sum(part.sum(-1, keepdim=True) for part in wide[..., order].split(16, dim=-1))
        wide = wide - total * (1.0 / x.shape[-1])
        squares = sum(p.square().sum(-1, keepdim=True) for p in wide[..., order].split(16, dim=-1))
        scaled = wide / torch.sqrt(squares * (1.0 / x.shape[-1]) + 1e-5)
        return residual, scaled.to(x.dtype) * node.weight + node.bias

    return forward


def split_router(node: Any) -> Callable[..., Any]:
    """The FP32 router with its inner dimension cut in four."""

    def forward(x: Tensor):
        parts = zip(x.float().chunk(4, dim=-1), node.weight.chunk(4, dim=-1), strict=True)
        top = sum(a @ b.T for a, b in parts).softmax(-1).topk(2, dim=-1)
        return top.values, top.indices

    return forward


@pytest.mark.parametrize(
    ("region", "builds"),
    [("add_norm", (identity, reordered_add_norm)), ("choose", (split_router,))],
    ids=["add-norm", "choose"],
)
def test_no_honest_change_is_rejected_at_twenty_seeds(region: str, builds: Any) -> None:
    made = [change(region, build) for build in builds]
    candidates = [changed(toy(), m) for m in made]
    reasons = {}
    for seed in SEEDS:
        cases = RegionCases.prepare(toy().model, region, made[0].contract, toy(), seed)
        for m, candidate in zip(made, candidates, strict=True):
            reasons[m.name, seed] = cases.judge(candidate).reason
    assert reasons == dict.fromkeys((m.name, seed) for seed in SEEDS for m in made)


def reordered_boundary(n: Any) -> Callable[..., Any]:
    def forward(y: Tensor, h: Tensor, post_weight: Tensor, pre_weight: Tensor):
        order = torch.randperm(y.shape[-1], generator=torch.Generator().manual_seed(3))
        y = normed(y, post_weight, n.eps, order).bfloat16()
        h = y * n.y_scale + h * n.h_scale
        return h, normed(h, pre_weight, n.eps, order).bfloat16()

    return forward


def test_reordered_reductions_pass_on_beam_with_every_rounding_seen_kept() -> None:
    verdict = judged(mini(), change("residual_boundary", reordered_boundary))
    assert verdict.passed, verdict.reason
    assert len(verdict.points) == 4
    for point in verdict.points:
        assert (point.declared, point.observed) == ("kept", "kept")
        assert point.visible_share > 0.01 and point.log_likelihood_ratio > 1000
        assert point.source.startswith("reference/")
    h, x = verdict.outputs
    assert (h.output, h.numerics) == ("h", "reduction")
    assert h.allowed_share < 1e-3 and x.noise_share < 1e-4
    assert sum(h.histogram.values()) == h.elements
    assert abs(x.golden_error / x.reference_golden_error - 1) < 1e-4


def test_exact_contracts_take_no_noise() -> None:
    contract = Contract(numerics="exact", batch_invariant=True)
    verdict = judged(mini(), change("combine", identity, contract))
    assert verdict.passed, verdict.reason
    assert verdict.outputs[0].allowed_share == 0.0

    def reversed_slots(node: Any) -> Callable[..., Any]:
        return lambda y, weights: node(y.flip(1), weights.flip(1))

    verdict = judged(mini(), change("combine", reversed_slots, contract))
    assert verdict.reason is not None and "exact" in verdict.reason


def test_batch_dependence_is_stated_and_refused_where_promised() -> None:
    def depends(node: Any) -> Callable[..., Any]:
        def forward(y: Tensor, h: Tensor, *weights: Tensor):
            order = torch.arange(y.shape[-1]).flip(0) if y.shape[0] == 1 else None
            h2 = normed(y, weights[0], node.eps, order).bfloat16() * node.y_scale + h * node.h_scale
            return h2, normed(h2, weights[1], node.eps, order).bfloat16()

        return forward

    def alone(verdict: Verdict) -> list[str]:
        return [n for n in verdict.notes if "batch" in n]

    verdict = judged(mini(), change("residual_boundary", depends))
    assert verdict.passed, verdict.reason
    assert alone(verdict)
    shifted = change(
        "combine",
        lambda node: lambda y, w: node(y, w) * (1 + (y.shape[0] == 1) * 2.0**-8),
        Contract(numerics="reduction", batch_invariant=True),
    )
    assert not judged(mini(), shifted).passed


def test_an_unknown_model_is_judged_by_point() -> None:
    def unrounded(node: Any) -> Callable[..., Any]:
        def forward(x: Tensor, residual: Tensor):
            residual = residual + x
            wide = residual.float()
            wide = wide - wide.mean(-1, keepdim=True)
            scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
            return residual, (scaled * node.weight.float() + node.bias.float()).to(x.dtype)

        return forward

    verdict = judged(toy(), change("add_norm", unrounded))
    assert verdict.reason is not None
    assert "`scaled.to(x.dtype)`" in verdict.reason
    assert "`scaled.to(x.dtype) * node.weight`" not in verdict.reason  # the candidate's own line
    assert "and at `scaled.to(x.dtype) * self.weight`" in verdict.reason


def test_routing_flips_without_a_tie_are_rejected() -> None:
    def swapped(node: Any) -> Callable[..., Any]:
        def forward(x: Tensor):
            values, experts = node(x)
            return values, experts.flip(-1)

        return forward

    verdict = judged(toy(), change("choose", swapped))
    assert verdict.reason is not None
    assert "margin is above its self-noise" in verdict.reason


def test_self_test_passes_and_names_what_it_cannot_replay() -> None:
    self_test(toy().model, toy(), 0)

    class Drifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * (1 + self.calls * 2.0**-6)

    model = toy().model
    blocks: Any = model.get_submodule("blocks")
    original = blocks[1].mix.out
    blocks[1].mix.out = nn.Sequential(original, Drifting())
    try:
        with pytest.raises(SelfTestError, match=r"blocks\.1\.mix\.out\.1 gives other bits"):
            self_test(model, toy(), 0)
    finally:
        blocks[1].mix.out = original


def test_the_self_test_leaves_out_what_two_writes_left_to_chance() -> None:
    """Padding is written to one place, in any order: on a card another one wins in every run."""

    class Unordered(nn.Module):
        region, calls = "mix", 0

        def forward(self, x: Tensor, positions: Tensor, store: dict[str, Tensor]) -> Tensor:
            Unordered.calls += 1
            slots = torch.where(positions < 0, store["k"].shape[1] - 1, positions)
            order = slice(None) if Unordered.calls % 2 else torch.arange(x.shape[1] - 1, -1, -1)
            rows = torch.arange(x.shape[0])[:, None]
            store["k"][rows, slots[:, order]] = x.unflatten(-1, (4, -1))[:, order]
            return x

    model = toy().model
    blocks: Any = model.get_submodule("blocks")
    original = blocks[1].mix
    blocks[1].mix = Unordered()
    try:
        self_test(model, toy(), 0)
        assert Unordered.calls > 20
    finally:
        blocks[1].mix = original


def tokens_backwards(node: nn.Module) -> Callable[..., Any]:
    """The same arithmetic with the tokens of each sequence in reverse."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        weights, tables, caches, slots = rest[:2], rest[2:-3], rest[-3:-1], rest[-1]
        flipped = [t.flip(1) for t in (q, k, v)]
        results = node.forward(
            *flipped, *weights, *(t.flip(1) for t in tables), *caches, slots.flip(1)
        )
        return tuple(t.flip(1) for t in results)

    return forward


@pytest.mark.parametrize("region", ["qk_norm_rope", "qk_norm_scale"])
def test_which_of_two_conflicting_writes_stays_says_nothing(region):
    """Padding tokens share a spare slot; on a GPU it is chance whose key stays there. Wherever a
    rounding is visible and one write decides, the right bits must count for it."""
    case = case_of(region)
    ours = mini().model.get_submodule(case.node)
    candidate = changed(mini(), change(region, tokens_backwards))
    mine = candidate.get_submodule(case.node)
    exam = Examination(Contract(numerics="reduction"), storages(mini().model, candidate), 0)
    prepared = exam.prepare(ours, case)
    assert any(loose.any() for loose in prepared.first.unspecified.values())
    seen = observe(mine, ours, case, exam.fixed)
    exam.weigh_points(ours, prepared, seen)
    found = [e for e in exam.points.values() if e.visible]
    assert found
    assert [e.equals_declared for e in found] == [e.visible for e in found]
