"""The CuTe DSL engine of `optimized.routed_experts` for one token: what it takes, compiling and
launching its two kernels (`optimized.experts_cute_kernels`).

A kernel is compiled once for its sizes, knobs and dependent launch, and called with addresses
alone; it runs in PyTorch's current stream and may be captured in a CUDA graph.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimized import cute_support
from optimized.cute_support import CuteCase, library
from optimized.gemv_engines import (
    BULK_COPIES,
    CUTE,
    OWN,
    PIECE,
    capability,
    check_among,
    missing,
    not_in_a_graph,
)
from optimized.launches import observed
from optimized.triton_support import DependentLaunch

SHARING = 8  # threads on one row of an expert's down matrix
MAX_SLOTS, MAX_UP, MAX_DOWN = 32, 10, 16  # experts; pieces of x, and of hidden, in registers
SMS, MAX_SHARED = 132, 220_000  # of an H200, and bytes of shared memory on each
MAX_BLOCKS = 2  # on an SM; more have shorter rings each, and not more in flight


class Key(NamedTuple):
    """What a kernel is compiled for: `stages` and `programs` the first, `rows` the second."""

    slots: int
    width: int
    inner: int
    warps: int
    stages: int
    programs: int
    rows: int
    pdl: bool

    @property
    def constants(self) -> tuple[int, ...]:
        sizes = self.slots, self.width, self.inner
        if self.rows:
            return *sizes, self.rows, self.warps, self.pdl
        return *sizes, self.warps, self.stages, self.programs, self.pdl

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a thread block."""
        if self.rows:
            return down_shared(self.slots, self.inner, self.rows)
        rows = self.slots * self.inner
        return up_shared(rows, self.width, self.warps, self.stages, self.programs)


_compiled: dict[Key, Any] = {}


