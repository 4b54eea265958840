"""The CuTe DSL engine of `optimized.gemv`: compiling and launching `optimized.gemv_cute_kernels`.

A kernel is compiled once for its width, knobs and dependent launch, and called with addresses and
sizes alone; it runs in PyTorch's current stream and may be captured in a CUDA graph.
"""

import functools
import tempfile
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimized.gemv_engines import CUTE, TOKENS, CannotServe, not_in_a_graph, shared_bytes
from optimized.launches import observed
from optimized.triton_support import DependentLaunch, row_stride


class Key(NamedTuple):
    """What a kernel is compiled for; `tiles` of 8 rows of x, none for a single row."""

    tiles: int
    width: int
    rows: int
    warps: int
    block: int
    pdl: bool


_compiled: dict[Key, Any] = {}
_compiling = threading.Lock()  # the library compiles one kernel at a time, the tuner asks for many


@functools.cache
def kernels() -> ModuleType:
    """`optimized.gemv_cute_kernels`; ImportError without the library."""
    from optimized import gemv_cute_kernels

    return gemv_cute_kernels


def key_of(shape: Mapping[str, int], knobs: Any, *, pdl: bool) -> Key:
    """`knobs` is a `GemvKnobs` that fits the shape."""
    tiles = 0 if shape["M"] == 1 else -(-shape["M"] // TOKENS)
    return Key(tiles, shape["D"], knobs.rows, knobs.warps, knobs.block, pdl)


def compiled(key: Key, options: str = "") -> Any:
    """The library's compiled function; `options` are its compiler's. Raises CannotServe."""
    module = kernels()
    with _compiling:
        try:
            return module.compiled(*key, options=options)
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
    module = kernels()
    stream = module.driver.CUstream(torch.cuda.current_stream(x.device).cuda_stream)
    places = x.data_ptr(), weight.data_ptr(), y.data_ptr()
    if key.tiles:
        with observed(module.few_rows_cute_kernel, (x, weight, y)):
            run(*places, outputs, row_stride(x), tokens, stream)
    else:
        with observed(module.gemv_cute_kernel, (x, weight, y)):
            run(*places, outputs, stream)


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

    module, found = kernels(), []
    for rows, knobs in (
        (1, GemvKnobs(warps=4, rows=2, block=1024, stages=1, engine=CUTE)),
        (8, GemvKnobs(warps=8, rows=16, block=1024, stages=2, engine=CUTE)),
    ):
        shape = {"M": rows, "O": 1792, "D": 5120}
        assert knobs.is_valid(shape)
        key = key_of(shape, knobs, pdl=True)
        kernel = module.few_rows_cute_kernel if key.tiles else module.gemv_cute_kernel
        values = {"D": key.width, "ROWS": key.rows, "BLOCK": key.block, "PDL": key.pdl}
        values |= {"TILES": key.tiles} if key.tiles else {}
        shared = shared_bytes(shape, warps=key.warps, rows=key.rows, block=key.block)
        found.append(CuteCase(kernel.__name__, values, key.warps, shared, key))
    return found
