"""Arguments and results as trees: tensors inside tuples, lists, dicts, dataclasses and caches."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

VECTOR = 16  # bytes of the widest load


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of `tree` with its path, such as "cache.k" or "[1]", in a fixed order."""
    if isinstance(tree, Tensor):
        yield path, tree
        return
    for step, child in _children(tree):
        yield from leaves(child, path + step)


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """`tree` rebuilt with `fn` applied to every tensor; all else is shared with the original."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, tuple):
        items = [map_tensors(fn, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    if isinstance(tree, list):
        return [map_tensors(fn, item) for item in tree]
    if isinstance(tree, dict):
        return {key: map_tensors(fn, value) for key, value in tree.items()}
    if not _holds_tensors(tree):
        return tree
    rebuilt = copy.copy(tree)
    for name, value in vars(tree).items():
        object.__setattr__(rebuilt, name, map_tensors(fn, value))  # frozen dataclasses too
    return rebuilt


def _children(tree: Any) -> list[tuple[str, Any]]:
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(f".{name}", getattr(tree, name)) for name in tree._fields]  # type: ignore[attr-defined]
    if isinstance(tree, (tuple, list)):
        return [(f"[{i}]", item) for i, item in enumerate(tree)]
    if isinstance(tree, dict):
        return [(f"[{key!r}]", value) for key, value in tree.items()]
    if _holds_tensors(tree):
        return [(f".{name}", value) for name, value in vars(tree).items()]
    return []


def _holds_tensors(tree: Any) -> bool:
    """Whether `tree` is an object to look into: a dataclass, or another that holds tensors."""
    if isinstance(tree, (type, nn.Module, torch.dtype, torch.device)) or not hasattr(
        tree, "__dict__"
    ):
        return False
    return is_dataclass(tree) or any(
        isinstance(value, (Tensor, list, tuple, dict)) for value in vars(tree).values()
    )


def clone(tensor: Tensor) -> Tensor:
    """A copy in storage of its own that lies as the tensor does: with the strides of a slice with
    gaps or of an expanded tensor, and at an address that is as far from a multiple of 16 bytes."""
    if torch.is_floating_point(tensor) and isinstance(tensor, nn.Parameter):
        tensor = tensor.detach()
    offset = tensor.data_ptr() % VECTOR // tensor.element_size()
    if 0 in tensor.shape or (tensor.is_contiguous() and not offset):
        return tensor.clone()
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    room = torch.zeros(offset + span, dtype=tensor.dtype, device=tensor.device)
    copy = room.as_strided(tensor.shape, tensor.stride(), offset)
    once(copy).copy_(once(tensor))
    return copy


def once(tensor: Tensor) -> Tensor:
    """The tensor without what an expanded one repeats, which exists once in memory."""
    if 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(1 if stride == 0 else None) for stride in tensor.stride())]


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bit patterns as integers, or itself where it holds integers or booleans."""
    if not torch.is_floating_point(tensor):
        return tensor
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(sizes[tensor.dtype.itemsize])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(bits(a), bits(b)))
