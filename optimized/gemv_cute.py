"""The CuTe DSL engine of `optimized.gemv`: compiling and launching its kernels.

A kernel is compiled once for its width, knobs and dependent launch, and called with addresses and
sizes alone; it runs in PyTorch's current stream and may be captured in a CUDA graph.
"""

import functools
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimized.gemv_engines import (
    CUTE,
    SHARED,
    TOKENS,
    CannotServe,
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


class Kernels(NamedTuple):
    """What the library made of the device code; in `starts` and `kernels` for a row with weights in
    registers, in shared memory, and for a few rows."""

    cutlass: ModuleType
    cute: ModuleType
    driver: ModuleType
    kernels: tuple[Any, Any, Any]
    starts: tuple[Any, Any, Any]

    def kernel(self, key: Key) -> Any:
        return self.kernels[2 if key.tiles else key.shared]

    def compile(self, key: Key, options: str) -> Any:
        """A function of the addresses of x, w and y, the outputs, for a few rows also x's row
        stride and their number, and the stream."""
        cutlass = self.cutlass
        address, number = cutlass.Int64(0), cutlass.Int32(0)
        sizes = [number] * (3 if key.tiles else 1)
        constants = [key.width, key.rows, key.warps, key.block]
        constants += [key.tiles] if key.tiles else []
        start = self.starts[2 if key.tiles else key.shared]
        arguments = *[address] * 3, *sizes, self.driver.CUstream(0), *constants, key.pdl
        return self.cute.compile(start, *arguments, options=options)


_compiled: dict[Key, Any] = {}
_compiling = threading.Lock()  # the library compiles one kernel at a time, the tuner asks for many


@functools.cache
def kernels() -> Kernels:
    """The device code; ImportError without the library."""
    import cuda.bindings.driver
    import cutlass
    import cutlass.cute

    from optimized import gemv_cute_kernels as one
    from optimized import gemv_cute_shared as other

    return Kernels(
        cutlass,
        cutlass.cute,
        cuda.bindings.driver,
        (one.gemv_cute_kernel, other.gemv_cute_shared_kernel, one.few_rows_cute_kernel),
        (one.start_row, other.start_row_shared, one.start_few_rows),
    )


def key_of(shape: Mapping[str, int], knobs: Any, *, pdl: bool) -> Key:
    """`knobs` is a `GemvKnobs` that fits the shape."""
    tiles = 0 if shape["M"] == 1 else -(-shape["M"] // TOKENS)
    shared = knobs.hold == SHARED
    return Key(tiles, shape["D"], knobs.rows, knobs.warps, knobs.block, shared, pdl)


def compiled(key: Key, options: str = "") -> Any:
    """The library's compiled function; `options` are its compiler's. Raises CannotServe."""
    made = kernels()
    with _compiling:
        try:
            return made.compile(key, options)
        except Exception as error:  # noqa: BLE001, the library's and LLVM's have no common class
            raise CannotServe(f"engine {CUTE!r} cannot compile {key}: {error}") from error


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
    made = kernels()
    stream = made.driver.CUstream(torch.cuda.current_stream(x.device).cuda_stream)
    sizes = (outputs, row_stride(x), tokens) if key.tiles else (outputs,)
    with observed(made.kernel(key), (x, weight, y)):
        run(x.data_ptr(), weight.data_ptr(), y.data_ptr(), *sizes, stream)


class CuteCase(NamedTuple):
    """One way to compile a kernel; offline, as `OfflineCase` is for Triton."""

    kernel: str
    constexprs: Mapping[str, Any]
    num_warps: int
    shared_bytes: int
    key: Key

    def binary(self, architecture: str) -> tuple[bytes, str]:
        """The cubin and the PTX for "sm_90" or another; CannotServe where it does not compile."""
        with tempfile.TemporaryDirectory() as folder:
            keep = f"--gpu-arch {architecture} --keep-ptx --keep-cubin --dump-dir {folder}"
            made = compiled(self.key, keep)
        return made.__cubin__, made.__ptx__.rstrip("\0")


def cute_cases() -> list[CuteCase]:
    """The packed projection of a TP8 rank of Beam, for one row and for eight; ImportError without
    the library."""
    from optimized.gemv import GemvKnobs

    made, found = kernels(), []
    row = GemvKnobs(warps=4, rows=2, block=1024, stages=1, engine=CUTE)
    few = GemvKnobs(warps=8, rows=16, block=1024, stages=2, engine=CUTE)
    for rows, knobs in ((1, row), (1, replace(row, rows=4, hold=SHARED)), (8, few)):
        shape = {"M": rows, "O": 1792, "D": 5120}
        assert knobs.is_valid(shape)
        key = key_of(shape, knobs, pdl=True)
        values = {"D": key.width, "ROWS": key.rows, "BLOCK": key.block, "PDL": key.pdl}
        values |= {"TILES": key.tiles} if key.tiles else {}
        shared = shared_bytes(shape, knobs)
        found.append(CuteCase(made.kernel(key).__name__, values, key.warps, shared, key))
    return found
