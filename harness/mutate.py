"""Running a node with one of its operators altered, and tracing the operators it runs.

An operator of a forward pass is known by where it is called (module and expression), its name, and
how often it was called there before; so it is found again in calls of other sizes.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harness import operators, substitutes
from harness.carried import flat
from harness.modes import DispatchMode
from harness.naming import Site, module_names, site
from harness.operators import LOW
from harness.trees import leaves, map_tensors


class Key(NamedTuple):
    """Which operator of a forward pass."""

    label: str  # module and expression
    called: str  # ATen's name
    nth: int


@dataclass
class Call:
    """One traced operator: what it was called with and gave. Tensors are as they were given."""

    key: Key
    module: str  # qualified name below the node
    source: str  # file:line
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    rounds: bool  # whether its result is a rounding point
    makers: list["Call"] = field(default_factory=list)  # that computed its operands
    users: list["Call"] = field(default_factory=list)

    @property
    def tensors(self) -> list[Tensor]:
        return [t for _, t in leaves((self.args, self.kwargs))]


Alteration = Callable[["Altered", Any, tuple[Any, ...], dict[str, Any]], Any]


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Watching(DispatchMode):
    """Knows which operator is running."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.modules = module_names(root)
        self.counts: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        where, called = site(self.modules), operators.name(func)
        nth = self.counts[where.label, called]
        self.counts[where.label, called] += 1
        return self.call(Key(where.label, called, nth), where, func, args, kwargs or {})

    def call(self, key: Key, where: Site, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class Tracer(_Watching):
    """Records every operator that computes something; views and moves pass their maker on."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__(root)
        self.calls: list[Call] = []
        self.made_by: dict[int, list[Call]] = {}
        self.low: dict[int, torch.dtype] = {}  # storages that hold values of that dtype
        self.alive: list[Any] = []  # a storage's number is its own while it lives

    def call(self, key: Key, where: Site, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = [t for _, t in leaves((args, kwargs))]
        result = func(*args, **kwargs)
        made = [t for _, t in leaves(result)]
        self.alive.append((given, made))
        makers: list[Call] = []
        for tensor in given:
            makers += [m for m in self.made_by.get(storage(tensor), []) if m not in makers]
        converts = key.called == "_to_copy"
        passes = operators.is_view(func) or operators.is_move(func, args, kwargs)
        lows = {self._low(t) for t in given if t.is_floating_point()}
        only = next(iter(lows)) if len(lows) == 1 else None
        low = bool(made) and made[0].dtype in LOW
        rounds = low and not passes and not (converts and only == made[0].dtype)
        if key.called == "copy" and low and isinstance(args[1], Tensor):  # converts on its way
            rounds = args[1].is_floating_point() and self._low(args[1]) != made[0].dtype
        place = where.module, where.source
        found = Call(key, *place, func, args, kwargs, result, rounds, makers)
        self.calls.append(found)
        for maker in makers:
            maker.users.append(found)
        for tensor in made:
            key_ = storage(tensor)
            if passes:
                self.made_by.setdefault(key_, []).append(found)
            elif not operators.written(func):
                self.made_by[key_] = [found]
            if only is not None and (passes or converts):
                self.low.setdefault(key_, only)
        return result

    def _low(self, tensor: Tensor) -> torch.dtype | None:
        return tensor.dtype if tensor.dtype in LOW else self.low.get(storage(tensor))


def trace(node: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call]:
    """The operators of one call, which may write to its arguments."""
    tracer = Tracer(node)
    with torch.no_grad(), tracer:
        node(*args, **kwargs)
    return tracer.calls


def forget(calls: list[Call]) -> None:
    """Let the tensors of a trace go at once: its operators refer to each other."""
    for call in calls:
        call.makers.clear()
        call.users.clear()


class Altered(_Watching):
    """Runs a node with other computations in the place of some operators.

    `alter` maps operators to what is done instead; `unrounded` names a rounding point whose
    rounding is left out: its FP32 value goes to the operators that use it, or to those inside the
    module `reader` alone. With `late`, the first FP32 result computed from it is rounded instead.
    """

    def __init__(
        self,
        root: nn.Module,
        alter: dict[Key, Alteration],
        unrounded: Key | None = None,
        *,
        late: bool = False,
        reader: str | None = None,
    ) -> None:
        super().__init__(root)
        self.alter, self.unrounded, self.late = alter, unrounded, late
        self.reader = reader
        self.times = 0
        self.external: set[int] = set()  # storages of the node's arguments
        self.products: dict[int, tuple[Any, Any, Tensor]] = {}  # FP32 products: factors, result
        self.sums: dict[int, Tensor] = {}  # storage of an operand -> its last sum
        self.wide: dict[int, tuple[Tensor, Tensor]] = {}  # storage -> it and its FP32 values
        self.alive: list[Any] = []

    def exact_product(self, tensor: Tensor) -> Tensor:
        """The FP64 product that `tensor`, a result or part of one, was rounded from."""
        a, b, product = self.products[storage(tensor)]
        a, b = (x.double() if isinstance(x, Tensor) else float(torch.tensor(x)) for x in (a, b))
        exact = torch.empty_strided(
            product.shape, product.stride(), dtype=torch.float64, device=product.device
        ).copy_(torch.as_tensor(a * b))
        return exact.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def call(self, key: Key, where: Site, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.times += key == self.unrounded or key in self.alter
        if key == self.unrounded:
            return self._leave_unrounded(self.alter.get(key), func, args, kwargs)
        if key in self.alter:
            result = self.alter[key](self, func, args, kwargs)
        elif self._reads(where.module) and any(
            storage(t) in self.wide for _, t in leaves((args, kwargs))
        ):
            result = self._carried_on(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        self._remember(key.called, args, result)
        return result

    def _reads(self, module: str) -> bool:
        """Whether operators of that module read the value before its rounding."""
        reader = self.reader
        return reader is None or module == reader or module.startswith(f"{reader}.")

    def _remember(self, called: str, args: Any, result: Any) -> None:
        if called not in ("mul", "add") or not isinstance(result, Tensor):
            return
        if called == "mul" and result.dtype == torch.float32:
            self.products[storage(result)] = args[0], args[1], result
        if called == "add":
            for operand in args[:2]:
                if isinstance(operand, Tensor) and operand.shape == result.shape:
                    self.sums[storage(operand)] = result
                    self.alive.append(operand)

    def _leave_unrounded(self, alter: Alteration | None, func: Any, args: Any, kwargs: Any) -> Any:
        """The rounded result, and what it was before the rounding, for later operators."""
        run = func if alter is None else lambda *a, **k: alter(self, func, a, k)
        if operators.name(func) in ("_to_copy", "copy"):
            source = args[operators.name(func) == "copy"]
            result = func(*args, **kwargs)
            self._keep(result, source.float())
            return result
        wide_args, wide_kwargs = self._widened((args, kwargs))  # before a write changes them
        exact = _wide(func if alter is None else run, wide_args, wide_kwargs)
        result = func(*args, **kwargs)
        for (_, low), (_, value) in zip(leaves(result), leaves(exact), strict=False):
            self._keep(low, value)
        return result

    def _keep(self, low: Tensor, value: Tensor) -> None:
        """Remember FP32 values for a tensor of the node's own, all of its storage with it."""
        if low.dtype not in LOW or storage(low) in self.external:
            return
        if storage(low) not in self.wide:
            self.wide[storage(low)] = low, flat(low).float()
        wide = self.wide[storage(low)][1]
        wide.as_strided(low.shape, low.stride(), low.storage_offset()).copy_(value)

    def _widened(self, tree: Any) -> Any:
        """Unrounded values where there are any, and everything in FP32."""

        def widen(t: Tensor) -> Tensor:
            if t.dtype not in LOW and storage(t) not in self.wide:
                return t
            held = self.wide.get(storage(t))
            if held is None:
                return t.float()
            return held[1].as_strided(t.shape, t.stride(), t.storage_offset())

        return map_tensors(widen, tree)

    def _carried_on(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operator one of whose operands was left unrounded."""
        if operators.is_view(func):
            return func(*args, **kwargs)  # shares the storage
        if places := operators.written(func):
            return self._written(places, func, args, kwargs)
        result = func(*args, **kwargs)
        called = operators.name(func)
        copies = called == "_to_copy" and kwargs.get("dtype") in (None, args[0].dtype)
        wide_args, wide_kwargs = self._widened((args, kwargs))
        if copies or operators.is_move(func, args, kwargs):
            others = {k: v for k, v in wide_kwargs.items() if k != "dtype"}
            exact = func(*wide_args, **others)
            for (_, low), (_, value) in zip(leaves(result), leaves(exact), strict=True):
                self._keep(low, value)
            return result
        if called == "_to_copy":
            exact = func(*wide_args, **kwargs)
            if self.late and exact.dtype == torch.float32:
                self.wide[storage(exact)] = exact, exact  # still to be rounded
            return exact
        exact = _wide(func, wide_args, wide_kwargs)
        # Attention's further results, for a backward pass, stay as they are.
        for (_, low), (_, value) in zip(leaves(result), leaves(exact), strict=False):
            if low.is_floating_point():
                low.copy_(value.bfloat16() if self.late else value)
            else:
                low.copy_(value)
        self.late = False
        return result

    def _written(self, places: tuple[int, ...], func: Any, args: Any, kwargs: Any) -> Any:
        """A write: the caller's memory holds rounded values, the node's own may hold wide ones."""
        target = args[places[0]]
        wide_args, wide_kwargs = self._widened((args, kwargs))
        if target.dtype not in LOW and storage(target) not in self.wide:
            return _wide(func, wide_args, wide_kwargs)
        converts = operators.name(func) == "copy" and args[1].dtype != target.dtype
        if operators.is_move(func, args, kwargs) and not converts:
            if storage(target) not in self.external:
                self._keep(target, wide_args[places[0]])
                func(*self._widened(args), **self._widened(kwargs))
            return func(*args, **kwargs)
        exact = _wide(func, wide_args, wide_kwargs)
        result = func(*args, **kwargs)
        target.copy_(exact)
        if storage(target) in self.wide:
            self._keep(target, target)
        return result


def _wide(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operator on FP32 operands, by other operators where it refuses them."""
    called = operators.name(func) if hasattr(func, "_schema") else ""
    if kwargs.get("dtype") in LOW:
        kwargs = {**kwargs, "dtype": torch.float32}
    if called in ("_softmax", "_log_softmax"):
        args = (*args[:2], False)
    given = substitutes.keywords(func, args, kwargs) if called else {}
    if called == "_grouped_mm":
        a, b, offs = given["self"], given["mat2"], given["offs"]
        return substitutes.grouped_mm(a, b, offs, torch.matmul, torch.float32)
    if called.startswith("_scaled_dot_product"):
        mask = given.get("attn_mask", given.get("attn_bias"))
        q, k, v = (given[name] for name in ("query", "key", "value"))
        causal, scale = given.get("is_causal", False), given.get("scale")
        return substitutes.attention(q, k, v, mask, causal, scale, lambda p: p)
    return func(*args, **kwargs)


@dataclass
class Wrong:
    """`node`'s forward with some operators altered, and how often that happened."""

    node: nn.Module
    alter: dict[Key, Alteration]
    unrounded: Key | None = None
    late: bool = False
    reader: str | None = None
    times: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_altered(self, args, kwargs)


def run_altered(wrong: Wrong, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    options = {"late": wrong.late, "reader": wrong.reader}
    run = Altered(wrong.node, wrong.alter, wrong.unrounded, **options)
    with run:
        run.external = {storage(t) for _, t in leaves((args, kwargs))}
        result = wrong.node(*args, **kwargs)
    wrong.times += run.times
    return result
