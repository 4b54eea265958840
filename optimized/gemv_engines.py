"""What `optimized.gemv` may be computed by: the engines, which machine has which, what they take.

`triton` is `optimized.gemv`'s own kernel, `cutedsl` the one of `optimized.gemv_cute` in CuTe DSL,
`tinygemm` FlashInfer's for 1 to 8 rows, `library` what PyTorch calls. Each rounds once, from FP32
sums. An engine is a launch knob, so that the shape's measured time chooses it; without a plan
`GemvKnobs.heuristic` does. A library is imported, and its kernel compiled for a small product, when
its engine is first asked for.
"""

import contextlib
import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor

from optimized.launches import LibraryKernel, observed
from optimized.triton_support import DependentLaunch, row_stride

OWN = "triton"
CUTE = "cutedsl"
TINY = "tinygemm"
LIBRARY = "library"
ENGINES = (OWN, CUTE, TINY, LIBRARY)
LIBRARIES = {
    CUTE: ("cutlass", "nvidia-cutlass-dsl"),
    TINY: ("flashinfer.gemm", "flashinfer-python"),
}
SINCE = {CUTE: (8, 0), TINY: (9, 0)}  # compute capability
REGISTERS, SHARED = "registers", "shared"  # where the CuTe DSL kernel for one row holds weights
TINY_SINCE = "0.6.14"  # of FlashInfer, see `hangs`
BULK_COPIES = (9, 0)  # compute capability that copies rows to shared memory by itself

PIECE = 8  # weights that a thread loads at once, 16 bytes
TILE, TOKENS, CHUNK = 16, 8, 32  # rows of W, rows of x, columns of a step on tensor cores
MAX_PIECES = 40  # of a thread in registers, four each
HELD_BY_ALL = 320  # pieces times warps, for 65536 registers
MAX_TILED_ROWS = 64  # of W; 128 spill on sm_90
MAX_CHUNKS = 63  # of a warp: its loop over them is unrolled, and compiling more is slow
MAX_STATIC, MAX_DYNAMIC = 40_000, 200_000  # bytes of shared memory
MAX_CUTE_ROWS, MAX_TINY_ROWS = 16, 8  # of x


class CannotServe(ValueError):
    """Knobs with which an engine cannot be launched here."""


TINYGEMM = LibraryKernel("tinygemm_bf16", library="FlashInfer")


@functools.cache
def missing(engine: str) -> str | None:
    """Why `engine` cannot run on this machine, or None; imports its library and runs it once.

    ValueError if that first comes up while a CUDA graph is captured.
    """
    if engine == OWN:
        return None
    if not torch.cuda.is_available() or (torch.version.cuda is None and engine != LIBRARY):
        return "it needs a CUDA device"
    if engine == LIBRARY:
        return None
    module, package = LIBRARIES[engine]
    if capability() < SINCE[engine]:
        major, minor = SINCE[engine]
        return (
            f"it needs compute capability {major}.{minor}, this is {torch.cuda.get_device_name()}"
        )
    not_in_a_graph(engine)
    return (hangs() if engine == TINY else None) or unusable(module, package, lambda: _try(engine))


def hangs() -> str | None:
    """Why the installed FlashInfer's `tinygemm_bf16` must not be called, or None.

    Before 0.6.14 its consumers poll the barrier of a stage that was filled long ago: where loads
    are late it sums what is not there yet, or never ends (flashinfer-ai/flashinfer pull request
    3630). Both were seen with 0.6.13 on an H200 (2026-11-30).
    """
    _, package = LIBRARIES[TINY]
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None  # its import says more
    with contextlib.suppress(InvalidVersion, TypeError):
        if Version(found) >= Version(TINY_SINCE):
            return None
    return f"{package} {found} has a kernel that may hang; install {package}>={TINY_SINCE}"


def unusable(module: str, package: str, attempt: Callable[[], None]) -> str | None:
    """Why a library cannot be used on this machine, or None: imports it and makes one attempt."""
    try:
        importlib.import_module(module)
        attempt()
    except Exception as error:  # noqa: BLE001, whatever a library raises that does not fit here
        return f"{module} cannot be used ({first_line(error)}); install {package}"
    return None


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def capability() -> tuple[int, int]:
    """The current device's compute capability; (0, 0) without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def _try(engine: str) -> None:
    x, weight = (torch.zeros(n, 256, dtype=torch.bfloat16, device="cuda") for n in (1, 16))
    y = x.new_empty(1, 16)
    if engine == TINY:
        tinygemm(x, weight, y)
    else:
        from optimized import gemv, gemv_cute

        knobs = gemv.GemvKnobs(warps=1, rows=1, block=256, stages=1, engine=engine)
        gemv_cute.multiply(x, weight, y, knobs)
    torch.cuda.synchronize()


def takes(engine: str, shape: Mapping[str, int]) -> bool:
    """Whether `engine` computes products of M rows, O outputs and D inputs."""
    if engine == TINY:
        return 1 <= shape["M"] <= MAX_TINY_ROWS and not shape["O"] % 16 and not shape["D"] % 64
    if engine == CUTE:
        step = PIECE * 32 if shape["M"] == 1 else 2 * CHUNK
        return 1 <= shape["M"] <= MAX_CUTE_ROWS and not shape["D"] % step
    return True


def serves(engine: str, shape: Mapping[str, int]) -> bool:
    """Whether this machine has `engine` and it takes the shape."""
    return takes(engine, shape) and missing(engine) is None


def offered(shape: Mapping[str, int]) -> tuple[str, ...]:
    """The engines that serve the shape; our Triton kernel is first."""
    return tuple(e for e in ENGINES if serves(e, shape))


def check(engine: str) -> None:
    """ValueError in one line unless this machine has `engine`."""
    check_among(ENGINES, engine, missing)


def check_among(engines: Sequence[str], engine: str, missing: Callable[[str], str | None]) -> None:
    """ValueError in one line unless `engine` is one of `engines` and not `missing`."""
    if engine not in engines:
        raise ValueError(f"unknown engine {engine!r}; choose one of {', '.join(engines)}")
    if (reason := missing(engine)) is not None:
        raise ValueError(f"engine {engine!r} cannot run here: {reason}; or take engine {OWN!r}")


def not_in_a_graph(engine: str) -> None:
    """ValueError while a CUDA graph is captured: what a shape's first call makes outlives it."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"engine {engine!r} prepares a shape at its first call, which cannot be in a CUDA "
            "graph; make one call before the capture"
        )


