"""Mutants around a node's operators: wrong arguments, wrong integers, wrong outputs."""

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.cases import REFUSALS, Case, activations
from harness.examine import NAMED
from harness.operators import LOW
from harness.replay import named_arguments, replay
from harness.trees import leaves, map_tensors

Build = Callable[[nn.Module], Callable[..., Any]]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A wrong variant: `build(node)` returns what is called in the place of the node's forward."""

    kind: str
    what: str
    point: str  # the expression that was altered
    operator: str
    source: str  # file:line
    build: Build

    def __str__(self) -> str:
        return f"{self.kind} at `{self.point}` [{self.operator}] ({self.source}): {self.what}"


Keyed = Iterator[tuple[tuple[Any, ...], Mutant]]  # what makes a mutant another one, and it


def computes(mutant: Mutant, node: nn.Module, case: Case, fixed: set[int]) -> bool:
    """Whether a mutant with another size still runs: one that raises tests nothing."""
    args, kwargs = case.clones(fixed)
    try:
        with torch.no_grad():
            mutant.build(node)(*args, **kwargs)
    except REFUSALS:
        return False
    return True


def of_arguments(node: nn.Module, case: Case, fixed: set[int]) -> Keyed:
    """Tables, indices and masks that are off by one along a dimension."""
    first = replay(node, case.args, NAMED, None, case.kwargs)
    own = activations(node, case, fixed, set(first.written))
    for name, tensor in named_arguments(node, case.args, case.kwargs).items():
        plain = tensor.untyped_storage()._cdata not in fixed and name not in first.written
        if not plain or id(tensor) in own or not tensor.numel() or tensor.dtype in LOW:
            continue
        for dim in range(tensor.ndim):
            if tensor.shape[dim] == 1:
                continue
            if not bool((tensor != tensor.roll(1, dim)).any()):
                continue
            mutant = Mutant(
                kind="argument off by one",
                what=f"along dimension {dim}",
                point=name,
                operator="argument",
                source=_defined(node),
                build=_rolled(name, dim),
            )
            yield ("argument", name, dim), mutant


def _rolled(name: str, dim: int) -> Build:
    def build(node: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = named_arguments(node, args, kwargs)
            paths = {id(t): path for path, t in given.items()}

            def roll(t: Tensor) -> Tensor:
                return t.roll(1, dim) if paths.get(id(t)) == name else t

            args, kwargs = map_tensors(roll, (args, kwargs))
            return node(*args, **kwargs)

        return forward

    return build


def of_constructor(node: nn.Module) -> Keyed:
    """The node as its class would build it with an integer one larger."""
    parameters = inspect.signature(type(node).__init__).parameters
    names = [n for n in parameters if n != "self"]
    given = {n: getattr(node, n, None) for n in names}
    if not names or not all(isinstance(v, (int, float, str, bool)) for v in given.values()):
        return
    for name, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        mutant = Mutant(
            kind="integer off by one",
            what=f"{value} becomes {value + 1}" if value is not None else "",
            point=f"{type(node).__name__}({name}={value})",
            operator="constructor",
            source=_defined(node),
            build=_rebuilt(name),
        )
        yield ("constructor", name), mutant


def of_attributes(node: nn.Module) -> Keyed:
    """Integers that the node keeps and its constructor does not name: one larger."""
    named = {key[1] for key, _ in of_constructor(node)}
    for name, value in vars(node).items():
        if isinstance(value, bool) or not isinstance(value, int) or name.startswith("_"):
            continue
        if name not in named and _reads(node, name):
            mutant = Mutant(
                kind="integer off by one",
                what=f"{value} becomes {value + 1}",
                point=f"self.{name}",
                operator="attribute",
                source=_defined(node),
                build=_incremented(name),
            )
            yield ("attribute", name), mutant


def _reads(node: nn.Module, name: str) -> bool:
    """Whether a method of the node's class reads `name`, beside those that make or describe it."""
    besides = "__init__", "extra_repr", "__repr__", "reset_parameters"
    methods = (f for f in vars(type(node)).values() if inspect.isfunction(f))
    return any(name in f.__code__.co_names for f in methods if f.__name__ not in besides)


def _incremented(name: str) -> Build:
    def build(node: nn.Module) -> Callable[..., Any]:
        wrong = copy.copy(node)
        setattr(wrong, name, getattr(node, name) + 1)
        return wrong.forward

    return build


def _rebuilt(name: str) -> Build:
    def build(node: nn.Module) -> Callable[..., Any]:
        names = [n for n in inspect.signature(type(node).__init__).parameters if n != "self"]
        given = {n: getattr(node, n) for n in names}
        with torch.device("meta"):
            made = type(node)(**{**given, name: given[name] + 1})
        wrong = copy.copy(node)
        for key, value in vars(made).items():
            if isinstance(value, (int, float)) and not key.startswith("_"):
                setattr(wrong, key, value)
        return wrong.forward

    return build


def _zeros(node: nn.Module) -> Callable[..., Any]:
    return lambda *args, **kwargs: _filled(node(*args, **kwargs), 0)


def _ones(node: nn.Module) -> Callable[..., Any]:
    return lambda *args, **kwargs: _filled(node(*args, **kwargs), 1)


def _filled(result: Any, value: int) -> Any:
    return map_tensors(lambda t: torch.full_like(t, value), result)


def _previous(node: nn.Module) -> Callable[..., Any]:
    kept: dict[tuple[Any, ...], Any] = {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        result = node(*args, **kwargs)
        shapes = tuple((t.shape, t.dtype) for _, t in leaves(result))
        before = kept.get(shapes, result)
        kept[shapes] = map_tensors(lambda t: t.clone(), result)
        return before

    return forward


def _output(kind: str, build: Build) -> tuple[tuple[Any, ...], Mutant]:
    about = {"what": "all outputs", "point": "return", "operator": "output", "source": ""}
    return ("output", kind), Mutant(kind=kind, build=build, **about)


OUTPUTS = (
    _output("output zeros", _zeros),
    _output("output constants", _ones),
    _output("output of the previous call", _previous),
)


def _defined(node: nn.Module) -> str:
    file = inspect.getsourcefile(type(node)) or "?"
    return f"{file.rpartition('/')[2]}:{inspect.getsourcelines(type(node))[1]}"
