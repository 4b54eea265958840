"""The least that any implementation of a step must read and compute, counted on the reference.

Only what is certain counts, so that no honest time is below the floor: the matrix products of
tokens with weights, and the weights that those and look-ups touch, each read once. Attention, whose
masked part nobody has to compute, activations and caches are left out.
"""

from typing import Any

import torch
from torch import Tensor, nn

from harness.bench import require_possible
from harness.ceilings import measure_ceilings
from harness.modes import DispatchMode
from harness.operators import name as called
from harness.records import Ceilings
from harness.workload import StepInputs, Target, Workload

PRODUCTS = frozenset(("mm", "addmm", "mv", "addmv", "_grouped_mm"))
LOOKUPS = frozenset(("embedding", "index", "index_select"))


class Least(DispatchMode):
    """Counts while `model` runs under it: `flops`, and `nbytes` of its weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weights = {t.untyped_storage().data_ptr() for t in model.parameters()}
        self.flops = 0
        self.touched: dict[Any, int] = {}  # bytes by weight, or by row of a weight

    @property
    def nbytes(self) -> int:
        return sum(self.touched.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = called(func)
        tensors = [a for a in args if isinstance(a, Tensor)]
        weights = [t for t in tensors if t.untyped_storage().data_ptr() in self.weights]
        if name in PRODUCTS and weights:
            a, b = tensors[-2:] if name != "_grouped_mm" else tensors[:2]
            self.flops += 2 * result.numel() * a.shape[-1]
            for weight in weights:
                offs = args[2] if name == "_grouped_mm" and len(args) > 2 else None
                self._product(weight, (kwargs or {}).get("offs", offs))
        elif name in LOOKUPS and weights and weights[0] is args[0]:
            self._rows(args[0], args[1:])
        return result

    def _product(self, weight: Tensor, offs: Tensor | None) -> None:
        """All of the weight, or of a stack of them those whose group has rows."""
        if offs is None or weight.ndim < 3:
            self.touched[_place(weight)] = _nbytes(weight)
            return
        ends = offs.tolist()
        for i, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
            if last > first:
                self.touched[_place(weight[i])] = _nbytes(weight[i])

    def _rows(self, weight: Tensor, rest: tuple[Any, ...]) -> None:
        """The rows of the weight that one tensor of indices picks; other ways to pick count for
        nothing."""
        at = rest[-1]
        if isinstance(at, (list, tuple)):
            at = at[0] if len(at) == 1 else None
        along_first = not isinstance(rest[0], int) or rest[0] == 0
        if isinstance(at, Tensor) and at.dtype == torch.int64 and along_first:
            for i in at.unique().tolist():
                self.touched[_place(weight[i])] = _nbytes(weight[i])


def least_work(model: nn.Module, args: tuple[Any, ...]) -> tuple[int, int]:
    """(bytes, operations) that `model(*args)` cannot do without; runs it once."""
    with torch.no_grad(), Least(model) as least:
        model(*args)
    return least.nbytes, least.flops


class Floors:
    """The floors of a workload's steps; ceilings are measured when first needed.

    A toy's weights may stay in a cache from one run to the next, so that it has no floor.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.ceilings: Ceilings | None = None
        self.least: dict[Target, tuple[int, int]] = {}

    def require(self, target: Target, inputs: StepInputs, what: str, time_us: float) -> None:
        """Raise ImpossibleTimeError if a step of `target` cannot take as little as `time_us`."""
        if self.workload.toy:
            return
        if self.ceilings is None:
            self.ceilings = measure_ceilings(self.workload.device)
        if target not in self.least:
            self.least[target] = least_work(self.workload.model, inputs.args)
        nbytes, flops = self.least[target]
        require_possible(what, time_us, nbytes=nbytes, flops=flops, ceilings=self.ceilings)


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
