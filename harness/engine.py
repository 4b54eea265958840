"""The dispatch mode behind `harness.replay`: runs each operator on carried values."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from harness import added, carried, fusing, operators, substitutes, writes
from harness.carried import ATTENTION, Carried
from harness.modes import DispatchMode
from harness.operators import LOW, is_real
from harness.replay import Choice
from harness.state import State

DTYPES = operators.Dtypes()


class Engine(State, DispatchMode):
    """One replay in progress; see `harness.replay.replay`."""

    @contextmanager
    def running(self) -> Iterator[None]:
        carried.enter(self)
        try:
            with self:
                yield
        finally:
            carried.leave()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.dispatch(func, args, kwargs or {})

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operators.decomposes(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        floats: list[Carried] = []
        original = args
        view, targets = operators.is_view(func), operators.written(func)
        args = tuple(self._open(a, floats, view or i in targets) for i, a in enumerate(args))
        kwargs = {k: self._open(v, floats, view) for k, v in kwargs.items()}
        called = operators.name(func)
        if called in operators.FACTORIES:
            return self._make(func, called, args, kwargs)
        if positions := operators.written(func):
            return writes.write(self, func, positions, original, (args, kwargs), floats)
        if not floats:
            return self._without_floats(func, called, args, kwargs)
        if called == "_to_copy":
            return self._convert(func, kwargs, floats[0])
        if operators.is_view(func):
            return self._view(func, args, kwargs, floats[0])
        if called in operators.SELECTS and len(func._schema.returns) == 2:
            return self._select(func, args, kwargs, floats[0])
        if operators.is_move(func, args, kwargs):
            return self._move(func, args, kwargs, floats)
        return self._compute(func, called, args, kwargs, floats)

    def _open(self, value: Any, floats: list[Carried], as_is: bool = False) -> Any:
        """Every tensor in its carried form, or our copy of it; collects the carried ones. Those
        taken `as_is` are not read."""
        if isinstance(value, Tensor):
            if not is_real(value.dtype):
                return self.resolve(value)
            adopted = self.adopt(value) if as_is else self.read(self.adopt(value))
            floats.append(adopted)
            return adopted
        if isinstance(value, (list, tuple)):
            return type(value)(self._open(v, floats, as_is) for v in value)
        return value

    def _make(self, func: Any, called: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """A new tensor that holds nobody's values."""
        like = called.endswith("_like") or called.startswith("new_")
        if like and isinstance(args[0], Carried):
            kwargs = {**kwargs, "dtype": kwargs.get("dtype") or args[0].dtype}
        value = func(*self.values(args, False), **self.values(kwargs, False))
        return self.wrap_plain(value)

    def _without_floats(self, func: Any, called: str, args: Any, kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if called == "slice" and isinstance(result, Tensor):
            choice = self.sorted_by.get(args[0].untyped_storage()._cdata)
            if choice is not None and result.shape[-1] < args[0].shape[-1]:
                choice.kept = min(choice.kept, result.shape[-1])
        return self.wrap_plain(result)

    def _view(self, func: Any, args: Any, kwargs: dict[str, Any], source: Carried) -> Any:
        result = func(*self.values(args, False), **self.values(kwargs, False))
        many = isinstance(result, (list, tuple))
        items = list(result) if many else [result]
        if any(r.dtype != source.value.dtype for r in items):  # complex numbers as pairs, say
            dtype = DTYPES.of(func, args, kwargs)[0]
            return self.wrap(result, result.dtype if dtype is None else dtype)
        wrapped = [self.wrap(r, source.dtype, source.box) for r in items]
        return type(result)(wrapped) if many else wrapped[0]

    def _select(self, func: Any, args: Any, kwargs: dict[str, Any], source: Carried) -> Any:
        """Sorts and the like: the order comes from the first run, the values are ours."""
        given = substitutes.keywords(func, args, kwargs)
        dim, keepdim = given.get("dim", -1), given.get("keepdim", True)
        value = source.value
        if self.forced is None:
            made = func(*self.values(args, False), **self.values(kwargs, False))
            values, indices = made[0], self.route(lambda: made[1])
        else:
            indices = self.route(lambda: None)
            at = indices if keepdim else indices.unsqueeze(dim)
            values = value.gather(dim, at) if value.ndim else value.clone()
            values = values if keepdim else values.squeeze(dim)
        if operators.name(func) in operators.CHOOSES and value.ndim:
            choice = Choice(value.transpose(dim, -1).clone(), indices.shape[dim] if keepdim else 1)
            self.choices.append(choice)
            self.sorted_by[indices.untyped_storage()._cdata] = choice
        box = self.copied(values, [source])
        return self.wrap(values, source.dtype, box), self.wrap(indices, indices.dtype)

    def _move(self, func: Any, args: Any, kwargs: dict[str, Any], floats: list[Carried]) -> Any:
        """The result holds elements of the arguments: it is not rounded again."""
        dtypes = {f.dtype for f in floats if f.ndim} or {floats[0].dtype}
        only: torch.dtype = next(iter(dtypes))
        dtype: torch.dtype = only
        if len(dtypes) > 1:
            dtype = DTYPES.of(func, args, kwargs)[0] or only
        swap: dict[int, Tensor] = {}
        wide = any(f.dtype != dtype or not f.is_narrow for f in floats)
        for f in floats:  # a scalar takes the tensor's dtype, with its rounding
            if dtype in LOW and f.dtype != dtype and not f.ndim and self.plan.rounds:
                swap[id(f)] = f.value.to(dtype).to(self.plan.wide(f.dtype))
        make = lambda: func(*self.values(args, wide, swap), **self.values(kwargs, wide, swap))  # noqa: E731
        returns = func._schema.returns
        if not returns or returns[0].type.kind() != "TensorType":
            return self.route(make)
        value = make() if is_real(floats[0].dtype) else self.route(make)
        return self.wrap(value, dtype, self.copied(value, floats))

    def _convert(self, func: Any, kwargs: dict[str, Any], source: Carried) -> Any:
        dtype: torch.dtype = kwargs.get("dtype") or source.dtype
        others = {k: v for k, v in kwargs.items() if k != "dtype"}
        if not is_real(dtype):
            return self.wrap(self.route(lambda: func(source.value, **kwargs)), dtype)
        held = source.value.dtype if dtype == source.dtype else self.plan.wide(dtype)
        value = func(source.value, dtype=held, **others)
        if dtype in LOW and dtype not in (source.dtype, source.box.low):
            return self.finish("_to_copy", value, dtype, [source])
        return self.wrap(value, dtype, self.copied(value, [source]))

    def _compute(
        self, func: Any, called: str, args: Any, kwargs: dict[str, Any], floats: list[Carried]
    ) -> Any:
        """Arithmetic: runs on widened values; a result in a low dtype is a rounding point."""
        if self.forced is not None and called in operators.DECISIONS:
            if called == "argmax":
                self._note_choice(args, kwargs, func)
            return self.wrap_plain(self.route(lambda: None))
        result = self._run(func, called, args, kwargs)
        many = isinstance(result, (list, tuple))
        items = list(result) if many else [result]
        if not any(isinstance(r, Tensor) and is_real(r.dtype) for r in items):
            if called == "argmax":
                self._note_choice(args, kwargs, func)
            return self.wrap_plain(self.route(lambda: result))
        dtypes = DTYPES.of(func, args, kwargs)
        sums = fusing.sums(called, args, kwargs, self.plan)
        finished = [
            self.finish(called, r, d or r.dtype, floats, sums)
            if isinstance(r, Tensor) and is_real(r.dtype)
            else r
            for r, d in itertools.zip_longest(items, dtypes[: len(items)])
        ]
        if called == "mul" and (self.plan.name or self.plan.fuse):
            fusing.remember(finished[0], args, self.plan)
        return type(result)(finished) if many else finished[0]

    def _note_choice(self, args: Any, kwargs: dict[str, Any], func: Any) -> None:
        given = substitutes.keywords(func, args, kwargs)
        value, dim = given["self"].value, given["dim"]
        value = value.flatten() if dim is None else value.transpose(dim, -1)
        self.choices.append(Choice(value.clone(), 1))

    def _run(self, func: Any, called: str, args: Any, kwargs: dict[str, Any]) -> Any:
        wide = self.plan.carry is not None
        swap = None
        if self.plan.add and called in added.PRODUCTS:
            swap = added.operands(self.added_here(), args, self.noise)
        if called == "_grouped_mm" and wide:
            given = substitutes.keywords(func, args, kwargs)
            a, b = given["self"], given["mat2"]
            dtype = self.plan.wide(a.dtype)
            if self.noise and self.noise.noise.reorder and a.is_narrow and b.is_narrow and not swap:
                return func(*self.noise.grouped(a.value, b.value, given["offs"]), given["offs"])
            product = self.noise.product if self.noise else _wide_product(dtype)
            return substitutes.grouped_mm(a.value, b.value, given["offs"], product, dtype)
        if isinstance(kwargs.get("dtype"), torch.dtype) and is_real(kwargs["dtype"]):
            kwargs = {**kwargs, "dtype": self.plan.wide(kwargs["dtype"])}
        if called in ("_softmax", "_log_softmax") and wide:
            args = (*args[:2], False)  # its argument is wide already
        if self.noise is not None and swap:  # its sums have an order all the same
            args = tuple(self.wrap(swap[id(a)], a.dtype) if id(a) in swap else a for a in args)
            swap = None
        if self.noise is not None:
            result = self.noise.run(func, called, args, kwargs, self)
            if result is not None:
                return result
        return func(*self.values(args, wide, swap), **self.values(kwargs, wide, swap))

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """F.scaled_dot_product_attention: the library's own kernel while its operands are rounded
        and nothing inside is asked for, its equation otherwise."""
        with _disable_current_modes():
            found: list[Carried] = []
            lazy = hasattr(attn_mask, "_materialize")  # a bias that is no tensor yet
            q, k, v = (self._open(x, found) for x in (query, key, value))
            mask = attn_mask if lazy else self._open(attn_mask, found)
            given = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
            as_is = self.plan.rounds and not self.plan.add and all(f.is_narrow for f in found)
            if as_is:
                if self.noise is not None and self.noise.noise.reorder:
                    q, k = self.noise.reordered(q, k)
                mask = mask if lazy else self.values(mask, False)
                q, k, v = self.values((q, k, v), False)
                result = ATTENTION(q, k, v, mask, **given)
            else:
                q, k, v = self.values((q, k, v), True)
                mask = mask._materialize(q.device) if lazy else self.values(mask, True)
                add = self.added_here()
                result = substitutes.attention(
                    q, k, v, mask, is_causal, scale,
                    lambda p: added.probabilities(add, p, self.noise),
                )  # fmt: skip
            return self.finish("scaled_dot_product_attention", result, query.dtype, found)


def _wide_product(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: a.to(dtype) @ b.to(dtype)
