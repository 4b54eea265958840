"""The counting sort of pairs against a stable sort: the same integers."""

import pytest
import torch

from optimized.expert_sort import sort_pairs
from tests.optimized.kernel_checks import DEVICE, needs_kernels

pytestmark = needs_kernels


def assert_sorted(experts: torch.Tensor, count: int, rows: int) -> None:
    found = sort_pairs(experts, count, rows)
    by_expert, order = experts.flatten().sort(stable=True)
    assert found.tokens.tolist() == (order // experts.shape[1]).tolist()
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    assert found.places.tolist() == places.tolist()
    expected, sizes = [], torch.bincount(by_expert, minlength=count).tolist()
    start = 0
    for expert, size in enumerate(sizes):
        expected += [[expert, start + first, start + size] for first in range(0, size, rows)]
        start += size
    used = int(found.used)
    assert used == len(expected) <= len(found.tiles)
    assert found.tiles[:used].tolist() == expected


@pytest.mark.parametrize(
    ("tokens", "top_k", "count", "rows"),
    [(1, 1, 1, 16), (40, 4, 8, 16), (257, 2, 24, 64), (100, 8, 256, 16), (600, 1, 3, 16)],
    ids=str,
)
def test_the_order_is_a_stable_sorts(tokens, top_k, count, rows):
    generator = torch.Generator().manual_seed(tokens)
    experts = torch.randint(count, (tokens, top_k), generator=generator).to(DEVICE)
    assert_sorted(experts, count, rows)


def test_all_pairs_on_one_expert_and_more_blocks_than_are_scanned_at_once(monkeypatch):
    monkeypatch.setattr("optimized.expert_sort.SCAN", 2)
    assert_sorted(torch.full((300, 4), 2, device=DEVICE), 4, 32)


def test_first_columns_of_a_larger_tensor():
    generator = torch.Generator().manual_seed(0)
    experts = torch.stack([torch.randperm(16, generator=generator) for _ in range(50)])
    assert_sorted(experts.to(DEVICE)[:, :4], 16, 16)
    assert_sorted(experts.to(DEVICE).T[:4].T, 16, 16)
    assert_sorted(experts.to(DEVICE).T.contiguous().T[:, :4], 16, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [128, 16384], ids="N{}-K8-E256".format)
def test_on_cuda(tokens):
    generator = torch.Generator(DEVICE).manual_seed(0)
    scores = torch.rand(tokens, 256, generator=generator, device=DEVICE)
    assert_sorted(scores.topk(8).indices, 256, 128)
