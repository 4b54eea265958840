"""Checksums over bit patterns, a part at a time."""

import pytest
import torch

from harness import observe
from harness.observe import checksum


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8])
def test_the_parts_do_not_change_the_sums(dtype, monkeypatch) -> None:
    values = torch.randn(1001).mul(50).to(dtype)
    whole = checksum(values)
    monkeypatch.setattr(observe, "SUMMED", 64)
    assert checksum(values) == whole


def test_the_sums_are_those_of_the_bits(monkeypatch) -> None:
    monkeypatch.setattr(observe, "SUMMED", 2)
    assert checksum(torch.tensor([True, False, True, True, True])) == (4, 3)
    assert checksum(torch.tensor([3, -1, 4, 1, 5, 9, 2], dtype=torch.int16)) == (23, 14)
    assert checksum(torch.empty(0)) == (0, 0)


def test_two_values_that_change_places_show(monkeypatch) -> None:
    monkeypatch.setattr(observe, "SUMMED", 4)
    values = torch.arange(12, dtype=torch.float32)
    before = checksum(values)
    values[[5, 8]] = values[[8, 5]]
    after = checksum(values)
    assert before[0] == after[0] and before[1] != after[1]
