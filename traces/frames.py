"""A trace as typed pandas DataFrames, torch-free: its kernels, its layers, its tree of modules.

Times are microseconds. What is not known is <NA>: columns have pandas' nullable types.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from harness.records import Ceilings, KernelRow, LayerMap
from traces.kernels import KernelTable
from traces.trace import Outline

TEXT, REAL, WHOLE, TRUTH = "string", "Float64", "Int64", "boolean"
KERNELS = {
    "name": TEXT, "module": TEXT, "region": TEXT, "source": TEXT, "calls": WHOLE, "time_us": REAL,
    "exposed_us": REAL, "floor_us": REAL, "gap_us": REAL, "bytes": WHOLE, "flops": WHOLE,
    "read_share": REAL, "written": TRUTH, "ambiguous": TRUTH,
}  # fmt: skip
LAYERS = {"kind": TEXT, "layer": TEXT, "position": WHOLE, **KERNELS}
MODULES = {
    "module": TEXT, "class": TEXT, "region": TEXT, "depth": WHOLE, "kernels": WHOLE,
    "time_us": REAL, "gap_us": REAL, "share": REAL,
}  # fmt: skip


def kernels(rows: Sequence[KernelRow], ceilings: Ceilings | None = None) -> pd.DataFrame:
    """A row a kernel, or a sum of kernels: KERNELS; shares of bandwidth need ceilings."""
    return _frame(KERNELS, [_kernel(row, ceilings) for row in rows])


def layers(maps: Sequence[LayerMap], ceilings: Ceilings | None = None) -> pd.DataFrame:
    """The kernels of one layer of each kind in launch order: LAYERS."""
    found = [
        {"kind": m.kind, "layer": m.module, "position": i, **_kernel(row, ceilings)}
        for m in maps
        for i, row in enumerate(m.kernels, start=1)
    ]
    return _frame(LAYERS, found)


def modules(rows: KernelTable, outline: Outline | None = None) -> pd.DataFrame:
    """A row a module, in the model's order, with all that it and what is inside it launches:
    MODULES. Modules that launch nothing are left out; `share` is of the time of all kernels."""
    total = sum(row.time_us for row in rows)
    found = []
    for module in (outline or rows.trace.outline).modules:
        inside = f"{module.name}." if module.name else ""
        own = [r for r in rows if r.module == module.name or r.module.startswith(inside)]
        if own:
            us = sum(row.time_us for row in own)
            found.append({
                "module": module.name, "class": module.cls, "region": module.region,
                "depth": module.name.count(".") + bool(module.name), "kernels": len(own),
                "time_us": us, "gap_us": sum(row.gap_us or 0.0 for row in own),
                "share": us / total if total else 0.0,
            })  # fmt: skip
    return _frame(MODULES, found)


def _kernel(row: KernelRow, ceilings: Ceilings | None) -> dict[str, Any]:
    fields = {name: getattr(row, name) for name in KERNELS if hasattr(row, name)}
    return {**fields, "read_share": row.read_share(ceilings) if ceilings else None}


def _frame(columns: dict[str, str], rows: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(columns)).astype(columns)
