"""What one run of a step left behind, and tensors that hold other values for a while.

The arguments of a step (its caches) may be too large for whole copies beside the weights, so what
became of them is kept as digests of their rows.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.operators import is_real
from harness.trees import bits, same_bits

ROWS_AT_ONCE = 1 << 24  # elements that are digested at once: 128 MiB as integers


@dataclass
class Result:
    """What one run left: copies of its `outputs`, and a digest of each row of each argument."""

    outputs: dict[str, Tensor]
    rows: dict[str, Tensor]

    def same(self, other: "Result") -> bool:
        """Bit for bit."""
        return all(same_bits(t, other.outputs[n]) for n, t in self.outputs.items()) and all(
            torch.equal(t, other.rows[n]) for n, t in self.rows.items()
        )

    def apart(self, other: "Result") -> dict[str, float]:
        """Distances: how many elements of each output and rows of each argument have other bits,
        and by how much outputs differ at most."""
        found = {}
        for name, mine in self.outputs.items():
            theirs = other.outputs[name]
            found[name] = float((bits(mine) != bits(theirs)).sum())
            if is_real(mine.dtype):
                gap = (mine.double() - theirs.double()).abs().nan_to_num(torch.inf)
                found[f"{name}, size"] = float(gap.max()) if gap.numel() else 0.0
        for name, mine in self.rows.items():
            found[name] = float((mine != other.rows[name]).sum())
        return found


class Digests:
    """A 64-bit digest of each row (last dimension) of a tensor: its bits times secret factors,
    added up. The same object gives the same digest of the same bits."""

    def __init__(self) -> None:
        self.factors: dict[int, Tensor] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """tensor [..., D] -> [...] int64; a scalar is one row."""
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        width = tensor.shape[-1] if tensor.ndim else 1
        if not tensor.numel():
            return torch.zeros(tensor.shape[:-1], dtype=torch.int64, device=tensor.device)
        if width not in self.factors:
            draws = [secrets.randbits(63) | 1 for _ in range(width)]
            self.factors[width] = torch.tensor(draws, dtype=torch.int64, device=tensor.device)
        rows = bits(tensor).reshape(-1, width)
        parts = rows.split(max(1, ROWS_AT_ONCE // width))
        digest = torch.cat([(part.long() * self.factors[width]).sum(-1) for part in parts])
        return digest.view(tensor.shape[:-1] or (1,))


def distinct(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor once, by the first of its names."""
    found: dict[Any, tuple[str, Tensor]] = {}
    for name, t in tensors.items():
        key = (t.data_ptr(), t.shape, t.stride()) if t.numel() else name
        found.setdefault(key, (name, t))
    return dict(found.values())


@contextmanager
def holding(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> Iterator[None]:
    """Let the tensors `mine` hold the values of `theirs`, and then again what they held before.

    `theirs` keeps that meanwhile, so that no third copy is needed. ValueError where the two differ
    in names, shapes, dtypes or devices.
    """
    if wrong := [n for n in {**mine, **theirs} if _layout(mine, n) != _layout(theirs, n)]:
        raise ValueError(f"the fresh inputs do not fit the step at {wrong[0]}")
    moved: list[str] = []
    try:
        for name in mine:
            held = mine[name].clone()
            mine[name].copy_(theirs[name])
            theirs[name].copy_(held)
            moved.append(name)
        yield
    finally:
        for name in reversed(moved):  # views of one storage, too, get back what they held
            mine[name].copy_(theirs[name])


def where(mask: Tensor) -> str:
    """How many rows a mask of rows marks, and the first of them."""
    first = tuple(mask.nonzero()[0].tolist())
    return f"in {int(mask.sum())} row(s), the first at {first}"


def _layout(tensors: dict[str, Tensor], name: str) -> Any:
    tensor = tensors.get(name)
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)