def places(shape: Mapping[str, int]) -> tuple[str, ...]:
    """Where the CuTe DSL kernel can hold weights of this shape on this machine."""
    return (REGISTERS, SHARED)[: 2 if shape["M"] == 1 and capability() >= BULK_COPIES else 1]


def pieces(shape: Mapping[str, int], knobs: Any) -> int:
    """How many loads of 16 bytes a thread of the CuTe DSL kernel has in flight at most."""
    if shape["M"] == 1:
        return knobs.rows * shape["D"] // (PIECE * 32 * knobs.warps)
    chunks = min(shape["D"] // (CHUNK * knobs.warps), knobs.block // CHUNK)
    return knobs.rows // (TILE // 2) * chunks


def few_rows_shared(width: int, rows: int, warps: int, tiles: int) -> int:
    """Bytes of shared memory for `tiles` of 8 rows of x, and for the warps' sums after them."""
    return tiles * TOKENS * (2 * width + 4 * warps * rows)


def held_shared(width: int, rows: int) -> int:
    """Bytes for `rows` of W and one of x, and for a barrier each of W's."""
    return 2 * width * (rows + 1) + 8 * rows


def shared_bytes(shape: Mapping[str, int], knobs: Any) -> int:
    """Of a thread block of the CuTe DSL kernel: x, and sums of warps that share a row of W."""
    width = shape["D"]
    if shape["M"] > 1:
        return few_rows_shared(width, knobs.rows, knobs.warps, -(-shape["M"] // TOKENS))
    sharing = knobs.block // (32 * PIECE)
    sums = 4 * sharing * knobs.rows if sharing > 1 else 0
    return sums + (held_shared(width, knobs.rows) if knobs.hold == SHARED else 2 * width)


def cute_fits(shape: Mapping[str, int], knobs: Any) -> bool:
    """Whether a thread block of the CuTe DSL kernel shares out its work evenly and finds room.

    For one row of x the threads that share a row of W load `block` columns at a time; for more,
    `block` columns of a warp are in flight, the smallest power of two where all of them are.
    """
    width, warps, rows, block = shape["D"], knobs.warps, knobs.rows, knobs.block
    if not takes(CUTE, shape) or block < 2 * CHUNK or knobs.hold not in (REGISTERS, SHARED):
        return False
    shared = knobs.hold == SHARED
    if shape["M"] == 1:
        if block < PIECE * 32 or width % block or (PIECE * 32 * warps) % block:
            return False
        if rows % (PIECE * 32 * warps // block) or rows > 32 * warps:
            return False
    elif shared or rows % TILE or rows > MAX_TILED_ROWS or width % (CHUNK * warps):
        return False
    elif width // (CHUNK * warps) > MAX_CHUNKS:
        return False
    elif block > 2 * CHUNK and block >= 2 * width // warps:
        return False
    dynamic = shared or shape["M"] > 1
    if shared_bytes(shape, knobs) > (MAX_DYNAMIC if dynamic else MAX_STATIC):
        return False
    held = pieces(shape, knobs)
    return 1 <= held <= MAX_PIECES and (shared or held * warps <= HELD_BY_ALL)


def multiply(x: Tensor, weight: Tensor, y: Tensor, knobs: Any) -> None:
    """y [..., O] = x [..., D] times weight [O, D] transposed, by the engine of `knobs`, not ours.

    Rows of x that the engine cannot read where they are it gets in a copy.
    """
    if knobs.engine == LIBRARY:
        torch.matmul(x, weight.t(), out=y)
        return
    if weight.data_ptr() % 16:
        raise ValueError(f"engine {knobs.engine!r} takes a weight that is 16-byte aligned")
    if knobs.engine == TINY:
        tinygemm(x.reshape(-1, x.shape[-1]).contiguous(), weight, y.view(-1, y.shape[-1]))
        return
    from optimized import gemv_cute

    if (row_stride(x) or 1) % PIECE:
        x = x.contiguous()
    gemv_cute.multiply(x, weight, y, knobs)


def tinygemm(x: Tensor, weight: Tensor, y: Tensor) -> None:
    """y [M, O] = x [M, D] times weight [O, D] transposed by FlashInfer's kernel; all contiguous."""
    run = _tinygemm_bf16()
    bias = _zeros(weight.device, len(weight))
    with observed(TINYGEMM, (x, weight, y)):
        run(x, weight.detach(), y, bias, use_pdl=DependentLaunch.active())


@functools.cache
def _tinygemm_bf16() -> Any:
    from flashinfer.gemm import tinygemm_bf16

    return tinygemm_bf16


@functools.cache
def _zeros(device: torch.device, outputs: int) -> Tensor:
    """A bias; without one FlashInfer 0.6 fills such a tensor in every call, one kernel more."""
    not_in_a_graph(TINY)
    return torch.zeros(outputs, dtype=torch.bfloat16, device=device)
