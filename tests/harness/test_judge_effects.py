"""Verdicts on cache writes, on added roundings and on fused multiply-adds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimized.change import Contract, region_of
from tests.harness.judged import change, judged, mini, normed


def cache_write(alter: Callable[..., Any]) -> Callable[[nn.Module], Callable[..., Any]]:
    def build(node: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any) -> Any:
            k_cache, slots = args[-3], args[-1]
            before = k_cache.clone()
            return alter(node, args, k_cache, before, slots)

        return forward

    return build


def stray(node: Any, args: Any, k_cache: Tensor, before: Tensor, slots: Tensor) -> Any:
    out = node(*args)
    k_cache[0, 5, 0, 0] += 1
    return out


def partial(node: Any, args: Any, k_cache: Tensor, before: Tensor, slots: Tensor) -> Any:
    out = node(*args)
    k_cache[:, :, -1] = before[:, :, -1]
    return out


def misplaced(node: Any, args: Any, k_cache: Tensor, before: Tensor, slots: Tensor) -> Any:
    return node(*args[:-1], (slots + 1) % (k_cache.shape[1] - 1))


@pytest.mark.parametrize(
    ("alter", "reason"),
    [(stray, "reference leaves"), (partial, "unwritten"), (misplaced, "reference leaves")],
)
def test_cache_writes_are_compared_in_full(alter: Any, reason: str) -> None:
    verdict = judged(mini(), change("qk_norm_scale", cache_write(alter)))
    assert verdict.reason is not None
    assert reason in verdict.reason and "k_cache" in verdict.reason


ATTEND = next(region_of(m) for m in mini().model.modules() if type(m).__name__ == "Attend")


def rounds_probabilities(node: Any) -> Callable[..., Any]:
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        steps = torch.arange(k.shape[1])
        mask = (steps <= steps[-q.shape[1] :, None])[None] if mask is None else mask
        groups = q.shape[2] // k.shape[2]
        k, v = (y.float().repeat_interleave(groups, 2).transpose(1, 2) for y in (k, v))
        scores = q.float().transpose(1, 2) @ k.transpose(-1, -2) * node.scale
        scores = scores.masked_fill(~mask[:, None], torch.finfo(torch.float32).min)
        p = torch.exp(scores - scores.amax(-1, keepdim=True))
        y = (p.bfloat16().float() @ v) / p.sum(-1, keepdim=True)
        return y.transpose(1, 2).to(q.dtype)

    return forward


def test_rounded_probabilities_must_be_declared() -> None:
    undeclared = judged(mini(), change(ATTEND, rounds_probabilities))
    assert undeclared.reason is not None and "elements differ" in undeclared.reason
    adds = Contract(numerics="reduction", adds={"attention_probabilities_bf16": "tensor cores"})
    verdict = judged(mini(), change(ATTEND, rounds_probabilities, adds))
    assert verdict.passed, verdict.reason
    (point,) = verdict.points
    assert (point.declared, point.observed) == ("added", "added")
    assert point.log_likelihood_ratio > 0


def fused_rope(node: Any) -> Callable[..., Any]:
    """The region with one product of each rotation contracted into its sum."""

    def rotated(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = normed(x, weight, node.eps).bfloat16().float().chunk(2, dim=-1)
        cos, sin = cos[:, :, None], sin[:, :, None]
        second = (b.double() * cos.double() + (a * sin).double()).float()
        return torch.cat((a * cos - b * sin, second), dim=-1).bfloat16()

    def forward(q, k, v, q_weight, k_weight, cos, sin, *rest):
        node(q, k, v, q_weight, k_weight, cos, sin, *rest)
        return rotated(q, q_weight, cos, sin), rotated(k, k_weight, cos, sin)

    return forward


def test_a_multiply_add_between_fp32_values_is_named_where_it_changes_bits() -> None:
    made = change("qk_norm_rope", fused_rope)
    verdicts = (judged(mini(), made, seed) for seed in range(1, 5))
    verdict = next(v for v in verdicts if not v.passed)  # it changes one element in 400 000
    assert verdict.reason is not None
    assert "[add] as multiply-add 1` (reference/layers.py:" in verdict.reason
    broken = {p.point.partition("[")[2] for p in verdict.points if p.observed == "elided"}
    assert broken == {"add] as multiply-add 1"}
