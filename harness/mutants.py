"""Mutants: wrong variants of a region, derived from its rounding points and operators.

Nothing is written by hand for a model. Each interior rounding point gives one mutant that leaves
it out and one that moves it; each operator those of `harness.mutations` and `harness.precision`;
arguments, the constructor's integers and the outputs give some more.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.cases import REFUSALS, Case, activations
from harness.examine import NAMED
from harness.mutate import Call, Key, Wrong, forget, trace
from harness.mutations import SLIPS, in_bf16
from harness.operators import LOW
from harness.precision import PRECISION, REORDERED
from harness.region import RegionCases
from harness.replay import Point, named_arguments, replay
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


def derive_mutants(cases: RegionCases) -> list[Mutant]:
    """All mutants of the region, from the recorded calls of its nodes, in the operators' order."""
    numerics = cases.measured.contract.numerics
    words = {numerics} if isinstance(numerics, str) else set(numerics.values())
    found: dict[tuple[Any, ...], Mutant] = {}
    fixed = cases.measured.fixed
    for case in cases.recorded:
        node = cases.reference.get_submodule(case.node)
        args, kwargs = case.clones(fixed)
        calls = trace(node, args, kwargs)
        own = [c for c in calls if not _in_region(node, c.module)]
        made = [*_of_points(node, case, calls), *_of_operators(own)]
        made += [*_of_arguments(node, case, fixed), *_of_constructor(node)]
        made += [*_of_attributes(node)]
        made = [pair for pair in made if pair[0] in found or _computes(pair[1], node, case, fixed)]
        made += OUTPUTS
        forget(calls)
        for key, mutant in made:
            if mutant.kind != REORDERED or words == {"exact"}:
                found.setdefault(key, mutant)
    return list(found.values())


def _computes(mutant: Mutant, node: nn.Module, case: Case, fixed: set[int]) -> bool:
    """Whether a mutant with another size still runs: one that raises tests nothing."""
    if mutant.operator not in ("constructor", "attribute"):
        return True
    args, kwargs = case.clones(fixed)
    try:
        with torch.no_grad():
            mutant.build(node)(*args, **kwargs)
    except REFUSALS:
        return False
    return True


def _in_region(node: nn.Module, module: str) -> bool:
    """Whether a module below the node is, or is in, a named region of its own, where its operators
    are judged more sharply."""
    parts = module.split(".") if module else []
    above = (".".join(parts[: n + 1]) for n in range(len(parts)))
    return any(hasattr(type(node.get_submodule(name)), "region") for name in above)


Keyed = Iterator[tuple[tuple[Any, ...], Mutant]]


def _of_points(node: nn.Module, case: Case, calls: list[Call]) -> Keyed:
    """Each interior rounding point left out, and moved."""
    points = replay(node, case.args, NAMED, None, case.kwargs).points
    for point, call in pair_points(points, calls):
        if not point.interior:
            continue
        about = {"point": point.name, "operator": point.operator, "source": point.source}
        key = call.key
        yield (
            ("dropped", point.name),
            Mutant(
                kind="rounding dropped",
                what="FP32 goes to what uses it",
                build=lambda node, key=key: Wrong(node, {}, key),
                **about,
            ),
        )
        early = _earlier(call)
        if early is None:
            what, build = "after what uses it", _moved_late(key)
        else:
            what, build = f"before {early.called}", _moved_early(key, early)
        yield (
            ("moved", point.name),
            Mutant(kind="rounding moved", what=what, build=build, **about),
        )


def pair_points(points: Sequence[Point], calls: list[Call]) -> list[tuple[Point, Call]]:
    """Each rounding point with the traced operator that makes it: the n-th of its expression."""
    rounding: dict[str, list[Call]] = {}
    for call in calls:
        if call.rounds:
            rounding.setdefault(call.key.label, []).append(call)
    used: dict[str, int] = {}
    pairs = []
    for point in points:
        label = point.name.rpartition(" #")[0] or point.name
        if label not in rounding:
            label = point.name
        n = used.get(label, 0)
        used[label] = n + 1
        if n >= len(rounding.get(label, ())):
            raise RuntimeError(f"no operator makes the rounding point {point.name!r}")
        pairs.append((point, rounding[label][n]))
    return pairs


def _earlier(call: Call) -> Key | None:
    """The operator before whose operands the rounding may go instead: the rounding's own, or the
    one whose result it converts; None where nothing there is wider than the rounded dtype."""
    results = [u.result for u in call.users]
    if any(isinstance(r, Tensor) and r.dtype == torch.float32 for r in results):
        return None  # an FP32 result follows, where the rounding can go
    where = call
    if call.key.called == "_to_copy" and call.makers:
        where = call.makers[0]  # what computed it; views of that follow
    for operand in where.args:
        if isinstance(operand, Tensor) and operand.dtype == torch.float32:
            if not torch.equal(in_bf16(operand), operand):
                return where.key
        elif isinstance(operand, float) and in_bf16(operand) != operand:
            return where.key
    return None


def _moved_late(key: Key) -> Build:
    return lambda node: Wrong(node, {}, key, late=True)


def _moved_early(key: Key, early: Key) -> Build:
    def rounded(run: Any, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*map_tensors(in_bf16, tuple(map(in_bf16, args))), **kwargs)

    return lambda node: Wrong(node, {early: rounded}, key)


def _of_operators(calls: list[Call]) -> Keyed:
    """What can go wrong at each operator: at the first and the last of those in one place."""
    last: dict[tuple[str, str], int] = {}
    for call in calls:
        last[call.key.label, call.key.called] = call.key.nth
    for call in calls:
        if call.key.nth not in (0, last[call.key.label, call.key.called]):
            continue
        for slip in (*SLIPS, *PRECISION):
            for kind, what, alteration in slip(call):
                yield (
                    (kind, what.partition(" becomes")[0], *call.key),
                    Mutant(
                        kind=kind,
                        what=what,
                        point=call.key.label,
                        operator=call.key.called,
                        source=call.source,
                        build=lambda node, key=call.key, alteration=alteration: Wrong(
                            node, {key: alteration}
                        ),
                    ),
                )


def _of_arguments(node: nn.Module, case: Case, fixed: set[int]) -> Keyed:
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


def _of_constructor(node: nn.Module) -> Keyed:
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


def _of_attributes(node: nn.Module) -> Keyed:
    """Integers that the node keeps and its constructor does not name: one larger."""
    named = {key[1] for key, _ in _of_constructor(node)}
    for name, value in vars(node).items():
        if isinstance(value, bool) or not isinstance(value, int) or name.startswith("_"):
            continue
        if name not in named:
            mutant = Mutant(
                kind="integer off by one",
                what=f"{value} becomes {value + 1}",
                point=f"self.{name}",
                operator="attribute",
                source=_defined(node),
                build=_incremented(name),
            )
            yield ("attribute", name), mutant


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
