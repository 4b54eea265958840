"""The layer map: what one layer of each kind launches, in order."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from harness.records import KernelRow, LayerMap
from traces.trace import Outline


def layer_map(rows: Sequence[KernelRow], model: Any) -> list[LayerMap]:
    """One map for each kind of layer, in the order of the first of each.

    `model` is the traced module, or its `Outline`. Layers are the elements of the model's outermost
    ModuleList. Their kind is what a layer's own `kind` says; without one, layers that launch the
    same kernels from the same modules are one kind, and kinds are numbered. The layer shown is the
    first of those that launch what most of their kind do.
    """
    outline = as_outline(model)
    kernels = {layer: rows_of(rows, layer) for layer in outline.layers}
    signatures = {layer: signature(own, layer) for layer, own in kernels.items()}
    kinds: dict[str, list[str]] = {}
    numbers: dict[Any, str] = {}
    for layer in outline.layers:
        kind = outline.by_name[layer].kind
        if kind is None:
            kind = numbers.setdefault(signatures[layer], str(len(numbers)))
        kinds.setdefault(kind, []).append(layer)
    maps = []
    for kind, layers in kinds.items():
        counts = Counter(signatures[layer] for layer in layers)
        # Of equally common ones the later: a first layer may also do what stands before it.
        usual = max(reversed(counts), key=lambda found: counts[found])
        shown = next(layer for layer in layers if signatures[layer] == usual)
        maps.append(LayerMap(kind=kind, module=shown, kernels=tuple(kernels[shown])))
    return maps


def as_outline(model: Any) -> Outline:
    if isinstance(model, Outline):
        return model
    from traces.outline import outline  # needs torch, which reading a trace file does not

    return outline(model)


def rows_of(rows: Sequence[KernelRow], module: str) -> list[KernelRow]:
    """The rows of a module and everything in it."""
    return [row for row in rows if row.module == module or row.module.startswith(f"{module}.")]


def signature(rows: Sequence[KernelRow], layer: str) -> tuple[tuple[str, str], ...]:
    """What a layer launches: equal for layers of one kind."""
    return tuple((row.module[len(layer) :], row.name) for row in rows)
