"""Operators that write to their arguments, replayed: never on the caller's own tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harness import operators, substitutes
from harness.carried import Carried, flat
from harness.operators import LOW
from harness.state import State


def write(
    state: State,
    func: Any,
    positions: tuple[int, ...],
    original: Sequence[Any],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    floats: list[Carried],
) -> Any:
    """Run `func`, which writes to the argument at `positions`; returns what it would return."""
    place = positions[0]
    name = func._schema.arguments[place].name
    target = substitutes.keywords(func, *call)[name]
    if len(positions) > 1 or torch.Tag.inplace_view in func.tags:
        raise NotImplementedError(f"{func} cannot be replayed; write it with other operators")
    if not isinstance(target, Carried):
        _write_plain(state, func, target, call, floats)
    elif operators.is_move(func, *call):
        _move(state, func, target, call, [f for f in floats if f is not target])
    else:
        scratch = target.value.to(state.plan.wide(target.dtype), copy=True)
        _call(state, func, call, True, {id(target): scratch})
        _store(state, target, state.finish(operators.name(func), scratch, target.dtype, floats))
    return next(iter(original[place:]), target)


def _call(
    state: State, func: Any, call: tuple[Any, Any], wide: bool, swap: dict[int, Tensor]
) -> Any:
    return func(*state.values(call[0], wide, swap), **state.values(call[1], wide, swap))


def _move(
    state: State, func: Any, target: Carried, call: tuple[Any, Any], sources: list[Carried]
) -> None:
    if sources and operators.name(func) == "copy":
        source = sources[0]
        if target.dtype in LOW and target.dtype not in (source.dtype, source.box.low):
            wide = source.value.to(state.plan.wide(target.dtype), copy=True)
            source = state.finish("copy", wide, target.dtype, [source])  # the copy converts
        _store(state, target, source)
        return
    held = target.value.dtype
    if any(s.value.dtype != held for s in sources):
        held = state.plan.wide(target.dtype)
    target.box.prepare_write(held)
    if state.forced is None:
        _note_conflicts(func, target, call)
    _call(state, func, call, False, {id(s): s.value.to(held) for s in sources})
    _mix(target, sources)


def _note_conflicts(func: Any, target: Carried, call: tuple[Any, Any]) -> None:
    """Mark elements that this write stores more than once: which value stays is not specified."""
    given = substitutes.keywords(func, *call)
    counts = torch.zeros(target.shape, dtype=torch.int32, device=target.device)
    one = counts.new_ones(())
    called = operators.name(func)
    if called in ("index_put", "_index_put_impl"):
        torch.ops.aten.index_put_.default(counts, given["indices"], one, True)
    elif called == "index_copy":
        counts.index_add_(given["dim"], given["index"], one.expand(given["source"].shape))
    elif called == "scatter" and "src" in given:
        counts.scatter_add_(given["dim"], given["index"], one.expand(given["index"].shape))
    else:
        return
    if target.box.unspecified is None:
        size = flat(target.box.root).numel()
        target.box.unspecified = torch.zeros(size, dtype=torch.bool, device=target.device)
    value = target.value
    view = target.box.unspecified.as_strided(value.shape, value.stride(), value.storage_offset())
    view.logical_or_(counts > 1)


def _store(state: State, target: Carried, source: Carried) -> None:
    held = target.value.dtype
    if source.value.dtype not in (held, target.dtype):
        held = state.plan.wide(target.dtype)
    target.box.prepare_write(held)
    target.value.copy_(source.value)
    _mix(target, [source])


def _mix(target: Carried, sources: list[Carried]) -> None:
    box = target.box
    box.origins = box.origins.union(*(s.box.origins for s in sources))
    if any(s.box.low != box.low for s in sources):
        box.low = None
    box.kind = None


def _write_plain(
    state: State, func: Any, target: Tensor, call: tuple[Any, Any], floats: list[Carried]
) -> None:
    """A write to integers or booleans."""
    key = target.untyped_storage()._cdata
    ours = key in state.made or any(key == c.untyped_storage()._cdata for c, _ in _copies(state))
    destination = target
    if not ours:
        state.copies[key] = flat(target).clone(), target
        destination = state.resolve(target)
    if not floats:
        _call(state, func, call, False, {id(target): destination})
        return
    scratch = destination.clone()
    destination.copy_(state.route(lambda: _call(state, func, call, False, {id(target): scratch})))


def _copies(state: State) -> Any:
    return state.copies.values()
