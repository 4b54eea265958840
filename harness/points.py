"""The rounding points of a function, a module or a whole model, found by running it."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from harness.replay import Plan, Point, replay
from harness.steps import steps
from harness.workload import Workload

COLUMNS = (
    *("module", "rounding point", "operator", "shape", "dtype", "source", "interior"),
    *("read by", "count"),
)
STEPS = 2  # a prefill and the decode after it


def rounding_points(fn: Callable[..., Any], args: Sequence[Any]) -> list[Point]:
    """Every rounding point of `fn(*args)` in order; the arguments stay as they are."""
    return replay(fn, tuple(args), Plan(carry=None, name=True)).points


def points_for_model(workload: Workload) -> list[Point]:
    """The points of one prefill and one decode step; names tell the module first.

    A point that both steps pass is listed once, with the prefill's shape.
    """
    found: dict[str, Point] = {}
    for _, inputs in itertools.islice(steps(workload, workload.seed, sizes=False), STEPS):
        # The model writes to its cache for real, so that the decode follows the prefill.
        for point in rounding_points(workload.model, inputs.args):
            found.setdefault(point.name, point)
        workload.model(*inputs.args)
    return [replace(point, index=i) for i, point in enumerate(found.values())]


def points_table(points: Sequence[Point]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """COLUMNS and one row for each distinct point: layers are folded, with their count, and the
    modules that read it are all those of any layer."""
    counts: dict[tuple[str, ...], int] = {}
    readers: dict[tuple[str, ...], dict[str, None]] = {}
    for p in points:
        name = p.name.removeprefix(f"{p.module}: ")
        shape = " x ".join(map(str, p.shape))
        where = _folded(p.module), name, p.operator, shape, p.dtype, p.source
        row = *where, "yes" if p.interior else "no"
        counts[row] = counts.get(row, 0) + 1
        readers.setdefault(row, {}).update(dict.fromkeys(map(_folded, p.readers)))
    return COLUMNS, [(*row, ", ".join(readers[row]), str(n)) for row, n in counts.items()]


def _folded(module: str) -> str:
    """The module's name without the numbers of layers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", module)
