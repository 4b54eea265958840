"""Bytes and operations of single operator calls, against hand-computed values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from traces.costs import Cost, cost, distinct_bytes


class Collect(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.costs: list[Cost] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.costs.append(cost(func, args, kwargs or {}, out))
        return out


def measured(function: Callable[..., Any], *args: Any) -> tuple[int, int, int]:
    """(bytes read, bytes written, operations) of all operators that `function` calls."""
    with torch.no_grad(), Collect() as collect:
        function(*args)
    reads = sum(n for c in collect.costs for _, n in c.reads)
    writes = sum(n for c in collect.costs for _, n in c.writes)
    return reads, writes, sum(c.flops for c in collect.costs)


def f32(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def write_rows(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, new: torch.Tensor):
    cache[rows, slots] = new


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[int, int, int]]] = {
    "mm": (torch.mm, (f32(3, 5), f32(5, 7)), (15 * 4 + 35 * 4, 21 * 4, 2 * 3 * 5 * 7)),
    "bmm": (torch.bmm, (f32(2, 3, 5), f32(2, 5, 7)), (100 * 4, 42 * 4, 2 * 2 * 3 * 5 * 7)),
    "add": (torch.add, (f32(6), f32(6)), (48, 24, 6)),
    "in-place": (torch.Tensor.add_, (f32(6), 1), (24, 24, 6)),
    "sum": (torch.sum, (f32(6),), (24, 4, 6)),
    "cast": (torch.Tensor.bfloat16, (f32(6),), (24, 12, 0)),
    "view": (torch.t, (f32(4, 6),), (0, 0, 0)),
    "empty": (torch.empty, (9,), (0, 0, 0)),
    "zeros": (torch.zeros, (9,), (0, 36, 0)),
    "index": (lambda x, i: x[i], (f32(100, 8), int64(3, 1)), (2 * 8 * 4 + 16, 64, 0)),
    "embedding": (F.embedding, (int64(3, 1, 2), f32(100, 8)), (3 * 8 * 4 + 24, 96, 0)),
    "gather": (torch.gather, (f32(100, 8), 0, int64(4, 2).view(1, 2)), (8 + 16, 8, 0)),
    "cache write": (
        write_rows,
        (f32(2, 50, 4), int64(0, 1), int64(7, 7), f32(2, 4)),
        (16 + 16 + 32, 32, 0),
    ),
    "index_copy_": (
        lambda x, i, y: x.index_copy_(0, i, y),
        (f32(100, 8), int64(5), f32(1, 8)),
        (8 + 32, 32, 0),
    ),
    "expanded": (torch.exp, (f32(1, 6).expand(5, 6),), (24, 120, 30)),
    "device": (lambda x: x.device, (f32(6),), (0, 0, 0)),
}


@pytest.mark.parametrize("case", CASES)
def test_cost(case: str) -> None:
    function, args, expected = CASES[case]
    assert measured(function, *args) == expected


def test_a_grouped_product_reads_at_most_as_many_experts_as_rows() -> None:
    rows = torch.randn(2, 16, dtype=torch.bfloat16)
    weights = torch.randn(8, 16, 32, dtype=torch.bfloat16)
    grouped = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]
    offsets = torch.tensor([1, 1, 2, 2, 2, 2, 2, 2], dtype=torch.int32)
    reads, writes, flops = measured(lambda: grouped(rows, weights, offs=offsets))
    assert reads == 2 * 16 * 2 + 2 * 16 * 32 * 2 + 8 * 4
    assert (writes, flops) == (2 * 32 * 2, 2 * 2 * 16 * 32)


def test_causal_attention_counts_only_the_keys_that_each_query_sees() -> None:
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in "qkv")
    _, _, whole = measured(lambda: F.scaled_dot_product_attention(q, k, v))
    _, _, causal = measured(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert whole == 2 * 2 * 2 * 8 * 8 * 16
    assert causal == whole * 36 // 64  # 1 + 2 + ... + 8 of 8 * 8


def test_an_expanded_tensor_holds_its_elements_once() -> None:
    assert distinct_bytes(torch.zeros(1, 4).expand(9, 4)) == 16
    assert distinct_bytes(torch.zeros(0, 4)) == 0
