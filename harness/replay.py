"""Replays of a piece of a model: the same operators on the same route, rounded as one asks.

    first = replay(fn, args, NATIVE)                  every operator as it is: the reference itself
    rounded = replay(fn, args, ROUNDED, first)        FP32 values, rounded at every rounding point
    golden = replay(fn, args, GOLDEN, first)          FP64, no rounding
    elided = replay(fn, args, Plan(elide=...), first) every rounding but some

Integer and boolean results that depend on floating-point values are taken from the first run, so
that all variants follow its route.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from harness.naming import argument_names, result_names
from harness.policy import IN
from harness.trees import leaves


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Perturb what a correct implementation may do otherwise, drawn from `seed`.

    `reorder` permutes the order of reductions (products run on the library's own kernels), `ulp`
    moves transcendental functions by up to one unit of their FP32 result's last place. `kind` says
    how all products are computed (see `harness.noise.kinds`); None draws for each.
    """

    seed: int
    kind: int | None = None
    reorder: bool = True
    ulp: bool = True


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one replay carries and rounds values.

    `carry` is the dtype of the carried values; None runs every operator as it is. `elide` names
    rounding points that are left out, or uses of them, "POINT in MODULE": operators inside that
    submodule read the value before its rounding, all others the rounded one. `add` names roundings
    that the reference lacks (see `harness.added`), everywhere or "NAME in MODULE"; `fuse` names
    sums that a fused multiply-add computes. `name` collects the points, `record` also their values.
    """

    carry: torch.dtype | None = torch.float32
    rounds: bool = True
    elide: frozenset[str] = frozenset()
    add: frozenset[str] = frozenset()
    fuse: frozenset[str] = frozenset()
    noise: Noise | None = None
    name: bool = False
    record: bool = False

    def wide(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that arithmetic on tensors advertised as `dtype` runs in."""
        if self.carry is None or dtype == torch.float64:
            return dtype
        if dtype.is_complex:
            return torch.complex128 if self.carry == torch.float64 else torch.complex64
        return self.carry if dtype.is_floating_point else dtype


NATIVE = Plan(carry=None)
ROUNDED = Plan()
GOLDEN = Plan(carry=torch.float64, rounds=False)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One rounding point: a tensor that the model materialises in BF16 (or FP8).

    `interior` points feed further arithmetic; leaving one of the others out changes nothing, since
    results are stored in their dtype anyway. `added` marks an intermediate that the model does not
    round, where a candidate may. `readers` are the submodules that read it, where it is read in
    several places: each is a use that can be left out by itself.
    """

    name: str  # unique within the call
    operator: str
    module: str  # qualified name below the root, "" for the root itself
    source: str  # file:line
    shape: tuple[int, ...]
    dtype: str
    index: int  # order of execution
    interior: bool = True
    added: bool = False
    fused: bool = False  # the sum of a product, which an FMA would round once
    readers: tuple[str, ...] = ()

    @property
    def uses(self) -> list["Point"]:
        """The point at each of its uses alone, named "POINT in MODULE"."""
        return [replace(self, name=f"{self.name}{IN}{m}", readers=()) for m in self.readers]


@dataclass
class Choice:
    """A sort or top-k on floating-point values: where routes can flip.

    `values` [..., n] are what is ordered along the last dimension, `kept` how many of the first
    ones are used.
    """

    values: Tensor
    kept: int


@dataclass
class Run:
    """What one replay gave. `outputs` and `written` hold plain tensors by name, in their original
    dtype (FP64 in a golden replay)."""

    outputs: dict[str, Tensor]
    written: dict[str, Tensor]
    points: list[Point] = field(default_factory=list)
    wides: list[Point] = field(default_factory=list)
    fusable: list[Point] = field(default_factory=list)
    routes: list[Any] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    unspecified: dict[str, Tensor] = field(default_factory=dict)  # masks of `written`, first run
    values: list[Tensor] = field(default_factory=list)  # of the points
    varied: bool = False  # whether noise touched anything
    integers: dict[str, list[Tensor]] = field(default_factory=dict)  # that submodules returned

    @property
    def results(self) -> dict[str, Tensor]:
        return {**self.outputs, **self.written}


class _Engine(Protocol):
    routes: list[Any]


def replay(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    plan: Plan = ROUNDED,
    first: Run | None = None,
    kwargs: dict[str, Any] | None = None,
) -> Run:
    """Run `fn` (a module or a function) on `args`, which it cannot alter, as `plan` says.

    Routes come from `first`; without it this is the first run.
    """
    from harness.engine import Engine

    routes = None if first is None else first.routes
    engine = Engine(plan, routes, fn if isinstance(fn, nn.Module) else None)
    with torch.no_grad():
        carried = engine.adopt_tree((args, kwargs or {}))
        with engine.running():
            result = fn(*carried[0], **carried[1])
        outputs = named_results(fn, result)
        engine.note_results(outputs.values())
        arguments = named_arguments(fn, args, kwargs or {})
        return Run(
            outputs={name: engine.settle(t) for name, t in outputs.items()},
            written=engine.written(arguments),
            unspecified=engine.unspecified(arguments),
            points=engine.finished_points(),
            wides=engine.wides,
            fusable=engine.fusable,
            routes=engine.routes,
            choices=engine.choices,
            values=engine.recorded,
            varied=engine.noise is not None and engine.noise.used,
        )


def forward_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The Python function that names arguments and results: the class's forward for a module."""
    return type(fn).forward if isinstance(fn, nn.Module) else fn


def named_results(fn: Callable[..., Any], result: Any) -> dict[str, Tensor]:
    """The result's tensors by the name in `return a, b`, else by their place: "out[1]"."""
    names = result_names(forward_of(fn))
    found: dict[str, Tensor] = {}
    for path, tensor in leaves(result):
        name = f"out{path}"
        if names is not None:
            if not path and len(names) == 1:
                name = names[0] or name
            elif path.startswith("[") and path.count("[") == 1 and "." not in path:
                place = path.strip("[]")
                if isinstance(result, tuple) and place.isdigit() and int(place) < len(names):
                    name = names[int(place)] or name
        found[name if name not in found else f"out{path}"] = tensor
    return found


def named_arguments(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Tensor]:
    """The arguments' tensors by parameter name and path: "k_cache", "cache.k", "weights[1]"."""
    names, rest = argument_names(forward_of(fn))
    found: dict[str, Tensor] = {}
    for i, value in enumerate(args):
        if i < len(names):
            name = names[i]
        else:
            name = f"{rest or 'args'}[{i - len(names)}]"
        found.update(leaves(value, name))
    for name, value in kwargs.items():
        found.update(leaves(value, name))
    return found
