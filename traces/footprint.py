"""What a module call must move and compute when its own interior cannot be seen.

A replaced forward (compiled, or launching kernels directly) shows no operators. What it has to do
is what its class's forward does, so that forward runs here on fake tensors of the same shapes: no
data, no kernels. Only what crosses the call's border counts as bytes.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from harness.modes import DispatchMode
from traces.costs import cost, distinct_bytes, storage_key

log = logging.getLogger(__name__)

Key = tuple[str, Any]  # ("argument", position), ("parameter", name) or ("output", position)


@dataclass(frozen=True)
class Shape:
    """A tensor without its data."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "Shape":
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    def make(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Spec:
    """One module call: its arguments with shapes in place of tensors."""

    leaves: tuple[Any, ...]  # a Shape where the argument is a tensor
    tree: TreeSpec
    parameters: Mapping[str, Tensor]

    @classmethod
    def of(cls, module: nn.Module, args: Any, kwargs: Any) -> "Spec":
        leaves, tree = tree_flatten((args, kwargs))
        shapes = tuple(Shape.of(x) if isinstance(x, Tensor) else x for x in leaves)
        own = dict(module.named_parameters()) | dict(module.named_buffers())
        return cls(shapes, tree, own)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for calls that move and compute the same."""
        leaves = tuple(x if isinstance(x, Shape) else repr(x) for x in self.leaves)
        return leaves, tuple((name, Shape.of(t)) for name, t in self.parameters.items())


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes by the argument, parameter or output they belong to, and operations."""

    reads: Mapping[Key, int]
    writes: Mapping[Key, int]
    flops: int
    matmul: bool
    peak: str


class Footprints:
    """Footprints by class and shapes: a model's layers share them."""

    def __init__(self) -> None:
        self.known: dict[Any, Footprint | None] = {}

    def of(self, module: nn.Module, spec: Spec) -> Footprint | None:
        """What one call of the class's forward must do; None where it refuses fake tensors."""
        key = type(module), spec.signature
        if key not in self.known:
            self.known[key] = _measure(module, spec)
        return self.known[key]


class _Border(DispatchMode):
    """Collects what crosses the border: storages known at the start, by their key."""

    def __init__(self, owners: dict[int, Key]) -> None:
        super().__init__()
        self.owners = owners
        self.reads: dict[Key, int] = {}
        self.writes: dict[Key, int] = {}
        self.flops = 0
        self.matmul_flops = 0
        self.peak = "fp32"
        self.alive: list[Tensor] = []  # keeps storage keys unique while this runs

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not isinstance(func, OpOverload) or func.namespace == "profiler":
            return out
        self.alive.extend(t for t in tree_leaves(out) if isinstance(t, Tensor))
        found = cost(func, args, kwargs, out)
        for accesses, table in ((found.reads, self.reads), (found.writes, self.writes)):
            for tensor, count in accesses:
                owner = self.owners.get(storage_key(tensor))
                if owner is not None:  # the most that one operator touches: reads may overlap
                    table[owner] = max(table.get(owner, 0), count)
        self.flops += found.flops
        if found.matmul:
            self.matmul_flops += found.flops
            self.peak = found.peak
        return out


def _measure(module: nn.Module, spec: Spec) -> Footprint | None:
    owners: dict[int, Key] = {}
    for name, tensor in spec.parameters.items():
        owners[storage_key(tensor)] = ("parameter", name)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        leaves = [x.make() if isinstance(x, Shape) else x for x in spec.leaves]
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                owners[storage_key(leaf)] = ("argument", i)
        args, kwargs = tree_unflatten(leaves, spec.tree)
        border = _Border(owners)
        try:
            with border:
                out = type(module).forward(module, *args, **kwargs)
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            first = next(iter(str(error).splitlines()), "")
            log.info("%s: its cost is unknown: %s", type(module).__name__, first)
            return None
        for i, tensor in enumerate(t for t in tree_leaves(out) if isinstance(t, Tensor)):
            if storage_key(tensor) not in owners:
                border.writes[("output", i)] = distinct_bytes(tensor)
    return Footprint(
        reads=border.reads,
        writes=border.writes,
        flops=border.flops,
        matmul=border.matmul_flops > 0,
        peak=border.peak,
    )
