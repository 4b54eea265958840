"""What one operator call must move and compute: bytes by tensor, and operations.

Bytes are compulsory: each input read once, each output written once, of an indexed tensor only
what the index touches (a row that it names twice counts twice here; `recorder` and `footprint` know
the numbers, and count it once). Operations are multiply-adds counted as two for matrix products and
attention, and one for each element of an element-wise operator or each input of a reduction.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# Operators by the part of their inputs that they touch; names are those of the packets in aten.
ALLOCATES = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty"}
ALLOCATES |= {"new_empty_strided", "resize_", "set_"}
OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_"}
GATHERS = {"index", "embedding", "gather", "index_select", "take", "_unsafe_index"}
SCATTERS = {"index_put_", "_index_put_impl_", "index_copy_", "index_fill_", "scatter_"}
ACCUMULATES = {"index_add_", "scatter_add_", "scatter_reduce_"}
GROUPED = {"_grouped_mm", "_scaled_grouped_mm"}
COPIES = {"clone", "_to_copy", "copy_", "contiguous", "fill_", "zero_"}
REDUCES = {"sum", "mean", "prod", "var", "std", "var_mean", "amax", "amin", "max", "min", "argmax"}
REDUCES |= {"argmin", "any", "all", "cumsum", "cumprod", "norm", "linalg_vector_norm", "logsumexp"}
REDUCES |= {"_softmax", "_log_softmax", "native_layer_norm", "_fused_rms_norm", "topk", "sort"}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The tensors that a call reads and writes with the bytes of each, and its operations."""

    reads: tuple[tuple[Tensor, int], ...]
    writes: tuple[tuple[Tensor, int], ...]
    flops: int
    matmul: bool
    peak: str  # "bf16" or "fp32"


def distinct_bytes(tensor: Tensor) -> int:
    """Bytes of the elements that the tensor holds, an expanded dimension counted once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in sizes if stride or size == 0) * tensor.element_size()


def storage_key(tensor: Tensor) -> int:
    """What all views of one storage share while it lives."""
    return tensor.untyped_storage()._cdata


def name_of(func: Any) -> str:
    """The operator's name without namespace and overload: "mm", "index_put_"."""
    return func.overloadpacket.__name__


