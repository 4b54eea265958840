"""One region compiled by torch.compile for all of its nodes, and called without Dynamo's guards.

Two costs of torch.compile matter here. Nodes that differ in a float attribute (a residual
coefficient per layer) would each be compiled: so float attributes become inputs of the graph. And
a call spends 12 us in Dynamo and its guards (two CPU cores, 2026-11-29, torch 2.13), as much as a
small region takes in eager mode: so the graph that Dynamo chose for one call is kept with that
call's sizes, and called directly when they come again.
"""

import copy
import functools
import inspect
import logging
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

log = logging.getLogger(__name__)

MAX_GRAPHS = 64  # of one region: shapes beyond what becomes dynamic on its own
PLAIN = Tensor, bool, int, float, str, type(None)  # calls of these alone need no Dynamo twice


class Called(NamedTuple):
    """One run of a generated graph."""

    graph: Any  # Inductor's CompiledFxGraph
    run: Callable[[list[Any]], Any]  # the generated code itself; empties the list it is given
    inputs: list[Any]
    outputs: tuple[Any, ...]


class Region:
    """The compiled forward of one module class; compiles a graph for a new kind of call.

    `options` are Inductor's. `sources` holds the code that Inductor generated, one text a graph.
    """

    def __init__(self, cls: type[nn.Module], options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        self.sources: list[str] = []
        self.called: Called | None = None
        code = _entry.__code__.replace(co_name=f"compiled_{cls.__name__}")  # its own compile cache
        entry = types.FunctionType(code, _entry.__globals__)
        self.entry = torch.compile(entry, fullgraph=True, backend=self._backend)

    def __call__(
        self, view: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[Any, Called | None]:
        """The result of view.forward(*args, **named), and the graph that computed it."""
        settings = torch._dynamo.config.patch(
            capture_scalar_outputs=True,
            recompile_limit=MAX_GRAPHS,
            accumulated_recompile_limit=MAX_GRAPHS * 16,
        )
        self.called = None
        with settings:
            result = self.entry(view, args, named)
        called, self.called = self.called, None
        return result, called

    def _backend(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def compile_inner(*args: Any, **kwargs: Any) -> Any:
            graph = compile_fx_inner(*args, **kwargs)
            self.sources.append(getattr(graph, "source_code", ""))
            self._record(graph)
            return graph

        # AOTAutograd's own cache would return a graph without passing through here.
        with config.patch(enable_autograd_cache=False):
            run: Any = compile_fx(module, inputs, compile_inner, config_patches=self.options)
        return run

    def _record(self, graph: Any) -> None:
        """Let every run of `graph` leave its inputs and outputs in `self.called`."""
        run = getattr(graph, "current_callable", None)
        if run is None:
            return

        def recorded(inputs: list[Any]) -> Any:
            given = list(inputs)
            outputs = run(inputs)
            self.called = Called(graph, run, given, tuple(outputs))
            return outputs

        graph.current_callable = recorded


def _entry(view: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    return view.forward(*args, **named)


@functools.cache
def region(cls: type[nn.Module], options: tuple[tuple[str, Any], ...]) -> Region:
    """The one `Region` of a module class; `options` as sorted items."""
    return Region(cls, dict(options))


@functools.cache
def _view_class(cls: type[nn.Module], floats: tuple[str, ...]) -> type[nn.Module]:
    """A subclass whose attributes `floats` are read from 0-d tensors, so that they are inputs."""

    def read(name: str) -> property:
        return property(lambda self: self._floats[name].item())

    return type(cls.__name__, (cls,), {name: read(name) for name in floats})


def view_of(node: nn.Module) -> nn.Module:
    """`node` with its float attributes turned into graph inputs; parameters stay the same."""
    floats = {name: value for name, value in vars(node).items() if type(value) is float}
    view = copy.copy(node)
    if floats:
        for name in floats:
            del vars(view)[name]
        # FP64, as Python's floats are; the graph rounds them to FP32 where eager mode does.
        values = {n: torch.tensor(v, dtype=torch.float64) for n, v in floats.items()}
        vars(view)["_floats"] = values
        view.__class__ = _view_class(type(node), tuple(sorted(floats)))
    return view


def compile_node(node: nn.Module, options: Mapping[str, Any]) -> Callable[..., Any]:
    """A function with the signature of `node.forward`, compiled together with `node`'s siblings.

    `node.forward` must be a function of its tensor arguments and of the node's parameters, buffers
    and float attributes; arguments may be written in place.
    """
    compiled = region(type(node), tuple(sorted(options.items())))
    view = view_of(node)
    known: dict[Any, Any] = {}
    signature = inspect.signature(node.forward)

    def forward(*args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():  # as a part of a larger region
            return node.forward(*args, **named)
        if named:
            bound = signature.bind(*args, **named)
            args, named = bound.args, bound.kwargs
            if named:  # of no position, or behind one that was left out
                return compiled(view, args, named)[0]
        if not all(isinstance(arg, PLAIN) for arg in args):
            return compiled(view, args, {})[0]
        key = tuple([_kind(arg) for arg in args]), torch.is_grad_enabled()
        replay = known.get(key)
        if replay is not None:
            return replay(args)
        before = _state(view)
        result, called = compiled(view, args, {})
        if called is not None and _state(view) == before:
            replay = _replay(view, args, result, called)
            if replay is not None:
                known[key] = replay
        return result

    forward.region = compiled  # type: ignore[attr-defined]
    return forward


def _kind(arg: Any) -> Any:
    """What a graph's validity depends on: a tensor's layout, anything else's value."""
    kind = type(arg)
    if kind is nn.Parameter:
        return id(arg)  # each replay keeps its parameters alive, so the id is not used again
    if kind is Tensor:
        return arg.shape, arg.stride(), arg.dtype, arg.device
    return kind, arg


def _state(view: nn.Module) -> list[Any]:
    """What a forward might rebind; a graph that did so is not called without Dynamo."""
    return [
        (name, id(value))
        for module in view.modules()
        for part in (vars(module), module._buffers)
        for name, value in part.items()
    ]


def _replay(
    view: nn.Module, args: tuple[Any, ...], result: Any, called: Called
) -> Callable[[tuple[Any, ...]], Any] | None:
    """A function of `args` that runs the generated code itself, or None where only Dynamo may.

    The graph's inputs are found by identity among the arguments; what is not there (parameters,
    float attributes, sizes) does not change while the arguments' layout stays. Ambiguity, nested
    arguments, and outputs that something else computes from the graph's are left to Dynamo.
    """
    position = {id(arg): i for i, arg in enumerate(args) if isinstance(arg, Tensor)}
    own = {id(t) for t in (*view.parameters(), *view.buffers())}
    repeated = len(position) != sum(isinstance(arg, Tensor) for arg in args)
    nested = any(isinstance(arg, list | tuple | dict) for arg in args)
    if repeated or nested or own & set(position):
        return None
    leaves, structure = pytree.tree_flatten(result)
    made = {id(value): i for i, value in enumerate(called.outputs)}
    if {id(leaf) for leaf in leaves} != set(made):
        return None
    held = {id(t) for t in vars(view).get("_floats", {}).values()} | own | set(position)
    if any(isinstance(v, Tensor) and id(v) not in held for v in called.inputs):
        return None
    values = [None if id(v) in position else v for v in called.inputs]
    slots = [(n, position[id(v)]) for n, v in enumerate(called.inputs) if id(v) in position]
    parameters = [arg for arg in args if isinstance(arg, nn.Parameter)]
    finish = _finish(result, [made[id(leaf)] for leaf in leaves], structure)
    graph, run = called.graph, called.run

    def call(args: tuple[Any, ...], parameters: Any = parameters) -> Any:
        inputs = values.copy()
        for n, i in slots:
            inputs[n] = args[i]
        if torch.autograd.profiler._is_profiler_enabled:
            return finish(graph(inputs))  # under its name in the trace
        return finish(run(inputs))

    return call


def _finish(result: Any, order: list[int], structure: pytree.TreeSpec) -> Callable[[Any], Any]:
    """How a graph's outputs become the region's result."""
    if isinstance(result, Tensor):
        only = order[0]
        return lambda outputs: outputs[only]
    if type(result) is tuple and structure.num_children == len(order):
        if order == list(range(len(order))):
            return tuple
        return lambda outputs: tuple([outputs[i] for i in order])
    return lambda outputs: pytree.tree_unflatten([outputs[i] for i in order], structure)
