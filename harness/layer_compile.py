"""torch.compile by layer kind: all layers that differ only in their numbers share one artefact.

Dynamo compiles a function again whenever a guard on its arguments fails, and a layer's float
attributes (a residual coefficient, say) are guarded: 52 layers would compile 52 times. Two things
prevent that. Each kind of layer, told by its structure and the shapes it is called with, has a
function of its own, so that nothing but its floats ever differs between calls. And before the
first real compilation Dynamo is shown, by traces that compile nothing, that those floats differ;
it makes them inputs of the graph from the start.
"""

import copy
import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from harness.trees import leaves

_serial = itertools.count()  # Dynamo's memory of what varied is by name, for the whole process


class LayerCompiler:
    """Compiles the layers of `model`, in place, each on its first call.

    A layer is an element of an outermost `nn.ModuleList`; a model without one is compiled whole.
    `options` go to torch.compile (mode, backend). `kinds` counts what was compiled. Set `call` to
    another word before the model is called with other shapes: looking at the shapes in every call
    would cost a toy layer a tenth of its time.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.options = options
        self.call = ""
        self.layers = outermost_layers(model) or [model]
        self.mates: dict[Any, list[nn.Module]] = {}
        for layer in self.layers:
            self.mates.setdefault(structure(layer), []).append(layer)
        self.compiled: dict[Any, Callable[..., Any]] = {}
        for layer in self.layers:
            layer.forward = self._forward(layer)  # type: ignore[method-assign]

    @property
    def kinds(self) -> int:
        return len(self.compiled)

    def _forward(self, layer: nn.Module) -> Callable[..., Any]:
        by_call: dict[str, Callable[..., Any]] = {}

        def forward(*args: Any, **kwargs: Any) -> Any:
            run = by_call.get(self.call)
            if run is None:
                run = by_call[self.call] = self._function(layer, args, kwargs)
            return run(layer, *args, **kwargs)

        return forward

    def _function(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any]:
        kind = structure(layer), call_shapes(args, kwargs)
        if kind not in self.compiled:
            function = _renamed(type(layer).forward, f"layer_kind_{next(_serial)}")
            other = self._with_other_floats(layer)
            if other is not None:
                trace_only = torch.compile(function, backend="eager")
                trace_only(layer, *args, **kwargs)
                trace_only(other, *args, **kwargs)
            self.compiled[kind] = torch.compile(function, **self.options)
        return self.compiled[kind]

    def _with_other_floats(self, layer: nn.Module) -> nn.Module | None:
        """A copy of `layer`, sharing its tensors, where every float that any of its kind has
        otherwise has another value; None if none has."""
        memo: dict[int, Any] = {id(t): t for t in (*layer.parameters(), *layer.buffers())}
        other: nn.Module | None = None
        own = _floats(layer)
        for mate in self.mates[structure(layer)]:
            for (path, name), value in _floats(mate).items():
                if value != own[path, name]:
                    other = copy.deepcopy(layer, memo) if other is None else other
                    setattr(other.get_submodule(path), name, value)
        return other


def outermost_layers(model: nn.Module) -> list[nn.Module]:
    """The elements of all module lists that no other module list contains, in order."""
    found: list[nn.Module] = []
    for child in model.children():
        found += child if isinstance(child, nn.ModuleList) else outermost_layers(child)
    return found


def structure(layer: nn.Module) -> Any:
    """What compiled code depends on besides numbers: classes, tensor layouts, flags and words."""
    return tuple(
        (
            path,
            type(module),
            tuple(
                (name, tuple(tensor.shape), tensor.dtype)
                for name, tensor in itertools.chain(
                    module.named_parameters(recurse=False), module.named_buffers(recurse=False)
                )
            ),
            tuple(
                (name, value)
                for name, value in vars(module).items()
                if isinstance(value, bool | str) and name != "training"
            ),
        )
        for path, module in layer.named_modules()
    )


def call_shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Shapes, strides and dtypes of all tensors that a call passes, wherever they are nested."""
    return tuple(
        (path, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        for path, tensor in leaves((args, kwargs))
    )


def _floats(layer: nn.Module) -> dict[tuple[str, str], float]:
    return {
        (path, name): value
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, float)
    }


def _renamed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A copy of `function` that Dynamo takes for another one: its own code object and name."""
    code = function.__code__.replace(co_name=name)  # type: ignore[attr-defined]
    copied = types.FunctionType(
        code,
        function.__globals__,  # type: ignore[attr-defined]
        name,
        function.__defaults__,  # type: ignore[attr-defined]
        function.__closure__,  # type: ignore[attr-defined]
    )
    copied.__kwdefaults__ = function.__kwdefaults__  # type: ignore[attr-defined]
    return copied