def is_view(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Whether the call only looks at memory in another way: nothing is moved."""
    if func._schema.is_mutable:
        return False
    shared = {storage_key(t) for t in inputs}
    return bool(outputs) and all(storage_key(t) in shared for t in outputs)


def cost(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Cost:
    """What the call `func(*args, **kwargs) -> out` of an operator overload moves and computes."""
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
    name = name_of(func)
    mutated = list(_mutated(func, args, kwargs))
    nothing_made = not outputs and not mutated  # it only asks, such as for a tensor's device
    if name in ALLOCATES or nothing_made or is_view(func, inputs, outputs):
        return Cost(reads=(), writes=(), flops=0, matmul=False, peak="fp32")
    touched = {id(t): distinct_bytes(t) for t in inputs}
    written = {id(t): touched.get(id(t), distinct_bytes(t)) for t in mutated}
    if mutated:
        whole = name in OVERWRITES or name in SCATTERS or "out" in kwargs
        if name in SCATTERS or name in ACCUMULATES:
            written[id(mutated[0])] = _scattered_bytes(name, args, inputs)
            touched[id(mutated[0])] = written[id(mutated[0])]
        if whole:
            for tensor in mutated:
                touched[id(tensor)] = 0
    elif name in GATHERS and inputs and outputs:
        source = args[0] if isinstance(args[0], Tensor) else inputs[0]
        touched[id(source)] = min(touched[id(source)], distinct_bytes(outputs[0]))
    elif name in GROUPED:
        groups, rows = args[1].shape[0], args[0].shape[-2]
        if args[1].dim() == 3:  # at most as many groups as there are rows have any
            touched[id(args[1])] = touched[id(args[1])] * min(groups, rows) // groups
    made = [t for t in outputs if all(t is not m for m in mutated)]
    reads = {id(t): (t, touched[id(t)]) for t in inputs if touched[id(t)]}
    writes = {id(t): (t, written[id(t)]) for t in mutated}
    writes |= {id(t): (t, distinct_bytes(t)) for t in made}
    flops, matmul = operations(func, args, kwargs, out)
    narrow = matmul and inputs[0].element_size() <= 2
    return Cost(
        reads=tuple(reads.values()),
        writes=tuple(writes.values()),
        flops=flops,
        matmul=matmul,
        peak="bf16" if narrow else "fp32",
    )


@dataclass(frozen=True, kw_only=True)
class Gather:
    """A look-up of rows: which tensor's, by which whole numbers, and the bytes of one row."""

    source: Tensor
    index: Tensor
    row_bytes: int


def gather(func: Any, args: tuple[Any, ...]) -> Gather | None:
    """The look-up of rows of the first dimension that a call is; None where it is none."""
    name = name_of(func)
    index: Any = None
    if name in ("index", "_unsafe_index") and len(args[1]) == 1:
        index = args[1][0]
    elif name == "embedding" or (name == "index_select" and args[1] == 0):
        index = args[-1] if name == "index_select" else args[1]
    whole = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32)
    if not whole or not len(args[0]):
        return None
    source = args[0]
    return Gather(source=source, index=index, row_bytes=distinct_bytes(source) // len(source))


def _mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that the operator's schema says are written in place."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = kwargs.get(argument.name, args[i] if i < len(args) else None)
        yield from (t for t in tree_leaves(value) if isinstance(t, Tensor))


def _scattered_bytes(name: str, args: tuple[Any, ...], inputs: list[Tensor]) -> int:
    """Bytes of its first argument that an in-place scatter writes."""
    target = args[0]
    whole = distinct_bytes(target)
    if "index_put" in name:
        indices = [t for t in args[1] if t is not None]
        if any(t.dtype in (torch.bool, torch.uint8) for t in indices):
            return whole  # a mask's count is data
        places = prod(torch.broadcast_shapes(*(t.shape for t in indices)))
        indexed = [target.shape[d] for d, t in enumerate(args[1]) if t is not None]
        row = target.numel() // max(1, prod(indexed))
        return min(whole, places * row * target.element_size())
    index = next(t for t in inputs[1:] if not t.is_floating_point())
    if "scatter" in name:
        return min(whole, index.numel() * target.element_size())
    dim = args[1]
    return min(whole, whole // max(1, target.shape[dim]) * index.numel())


def _seen_share(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The share of query-key pairs that the call computes: causal attention skips later keys."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("is_causal") is not True:
        return 1.0
    queries, keys = args[0].shape[-2], args[1].shape[-2]
    return 1 - (min(queries, keys) - 1) / (2 * keys)


def operations(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> tuple[int, bool]:
    """Operations of the call, and whether it is a matrix product or an attention."""
    name = name_of(func)
    if func.overloadpacket in flop_registry:
        plain = {k: v for k, v in kwargs.items() if k != "out"}
        count = int(flop_registry[func.overloadpacket](*args, **plain, out_val=out))
        return int(count * _seen_share(func, args, kwargs)), True
    if name in GROUPED:
        rows, inner, columns = args[0].shape[-2], args[0].shape[-1], args[1].shape[-1]
        groups = args[0].shape[0] if args[0].dim() == 3 else 1
        return 2 * groups * rows * inner * columns, True
    if "attention" in name and len(args) >= 3:
        count = 4 * args[0].numel() * args[1].shape[-2]
        return int(count * _seen_share(func, args, kwargs)), True
    if name in COPIES:
        return 0, False
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if name in REDUCES:
        return tensors[0].numel() if tensors else 0, False
    if torch.Tag.pointwise in func.tags:
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        return max((t.numel() for t in made), default=0), False
    return 0, False
