"""The calls a region is judged on: recorded from the reference, and others derived from them.

Nothing here knows a region or a model. The reference runs prefills and decodes, hooks clone what
its nodes are called with, and a comparison of those calls shows which dimensions are tokens and
which are sequences.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from harness.operators import LOW, is_real
from harness.replay import named_arguments, named_results
from harness.steps import BATCH, LabelledStep
from harness.trees import clone, leaves, map_tensors

# What a module may raise on inputs that it does not accept.
REFUSALS = RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError
SCALE = 2.0**12  # exact in every floating-point format; its square is far from overflow
RAGGED = 7  # tokens of a short, odd-sized call


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of one node. `typical` cases also measure noise and distance from FP64; in `telling`
    ones roundings are told apart that hardly show elsewhere. `tied` names vectors of the node whose
    values repeat while the call lasts (`harness.ties`). In an `aliased` one arguments share memory.
    """

    name: str
    node: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    typical: bool = True
    telling: bool = False
    tied: tuple[str, ...] = ()
    aliased: bool = False

    def clones(self, fixed: set[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Fresh copies of the arguments, save parameters (storage in `fixed`)."""
        if self.aliased:
            return together((self.args, self.kwargs), fixed)
        return map_tensors(lambda t: copied(t, fixed), (self.args, self.kwargs))


def results_of(node: nn.Module, case: Case, fixed: set[int]) -> dict[str, Tensor]:
    """What a plain call returns, by name. It cannot alter the case's own tensors."""
    args, kwargs = case.clones(fixed)
    with torch.no_grad():
        return named_results(node, node(*args, **kwargs))


def storages(*modules: nn.Module) -> set[int]:
    """The storages of all parameters and buffers."""
    return {t.untyped_storage()._cdata for m in modules for t in (*m.parameters(), *m.buffers())}


def copied(tensor: Tensor, fixed: set[int]) -> Tensor:
    return tensor if tensor.untyped_storage()._cdata in fixed else clone(tensor)


def together(tree: Any, fixed: set[int]) -> Any:
    """Copies that share memory where the tensors do, save parameters."""
    rooms: dict[int, torch.UntypedStorage] = {}
    made: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata in fixed:
            return tensor
        if id(tensor) not in made:
            room = rooms.setdefault(storage._cdata, storage.clone())
            view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            made[id(tensor)] = view.set_(room, *place)  # type: ignore[call-overload]
        return made[id(tensor)]

    return map_tensors(copy, tree)


def record(
    model: nn.Module, names: list[str], steps: Iterable[LabelledStep], limit_bytes: int
) -> tuple[list[Case], list[str]]:
    """The first call of each named node in each step; and notes on what could not be had."""
    fixed = storages(model)
    found: list[Case] = []
    notes: list[str] = []
    for label, inputs in steps:
        seen: set[str] = set()

        def keep(name: str, args: Any, kwargs: Any, label=label, seen=seen) -> None:
            if name in seen:
                return
            seen.add(name)
            size = sum(
                t.nbytes
                for _, t in leaves((args, kwargs))
                if t.untyped_storage()._cdata not in fixed
            )
            if size > limit_bytes:
                notes.append(f"{name} in {label} left out: its arguments take {size >> 20} MiB")
                return
            args, kwargs = map_tensors(lambda t: copied(t, fixed), (args, kwargs))
            found.append(Case(name=label, node=name, args=args, kwargs=kwargs))

        with contextlib.ExitStack() as stack, torch.no_grad():
            for name in names:
                handle = model.get_submodule(name).register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: keep(name, args, kwargs), with_kwargs=True
                )
                stack.callback(handle.remove)
            try:
                model(*inputs.args)
            except REFUSALS as error:
                if not found:
                    raise
                notes.append(f"the reference does not take {label}: {error}")
    return found, notes


@dataclass(frozen=True)
class Axes:
    """Which dimensions of a node's arguments count tokens, and which count sequences.

    Both map an argument's path to (dimension, size) pairs, found by comparing recorded calls.
    """

    tokens: dict[str, list[tuple[int, int]]]
    sequences: dict[str, list[tuple[int, int]]]


def axes(calls: list[Case]) -> Axes:
    """Compare the calls of one node: a token dimension is 1 (or the batch) in a decode and longer
    in a prefill; a sequence dimension is 1 in a call of one sequence."""
    shapes = [{path: t.shape for path, t in leaves((c.args, c.kwargs))} for c in calls]
    tokens: dict[str, list[tuple[int, int]]] = {}
    sequences: dict[str, list[tuple[int, int]]] = {}
    first = shapes[0] if shapes else {}
    for path, shape in first.items():
        for dim, size in enumerate(shape):
            others = {s[path][dim] for s in shapes if path in s and len(s[path]) == len(shape)}
            if size > BATCH and others & {1, BATCH}:
                tokens.setdefault(path, []).append((dim, size))
            elif size == BATCH and 1 in others:
                sequences.setdefault(path, []).append((dim, size))
    return Axes(tokens, sequences)


def cut(case: Case, dims: dict[str, list[tuple[int, int]]], count: int, name: str) -> Case:
    """The call with those dimensions cut to their first `count`."""
    paths = {id(t): path for path, t in leaves((case.args, case.kwargs))}

    def shorten(tensor: Tensor) -> Tensor:
        for dim, size in dims.get(paths[id(tensor)], []):
            if tensor.shape[dim] == size:
                tensor = tensor.narrow(dim, 0, min(count, size))
        return tensor

    args, kwargs = map_tensors(shorten, (case.args, case.kwargs))
    return replace(case, name=name, args=args, kwargs=kwargs, typical=False)


def widened(case: Case, dims: dict[str, list[tuple[int, int]]], count: int, name: str) -> Case:
    """The call with those dimensions `count` long: what is there, again and again."""
    paths = {id(t): path for path, t in leaves((case.args, case.kwargs))}

    def longer(tensor: Tensor) -> Tensor:
        for dim, size in dims.get(paths[id(tensor)], []):
            if tensor.shape[dim] == size:
                at = torch.arange(count, device=tensor.device) % size
                tensor = tensor.index_select(dim, at)
        return tensor

    args, kwargs = map_tensors(longer, (case.args, case.kwargs))
    return replace(case, name=name, args=args, kwargs=kwargs, typical=False)


def activations(
    node: nn.Module, case: Case, fixed: set[int], written: set[str]
) -> dict[int, Tensor]:
    """The call's activations by id: no parameters, no arguments that the node writes to (`written`,
    by name) and no tables, which stay wider than the model's dtype."""
    found = {
        id(t): t
        for name, t in named_arguments(node, case.args, case.kwargs).items()
        if is_real(t.dtype)
        and t.numel()
        and name not in written
        and t.untyped_storage()._cdata not in fixed
    }
    low = {key: t for key, t in found.items() if t.dtype in LOW}
    return low or found


def with_values(case: Case, name: str, chosen: dict[int, Tensor], change: Any) -> Case:
    """The call with `change` applied to the arguments in `chosen`."""
    args, kwargs = map_tensors(
        lambda t: change(t) if id(t) in chosen else t, (case.args, case.kwargs)
    )
    return replace(case, name=name, args=args, kwargs=kwargs, typical=False)


def derive(
    case: Case, where: Axes, chosen: dict[int, Tensor], generator: torch.Generator
) -> list[Case]:
    """Calls of the same node at the edges of its domain; `chosen` are its activations."""
    changes = {
        f"values x {SCALE:g}": lambda t: t * SCALE,
        f"values / {SCALE:g}": lambda t: t / SCALE,
        "one-hot rows": lambda t: _one_hot(t, generator),
        "negative zeros": lambda t: _negative_zeros(t, generator),
        "strided arguments": _strided,
    }
    found = [with_values(case, name, chosen, change) for name, change in changes.items()]
    for i, key in enumerate(chosen if len(chosen) > 1 else ()):
        # What guards a division shows where all but it is tiny.
        name = f"activation {i + 1} zero, values / {SCALE:g}"
        alone = lambda t, key=key: torch.zeros_like(t) if id(t) == key else t / SCALE  # noqa: E731
        found.append(with_values(case, name, chosen, alone))
    if (sharing := _sharing(case, chosen)) is not None:
        found.append(sharing)
    if where.tokens:
        found += [cut(case, where.tokens, n, f"{n} tokens") for n in (0, 1, RAGGED)]
    return found


def _sharing(case: Case, chosen: dict[int, Tensor]) -> Case | None:
    """The call with activations that are slices of one buffer, as those of a packed projection are,
    and two of one shape, if there are, the same tensor. None where nothing can be shared."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in chosen.values():
        if tensor.ndim > 1:
            rows = tensor.shape[: 2 if tensor.ndim > 2 else 1]
            groups.setdefault((rows, tensor.dtype, tensor.device), []).append(tensor)
    (rows, *_), packed = max(groups.items(), key=lambda item: len(item[1]), default=(((),), []))
    if len(packed) < 2:
        return None
    inner = [t.shape[len(rows) :] for t in packed]
    widths = [shape.numel() for shape in inner]
    room = torch.cat([t.reshape(*rows, w) for t, w in zip(packed, widths, strict=True)], dim=-1)
    slices = room.split(widths, dim=-1)
    views = [s.unflatten(-1, shape) for s, shape in zip(slices, inner, strict=True)]
    alike = next((i for i, shape in enumerate(inner) if shape in inner[:i]), None)
    if alike is not None:
        views[alike] = views[inner.index(inner[alike])]
    by_id = {id(t): view for t, view in zip(packed, views, strict=True)}
    args, kwargs = map_tensors(lambda t: by_id.get(id(t), t), (case.args, case.kwargs))
    name = "arguments that share memory"
    return replace(case, name=name, args=args, kwargs=kwargs, typical=False, aliased=True)


def _one_hot(t: Tensor, generator: torch.Generator) -> Tensor:
    if not t.ndim:
        return t
    at = torch.randint(t.shape[-1], (*t.shape[:-1], 1), generator=generator).to(t.device)
    return torch.zeros_like(t).scatter_(-1, at, 1.0)


def _negative_zeros(t: Tensor, generator: torch.Generator) -> Tensor:
    where = torch.rand(t.shape, generator=generator) < 1 / 8
    return t.masked_fill(where.to(t.device), -0.0)


def _strided(t: Tensor) -> Tensor:
    """The same values with gaps between the rows."""
    if not t.ndim:
        return t
    room = torch.zeros((*t.shape[:-1], 2 * t.shape[-1]), dtype=t.dtype, device=t.device)
    return room[..., : t.shape[-1]].copy_(t)


def near_ties(
    case: Case, chosen: dict[int, Tensor], choose: Any, halvings: int = 12
) -> Case | None:
    """Rows between two rows that are routed differently, where the choice flips.

    `choose(case)` gives the integer results [rows, ...] of a call. Each row is bisected towards the
    row before it until the two sides of the flip are neighbours; None if no row flips.
    """
    start = choose(case)
    if start is None or not len(chosen):
        return None
    rows = start.shape[0]
    low = torch.zeros(rows, device=start.device)
    high = torch.ones(rows, device=start.device)

    def between(at: Tensor, name: str = "near ties") -> Case:
        def mix(t: Tensor) -> Tensor:
            if t.ndim < 2 or t.shape[:-1].numel() != rows:
                return t
            flat = t.reshape(rows, -1).float()
            weight = at[:, None]
            return ((1 - weight) * flat + weight * flat.roll(1, 0)).to(t.dtype).view(t.shape)

        return with_values(case, name, chosen, mix)

    flips = (choose(between(high)) != start).flatten(1).any(1)
    if not bool(flips.any()):
        return None
    for _ in range(halvings):
        middle = (low + high) / 2
        same = ~(choose(between(middle)) != start).flatten(1).any(1)
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    return between(torch.where(flips, high, low))
