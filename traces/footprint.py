"""What a module call must move and compute when its own interior cannot be seen.

A replaced forward (compiled, or launching kernels directly) shows no operators. What it has to do
is what its class's forward does, so that forward runs here on fake tensors of the same shapes: no
data, no kernels, and what was replaced inside it runs as written, too. Only what crosses the call's
border counts as bytes.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from harness.modes import DispatchMode
from traces.costs import Gather, cost, distinct_bytes, gather, storage_key

log = logging.getLogger(__name__)

# ("argument", position), ("held", (position, name)): what an argument that is no tensor holds,
# ("parameter", name) or ("output", position)
Key = tuple[str, Any]
Span = tuple[int, int]  # first byte of a storage and the one past the last


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
    held: Mapping[tuple[int, str], Tensor]  # such as a cache's tensors, by argument and name
    integers: Mapping[int, Tensor]  # arguments that may say which rows are looked up

    @classmethod
    def of(cls, module: nn.Module, args: Any, kwargs: Any) -> "Spec":
        leaves, tree = tree_flatten((args, kwargs))
        shapes = tuple(Shape.of(x) if isinstance(x, Tensor) else x for x in leaves)
        own = dict(module.named_parameters()) | dict(module.named_buffers())
        held = {
            (i, name): value
            for i, leaf in enumerate(leaves)
            for name, value in getattr(leaf, "__dict__", {}).items()
            if not isinstance(leaf, Tensor | nn.Module) and isinstance(value, Tensor)
        }
        integers = {
            i: x
            for i, x in enumerate(leaves)
            if isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32)
        }
        return cls(shapes, tree, own, held, integers)

    @cached_property
    def distinct(self) -> dict[int, int]:
        """How many different numbers each of `integers` holds; waits for the device."""
        return {i: x.unique().numel() for i, x in self.integers.items()}

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for calls that move and compute the same."""
        holders = {i for i, _ in self.held}
        leaves = tuple(
            x if isinstance(x, Shape) else type(x) if i in holders else repr(x)
            for i, x in enumerate(self.leaves)
        )
        known = *self.parameters.items(), *self.held.items()
        named = tuple((name, Shape.of(t)) for name, t in known)
        return leaves, named, tuple(self.distinct.items())


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes by the argument, parameter or output they belong to, and operations.

    `products` are the operations of matrix products and attentions, by what enters them from
    outside the call, through any other operators but no product before.
    """

    reads: Mapping[Key, int]
    writes: Mapping[Key, int]
    flops: int
    products: Mapping[frozenset[Key], int]
    peak: str

    @property
    def matmul(self) -> bool:
        return bool(self.products)


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


def _covered(spans: Iterable[Span]) -> int:
    """Bytes that the spans cover, each once."""
    total = reached = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


class _Border(DispatchMode):
    """Collects what crosses the border: storages known at the start, by their key."""

    def __init__(
        self,
        owners: dict[int, Key],
        fakes: FakeTensorMode,
        alive: list[Tensor],
        distinct: Mapping[int, int],
    ) -> None:
        super().__init__()
        self.distinct = distinct
        self.owners, self.fakes, self.alive = owners, fakes, alive
        self.origins = {key: frozenset((owner,)) for key, owner in owners.items()}
        self.reads: dict[Key, set[Span]] = {}
        self.writes: dict[Key, set[Span]] = {}
        self.flops = 0
        self.products: dict[frozenset[Key], int] = {}
        self.peak = "fp32"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Tensor, self.fake, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if not isinstance(func, OpOverload) or func.namespace == "profiler":
            return out
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.alive.extend(made)
        found = cost(func, args, kwargs, out)
        rows = gather(func, args)
        for accesses, table in ((found.reads, self.reads), (found.writes, self.writes)):
            for tensor, count in accesses:
                owner = self.owners.get(storage_key(tensor))
                if owner is not None:
                    if rows is not None and tensor is rows.source:
                        count = self.looked_up(rows, count)
                    start = int(tensor.storage_offset()) * tensor.element_size()
                    table.setdefault(owner, set()).add((start, start + count))
        self.flops += found.flops
        origins = frozenset[Key]().union(
            *(
                self.origins.get(storage_key(t), frozenset())
                for t in tree_leaves((args, kwargs))
                if isinstance(t, Tensor)
            )
        )
        if found.matmul:
            self.products[origins] = self.products.get(origins, 0) + found.flops
            self.peak, origins = found.peak, frozenset()
        for tensor in made:
            self.origins.setdefault(storage_key(tensor), origins)
        return out

    def looked_up(self, rows: Gather, nbytes: int) -> int:
        """Bytes of the different rows, where an argument of the call names them."""
        kind, place = self.owners.get(storage_key(rows.index), ("", None))
        if kind != "argument" or place not in self.distinct:
            return nbytes
        return min(nbytes, self.distinct[place] * rows.row_bytes)

    def fake(self, tensor: Tensor) -> Tensor:
        """The stand-in of a real tensor, always the same one."""
        return tensor if isinstance(tensor, FakeTensor) else self.fakes.from_tensor(tensor)


@contextmanager
def _as_written(module: nn.Module) -> Iterator[None]:
    """Every module in `module` calls its class's forward, also where that was replaced."""
    replaced = {m: vars(m).pop("forward") for m in module.modules() if "forward" in vars(m)}
    try:
        yield
    finally:
        for inner, forward in replaced.items():
            vars(inner)["forward"] = forward


def _measure(module: nn.Module, spec: Spec) -> Footprint | None:
    owners: dict[int, Key] = {}
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        alive: list[Tensor] = []  # keeps storage keys unique while this runs
        for kind, tensors in (("parameter", spec.parameters), ("held", spec.held)):
            for name, tensor in tensors.items():
                alive.append(fakes.from_tensor(tensor))
                owners.setdefault(storage_key(alive[-1]), (kind, name))
        leaves = [x.make() if isinstance(x, Shape) else x for x in spec.leaves]
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                owners[storage_key(leaf)] = ("argument", i)
        args, kwargs = tree_unflatten(leaves, spec.tree)
        border = _Border(owners, fakes, alive, spec.distinct)
        try:
            with border, _as_written(module):
                out = type(module).forward(module, *args, **kwargs)
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            first = next(iter(str(error).splitlines()), "")
            log.info("%s: its cost is unknown: %s", type(module).__name__, first)
            return None
        writes = {key: _covered(spans) for key, spans in border.writes.items()}
        for i, tensor in enumerate(t for t in tree_leaves(out) if isinstance(t, Tensor)):
            if storage_key(tensor) not in owners:
                writes[("output", i)] = distinct_bytes(tensor)
    return Footprint(
        reads={key: _covered(spans) for key, spans in border.reads.items()},
        writes=writes,
        flops=border.flops,
        products=border.products,
        peak=border.peak,
    )
