"""Rows that a run writes more than once: which of the values stays is not specified.

A prefill writes what a ring no longer holds to one spare slot, and nobody reads it. On CUDA each
run may leave another of those values there.
"""

from typing import Any

import torch
from torch import Tensor

from harness import operators
from harness.modes import DispatchMode
from harness.substitutes import keywords


class Conflicts(DispatchMode):
    """While it is on, PyTorch's indexed writes to `tensors` are watched.

    `rows` has, for each tensor that one write stored to twice, a mask of its rows: bool, of the
    tensor's shape without the last dimension. Writes inside a kernel of somebody else's are not
    seen, so this is for the reference.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.tensors = tensors
        self.rows: dict[str, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if operators.written(func):
            self._note(func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        target, given = args[0], keywords(func, args, kwargs)
        found = [n for n, t in self.tensors.items() if _storage(t) == _storage(target)]
        if not found or not operators.is_move(func, args, kwargs):
            return
        twice = _twice(operators.name(func), target, given)
        if twice is None or not bool(twice.any()):
            return
        size = target.untyped_storage().nbytes() // target.element_size()
        marks = torch.zeros(size, dtype=torch.bool, device=target.device)
        twice = twice.reshape(*twice.shape, *(1,) * (target.ndim - twice.ndim))
        marks.as_strided(target.shape, target.stride(), target.storage_offset()).logical_or_(twice)
        for name in found:
            tensor = self.tensors[name]
            mask = marks.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            rows = mask.any(-1)
            self.rows[name] = rows | self.rows[name] if name in self.rows else rows


def _twice(called: str, target: Tensor, given: dict[str, Any]) -> Tensor | None:
    """Where the write stores more than once: a mask of target's leading dimensions, or None where
    it cannot."""
    one = torch.ones((), dtype=torch.int32, device=target.device)
    if called in ("index_put", "_index_put_impl"):
        indices = given["indices"]
        leading = len(indices) if all(i is not None for i in indices) else target.ndim
        if any(i is not None and i.dtype == torch.bool for i in indices):
            return None  # a mask marks nothing twice
        counts = one.new_zeros(target.shape[:leading])
        torch.ops.aten.index_put_.default(counts, indices, one, True)
    elif called == "index_copy":
        counts = one.new_zeros(target.shape)
        counts.index_add_(given["dim"], given["index"], one.expand(given["source"].shape))
    elif called == "scatter" and "src" in given:
        counts = one.new_zeros(target.shape)
        counts.scatter_add_(given["dim"], given["index"], one.expand(given["index"].shape))
    else:
        return None
    return counts > 1


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