def up_shared(rows: int, width: int, warps: int, stages: int, programs: int) -> int:
    """Bytes for the rings, a barrier for each of their stages, and the warps' sums of all rows."""
    return stages * (4 * width + 8 * warps) + 8 * warps * -(-rows // programs)


def down_shared(slots: int, inner: int, rows: int) -> int:
    """Bytes for rows of all experts, a barrier, and what each expert gives to each row."""
    return slots * rows * (2 * inner + 4) + 8


def takes(shape: Mapping[str, int]) -> bool:
    """Whether the engine computes one token's experts of these sizes, whatever the knobs."""
    one = shape["P"] == shape["K"] and 1 <= shape["K"] <= MAX_SLOTS
    pieces = not shape["D"] % PIECE and not shape["F"] % PIECE
    return one and pieces and shape["F"] <= MAX_DOWN * SHARING * PIECE


def offered(shape: Mapping[str, int]) -> tuple[str, ...]:
    """The engines that this machine has and that take the shape; our Triton kernels are first."""
    if takes(shape) and capability() >= BULK_COPIES and missing(CUTE) is None:
        return OWN, CUTE
    return (OWN,)


def check(engine: str) -> None:
    """ValueError in one line unless this machine has `engine`."""
    check_among((OWN, CUTE), engine, _missing)


def _missing(engine: str) -> str | None:
    reason = missing(engine)
    if engine == CUTE and reason is None and capability() < BULK_COPIES:
        major, minor = BULK_COPIES
        name = torch.cuda.get_device_name()
        reason = f"the experts need compute capability {major}.{minor}, this is {name}"
    return reason


def fits(shape: Mapping[str, int], knobs: Any) -> bool:
    """Whether both kernels share out their work evenly and find room with these `ExpertsKnobs`."""
    slots, width, inner = shape["K"], shape["D"], shape["F"]
    warps, stages, programs = knobs.up_warps, knobs.up_stages, knobs.up_programs
    if not takes(shape) or min(warps, stages, programs, knobs.down_warps, knobs.down_rows) < 1:
        return False
    if width % (PIECE * warps) or -(-width // (PIECE * 32 * warps)) > MAX_UP:
        return False
    blocks = -(-programs // SMS)  # on an SM
    if blocks > MAX_BLOCKS or programs > slots * inner or max(warps, knobs.down_warps) > 32:
        return False
    if blocks * up_shared(slots * inner, width, warps, stages, programs) > MAX_SHARED:
        return False
    lines, rows = 32 * knobs.down_warps // SHARING, knobs.down_rows
    if lines % slots or rows % (lines // slots) or rows > min(width, 32 * knobs.down_warps):
        return False
    return down_shared(slots, inner, rows) <= MAX_SHARED


@functools.cache
def kernels() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Host code and kernel of both products; ImportError without the library."""
    library()
    from optimized import experts_cute_kernels as made

    return (
        (made.start_up, made.experts_up_cute_kernel),
        (made.start_down, made.experts_down_cute_kernel),
    )


def keys_of(shape: Mapping[str, int], knobs: Any, *, pdl: bool) -> tuple[Key, Key]:
    """Of both kernels; `knobs` are `ExpertsKnobs` that fit the shape."""
    sizes = shape["K"], shape["D"], shape["F"]
    up = knobs.up_warps, knobs.up_stages, knobs.up_programs, 0
    return Key(*sizes, *up, pdl), Key(*sizes, knobs.down_warps, 0, 0, knobs.down_rows, pdl)


def compiled(key: Key, options: str = "") -> Any:
    """The library's compiled function of the addresses of x, experts, up weights and hidden, or of
    hidden, weights, experts, down weights and the output, and the scale; then the stream.

    `options` are its compiler's. Raises CannotServe.
    """
    made = library()
    address, stream = made.cutlass.Int64(0), made.driver.CUstream(0)
    given = [address] * 5 + [made.cutlass.Float32(1.0)] if key.rows else [address] * 4
    arguments = *given, stream, *key.constants
    return cute_support.compiled(kernels()[key.rows > 0][0], arguments, key, options)


def compute(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    up: Tensor,
    down: Tensor,
    y: Tensor,
    scale: float,
    knobs: Any,
) -> None:
    """x [1, D] BF16, weights [1, K] FP32, experts [1, K] int64, up [E, 2 F, D], down [E, D, F] to
    y [1, D] BF16, in the current stream; rows contiguous, up and down 16-byte aligned."""
    slots, (width, inner) = experts.shape[1], down.shape[1:]
    if up.data_ptr() % 16 or down.data_ptr() % 16:
        raise ValueError(f"engine {CUTE!r} takes weights that are 16-byte aligned")
    x = x.clone() if x.data_ptr() % 16 else x
    hidden = x.new_empty((slots, inner))
    shape = {"K": slots, "D": width, "F": inner}
    keys = keys_of(shape, knobs, pdl=DependentLaunch.active())
    for key in keys:
        if key not in _compiled:
            not_in_a_graph(CUTE)
            _compiled[key] = compiled(key)
    stream = library().stream(x.device)
    calls = (x, experts, up, hidden), (hidden, weights, experts, down, y)
    for (_, kernel), key, tensors in zip(kernels(), keys, calls, strict=True):
        more = (scale,) if key.rows else ()
        with observed(kernel, tensors):
            _compiled[key](*(tensor.data_ptr() for tensor in tensors), *more, stream)


def cute_cases() -> list[CuteCase]:
    """Beam on one of eight tensor-parallel ranks; ImportError without the library."""
    up = Key(8, 5120, 320, warps=4, stages=5, programs=132, rows=0, pdl=True)
    down = Key(8, 5120, 320, warps=4, stages=0, programs=0, rows=8, pdl=True)
    return [
        CuteCase(kernel.__name__, key._asdict(), key.warps, key.shared, key, compiled)
        for (_, kernel), key in zip(kernels(), (up, down), strict=True)
    ]
