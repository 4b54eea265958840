"""The rounding points of a function, a module or a whole model, found by running it."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from harness.replay import Plan, Point, replay
from harness.steps import steps
from harness.workload import Workload

COLUMNS = "module", "rounding point", "operator", "shape", "dtype", "source", "interior", "count"
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
    """COLUMNS and one row for each distinct point: layers are folded, with their count."""
    folded: dict[tuple[str, ...], int] = {}
    for p in points:
        name = p.name.removeprefix(f"{p.module}: ")
        shape = " x ".join(map(str, p.shape))
        module = re.sub(r"\.\d+(?=\.|$)", ".*", p.module)
        row = module, name, p.operator, shape, p.dtype, p.source, "yes" if p.interior else "no"
        folded[row] = folded.get(row, 0) + 1
    return COLUMNS, [(*row, str(count)) for row, count in folded.items()]
