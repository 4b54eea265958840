"""What the CuTe DSL kernels share: the library, compiling one at a time, and compiling offline."""

import functools
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from optimized.gemv_engines import CUTE, CannotServe


class Library(NamedTuple):
    cutlass: ModuleType
    cute: ModuleType
    driver: ModuleType

    def stream(self, device: torch.device) -> Any:
        """PyTorch's current stream, as kernels are given it."""
        return self.driver.CUstream(torch.cuda.current_stream(device).cuda_stream)


_compiling = threading.Lock()  # the library compiles one kernel at a time, the tuner asks for many


@functools.cache
def library() -> Library:
    """nvidia-cutlass-dsl; ImportError without it."""
    import cuda.bindings.driver
    import cutlass
    import cutlass.cute

    return Library(cutlass, cutlass.cute, cuda.bindings.driver)


def compiled(start: Any, arguments: Sequence[Any], key: Any, options: str) -> Any:
    """The function that the library makes of the host code `start` for such arguments; `options`
    are its compiler's. Raises CannotServe, which names `key`."""
    with _compiling:
        try:
            return library().cute.compile(start, *arguments, options=options)
        except Exception as error:  # noqa: BLE001, the library's and LLVM's have no common class
            raise CannotServe(f"engine {CUTE!r} cannot compile {key}: {error}") from error


class CuteCase(NamedTuple):
    """One way to compile a kernel; offline, as `OfflineCase` is for Triton. `make` compiles
    `key` with the compiler's options."""

    kernel: str
    constexprs: Mapping[str, Any]
    num_warps: int
    shared_bytes: int
    key: Any
    make: Callable[[Any, str], Any]

    def binary(self, architecture: str) -> tuple[bytes, str]:
        """The cubin and the PTX for "sm_90" or another; CannotServe where it does not compile."""
        with tempfile.TemporaryDirectory() as folder:
            keep = f"--gpu-arch {architecture} --keep-ptx --keep-cubin --dump-dir {folder}"
            made = self.make(self.key, keep)
        return made.__cubin__, made.__ptx__.rstrip("\0")
