"""The CuTe DSL engine of `optimized.gemv`: compiling and launching its kernels.

A kernel is compiled once for its width, knobs and dependent launch, and called with addresses and
sizes alone; it runs in PyTorch's current stream and may be captured in a CUDA graph.
"""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from optimized import cute_support
from optimized.cute_support import CuteCase, library
from optimized.gemv_engines import (
    CUTE,
    SHARED,
    TOKENS,
    not_in_a_graph,
    shared_bytes,
)
from optimized.launches import observed
from optimized.triton_support import DependentLaunch, row_stride


class Key(NamedTuple):
    """What a kernel is compiled for; `tiles` of 8 rows of x, none for a single row, whose weights
    `shared` memory holds, or registers."""

    tiles: int
    width: int
    rows: int
    warps: int
    block: int
    shared: bool
    pdl: bool


_compiled: dict[Key, Any] = {}


@functools.cache
def kernels() -> tuple[tuple[Any, Any], ...]:
    """Host code and kernel for a row with weights in registers, in shared memory, and for a few
    rows; ImportError without the library."""
    library()
    from optimized import gemv_cute_kernels as one
    from optimized import gemv_cute_shared as other

    return (
        (one.start_row, one.gemv_cute_kernel),
        (other.start_row_shared, other.gemv_cute_shared_kernel),
        (one.start_few_rows, one.few_rows_cute_kernel),
    )


def code(key: Key) -> tuple[Any, Any]:
    """Host code and kernel of a key."""
    return kernels()[2 if key.tiles else key.shared]


def key_of(shape: Mapping[str, int], knobs: Any, *, pdl: bool) -> Key:
    """`knobs` is a `GemvKnobs` that fits the shape."""
    tiles = 0 if shape["M"] == 1 else -(-shape["M"] // TOKENS)
    shared = knobs.hold == SHARED
    return Key(tiles, shape["D"], knobs.rows, knobs.warps, knobs.block, shared, pdl)


def compiled(key: Key, options: str = "") -> Any:
    """A function of the addresses of x, w and y, the outputs, for a few rows also x's row stride
    and their number, and the stream. Raises CannotServe."""
    made = library()
    address, number = made.cutlass.Int64(0), made.cutlass.Int32(0)
    sizes = [number] * (3 if key.tiles else 1)
    constants = [key.width, key.rows, key.warps, key.block]
    constants += [key.tiles] if key.tiles else []
    arguments = *[address] * 3, *sizes, made.driver.CUstream(0), *constants, key.pdl
    return cute_support.compiled(code(key)[0], arguments, key, options)


def multiply(x: Tensor, weight: Tensor, y: Tensor, knobs: Any) -> None:
    """y [..., O] = x [..., D] times weight [O, D] transposed, all BF16, in the current stream.

    Rows of x are evenly spaced, all 16-byte aligned.
    """
    outputs, width = weight.shape
    tokens = x.numel() // width
    key = key_of({"M": tokens, "D": width}, knobs, pdl=DependentLaunch.active())
    if (run := _compiled.get(key)) is None:
        not_in_a_graph(CUTE)
        run = _compiled[key] = compiled(key)
    stream = library().stream(x.device)
    sizes = (outputs, row_stride(x), tokens) if key.tiles else (outputs,)
    with observed(code(key)[1], (x, weight, y)):
        run(x.data_ptr(), weight.data_ptr(), y.data_ptr(), *sizes, stream)


def cute_cases() -> list[CuteCase]:
    """The packed projections of TP8 ranks, of Beam for one row and for eight, of Muse Spark one;
    ImportError without the library."""
    from optimized.gemv_knobs import GemvKnobs, cute_starts

    found = []
    beam, muse = {"M": 1, "O": 1792, "D": 5120}, {"M": 1, "O": 2304, "D": 8192}
    row = GemvKnobs(**cute_starts(beam)[0], engine=CUTE)
    few = GemvKnobs(warps=8, rows=16, block=1024, stages=2, engine=CUTE)
    cases = (beam, row), (muse, row), (beam, replace(row, hold=SHARED)), ({**beam, "M": 8}, few)
    for shape, knobs in cases:
        assert knobs.is_valid(shape)
        key = key_of(shape, knobs, pdl=True)
        values = {"D": key.width, "ROWS": key.rows, "BLOCK": key.block, "PDL": key.pdl}
        values |= {"TILES": key.tiles} if key.tiles else {}
        shared = shared_bytes(shape, knobs)
        found.append(CuteCase(code(key)[1].__name__, values, key.warps, shared, key, compiled))
    return found
