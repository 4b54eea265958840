"""Grouped top-k routing against an implementation in NumPy and plain Python, ties included."""

import numpy as np
import pytest
import torch

from reference.beam import Router
from tests.reference import small

C = small.SMALL
GROUP = C.experts // C.groups


def route(scores: np.ndarray, bias: np.ndarray) -> tuple[list[list[int]], np.ndarray]:
    """scores [N, E], bias [E] float32 -> experts [N, K] in order, weights [N, K] float32."""
    chosen, weights = [], []
    for row in scores:
        biased = row + bias
        best_two = [
            np.sort(biased[g * GROUP : (g + 1) * GROUP])[-2:].sum() for g in range(C.groups)
        ]
        # Python's sort is stable, so equal keys keep the lower index first.
        groups = sorted(range(C.groups), key=lambda g: -best_two[g])[: C.top_groups]
        candidates = [e for e in range(C.experts) if e // GROUP in groups]
        experts = sorted(candidates, key=lambda e: -biased[e])[: C.top_k]
        chosen.append(experts)
        weights.append(row[experts] / (row[experts].sum() + np.float32(1e-20)))
    return chosen, np.stack(weights)


def router(bias: np.ndarray) -> Router:
    made = Router(C)
    made.e_score_correction_bias.copy_(torch.from_numpy(bias))
    return made.requires_grad_(False)


def check(scores: np.ndarray, bias: np.ndarray) -> None:
    """Scores are eighths, so that every sum is exact and results must be equal to the bit."""
    scores, bias = scores.astype(np.float32), bias.astype(np.float32)
    weights, experts = router(bias).choose(torch.from_numpy(scores))
    want_experts, want_weights = route(scores, bias)
    assert experts.tolist() == want_experts
    assert np.array_equal(weights.numpy(), want_weights)


@pytest.mark.parametrize("levels", [1, 2, 3, 7], ids=lambda n: f"{n}-distinct-scores")
@pytest.mark.parametrize("biases", [1, 2, 5], ids=lambda n: f"{n}-distinct-biases")
def test_ties_everywhere(levels: int, biases: int) -> None:
    rng = np.random.default_rng(levels * 10 + biases)
    scores = rng.integers(1, 1 + levels, (500, C.experts)) / 8
    bias = (rng.integers(0, biases, C.experts) - biases // 2) / 8  # some negative
    check(scores, bias)


def test_equal_groups_go_to_the_lower_index() -> None:
    """All groups score the same, by different experts: the first two are opened."""
    scores = np.full((1, C.experts), 1 / 8)
    for g in range(C.groups):
        scores[0, g * GROUP + g] = 6 / 8
        scores[0, g * GROUP + (g + 1) % GROUP] = 4 / 8
    _, experts = router(np.zeros(C.experts, np.float32)).choose(torch.from_numpy(scores).float())
    assert experts.tolist() == [[0, GROUP + 1, 1, GROUP + 2]]
    check(scores, np.zeros(C.experts))


def test_a_group_is_judged_by_its_best_two() -> None:
    """A group with the single best expert loses to groups with two good ones."""
    scores = np.full((1, C.experts), 1 / 8)
    scores[0, 0] = 7 / 8
    scores[0, [GROUP, GROUP + 1, 2 * GROUP, 2 * GROUP + 1]] = 5 / 8
    _, experts = router(np.zeros(C.experts, np.float32)).choose(torch.from_numpy(scores).float())
    assert experts.tolist() == [[GROUP, GROUP + 1, 2 * GROUP, 2 * GROUP + 1]]


def test_the_bias_chooses_and_does_not_weigh() -> None:
    scores = np.full((1, C.experts), 4 / 8)
    bias = np.zeros(C.experts)
    bias[[14, 15]] = 1 / 8
    weights, experts = router(bias.astype(np.float32)).choose(torch.from_numpy(scores).float())
    assert experts.tolist() == [[14, 15, 0, 1]]
    assert weights.tolist() == [[0.25] * 4]


def test_negative_biased_scores_never_lose_to_closed_groups() -> None:
    bias = np.full(C.experts, -2.0)
    check(np.random.default_rng(0).integers(1, 8, (100, C.experts)) / 8, bias)


def test_random_scores_without_ties() -> None:
    """Full FP32 scores: the same experts; weights differ by the order of a sum of four at most."""
    rng = np.random.default_rng(1)
    scores = rng.random((500, C.experts), dtype=np.float32)
    bias = rng.normal(0, 0.1, C.experts).astype(np.float32)
    weights, experts = router(bias).choose(torch.from_numpy(scores))
    want_experts, want = route(scores, bias)
    assert experts.tolist() == want_experts
    steps = C.top_k + 1  # roundings of K - 1 sums, the 1e-20 and the division
    assert (np.abs(weights.numpy() - want) <= steps * np.finfo(np.float32).eps * want).all()


def test_the_router_is_fp32_on_bf16_activations() -> None:
    """Scores from the widened activations and FP32 weights, against FP64."""
    model = small.build(torch.bfloat16)
    made = model.model.layers[2].mlp.gate
    assert made.weight.dtype == torch.float32
    x = torch.randn(50, C.hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    scores = torch.sigmoid(x.double() @ made.weight.double().T)
    weights, experts = made(x)
    assert weights.dtype == torch.float32
    chosen = scores.gather(-1, experts)
    golden = chosen / chosen.sum(dim=-1, keepdim=True)
    # A dot product of D terms in FP32 is within D roundings of its terms' magnitudes; the
    # sigmoid's slope is at most 1/4, and the normalised weight moves at most twice as much.
    magnitude = (x.double().abs() @ made.weight.double().abs().T).max()
    bound = 2 * C.hidden * torch.finfo(torch.float32).eps * magnitude / 4 / chosen.sum(-1).min()
    assert (weights - golden).abs().max() < bound < torch.finfo(torch.bfloat16).eps
