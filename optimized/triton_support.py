"""What every Triton kernel here shares: exact elementary functions, layout checks, the interpreter.

`INTERPRETED` says whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 when this module
is first imported), which executes them in NumPy on a CPU. Its conversions between FP32 and BF16
are wrong (seen in Triton 3.6 and 3.9): to BF16 it truncates, where every GPU rounds to nearest
even, and from BF16 it garbles denormals. Up to Triton 3.7 its fused multiply-add also rounds twice.
Importing this module corrects all three.

Rules for kernels: convert to FP32 before any arithmetic, round with `.to(tl.bfloat16)` wherever the
reference does, and start kernels with `launch`, under which no product and sum are fused.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from optimized.launches import observed

INTERPRETED: bool = knobs.runtime.interpret

# A product and a sum that the reference rounds apart must not become one fused multiply-add, which
# Triton <= 3.6 makes of them unless told otherwise.
EXACT: dict[str, Any] = {"enable_fp_fusion": False}

INTERPRETED_DOT = tl.constexpr(INTERPRETED)
LOG2_E_HIGH = tl.constexpr(1.4426950216293335)  # log2(e) rounded to FP32
LOG2_E_LOW = tl.constexpr(1.9259629911783190e-08)  # and what that lacks
EXP_STEP = tl.constexpr(0.0057249800302088261)  # log2(e) / 252


# Programmatic dependent launch needs a Hopper GPU or a later one.
DEPENDENT_SINCE = (9, 0)


class DependentLaunch:
    """Whether kernels start while the one before them still runs; `enabled` is for comparisons."""

    enabled = True

    @classmethod
    def active(cls) -> bool:
        return cls.enabled and not INTERPRETED and _can_launch_early()


@functools.cache
def _can_launch_early() -> bool:
    if torch.version.cuda is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= DEPENDENT_SINCE


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    num_warps: int,
    exact: bool = True,
    registers: int | None = None,
    **constexprs: Any,
) -> None:
    """Run `kernel` on `grid` with every rounding as written.

    `exact=False` lets the compiler fuse multiplications and additions: where all products are exact
    it changes nothing. A kernel with an argument `PDL` promises to call `previous_is_done` before
    it reads or writes anything but weights, and is started early where the GPU can. An argument
    `PRECISION` is how it multiplies operands that are TF32 already. A thread takes no more than
    `registers`, on NVIDIA's GPUs.
    """
    __tracebackhide__ = True  # a kernel is its caller's: a trace shows the line that calls this
    options: dict[str, Any] = dict(EXACT) if exact else {}
    if registers is not None and torch.version.hip is None:
        options["maxnreg"] = registers
    if "PDL" in kernel.arg_names:
        constexprs["PDL"] = DependentLaunch.active()
        if constexprs["PDL"]:
            options["launch_pdl"] = True
    if "PRECISION" in kernel.arg_names:
        constexprs["PRECISION"] = tf32_precision(hip=torch.version.hip is not None)
    with observed(kernel, arguments):
        kernel[grid](*arguments, **constexprs, num_warps=num_warps, **options)


def tf32_precision(*, hip: bool) -> str:
    """Of products whose operands are rounded to TF32: exact in FP32, too, where a GPU has no TF32
    units (AMD's since CDNA4)."""
    return "ieee" if hip else "tf32"


def prefetch_chunks(nbytes: int) -> int:
    """How many equal parts, multiples of 16 bytes, `nbytes` are prefetched in; at most 128."""
    chunks = 128
    while chunks and nbytes % (16 * chunks):
        chunks //= 2
    return chunks


class OfflineCase(NamedTuple):
    """One way to compile a kernel: `signature` names every argument's type ("*bf16", "i32", "fp32",
    "constexpr"), `constexprs` the values of the constexpr ones, `registers` `launch`'s limit."""

    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int
    registers: int | None = None


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Let the next kernel start as soon as all programs of this one have."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # pyright: ignore[reportAttributeAccessIssue]


@triton.jit
def previous_is_done(PDL: tl.constexpr):
    """Wait for all that earlier kernels write. Before it only weights may be read: a kernel starts
    when the one before it has started, so even that one's predecessor may still run."""
    if PDL:
        tl.extra.cuda.gdc_wait()  # pyright: ignore[reportAttributeAccessIssue]


@triton.jit
def begin(PDL: tl.constexpr):
    """The start of a kernel that reads no weights of its own."""
    let_next_start(PDL)
    previous_is_done(PDL)


@triton.jit
def loads_are_asked_for(PDL: tl.constexpr):
    """Keep the loads above this line before those below. NVIDIA's assembler moves a load down, to
    the next barrier or to its use: behind all that waits for other loads, so that one latency
    follows the other. A barrier holds it, and there is nothing to wait for at this one."""
    if PDL:
        tl.debug_barrier()


@triton.jit
def prefetch(pointer, BYTES: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr):
    """Ask for `BYTES` of weights from `pointer` on to come to the L2 cache."""
    if PDL:
        if CHUNKS > 0:
            SIZE: tl.constexpr = BYTES // CHUNKS
            start = tl.arange(0, CHUNKS).to(tl.int64) * SIZE + pointer.to(tl.int64)
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, $2;",
                "=r,l,r",
                [start, tl.full([CHUNKS], SIZE, tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def exp_fp32(x, PDL: tl.constexpr = False):  # pyright: ignore[reportArgumentType]
    """e^x in FP32 to 2 ULP, for any x; on an NVIDIA GPU the bits of CUDA's `expf`, as PyTorch's.

    `tl.exp` multiplies by log2(e) in one FP32 step, which at |x| = 10 costs 10 ULP. Where kernels
    start early (`PDL`), on NVIDIA's GPUs, two steps are one instruction each, and need fewer
    registers: a product and sum held within [0, 1], and one rounded down.
    """
    if PDL:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 t, n, r;
            .reg .b32 s;
            fma.rn.sat.f32 t, $1, 0f3BBB989D, 0f3F000000;
            fma.rm.f32 t, t, 0f437C0000, 0f4B400001;
            sub.rn.f32 n, t, 0f4B40007F;
            neg.f32 n, n;
            fma.rn.f32 r, $1, 0f3FB8AA3B, n;
            fma.rn.f32 r, $1, 0f32A57060, r;
            ex2.approx.ftz.f32 r, r;
            mov.b32 s, t;
            shl.b32 s, s, 23;
            mov.b32 t, s;
            mul.rn.f32 $0, r, t;
            }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    share = tl.minimum(tl.maximum(tl.fma(x, EXP_STEP, 0.5), 0.0), 1.0)
    power = tl.floor(share * 252.0)  # 126 more than the exponent, which is log2(e) x rounded down
    power = tl.where(tl.fma(share, 252.0, -power) < 0.0, power - 1.0, power) - 126.0
    rest = tl.fma(x, LOG2_E_LOW, tl.fma(x, LOG2_E_HIGH, -power))
    scale = ((power.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.exp2(rest) * scale


@triton.jit
def sigmoid_fp32(x, PDL: tl.constexpr = False):  # pyright: ignore[reportArgumentType]
    """1 / (1 + e^-x) in FP32 with IEEE division, as PyTorch computes it."""
    return tl.math.div_rn(1.0, 1.0 + exp_fp32(-x, PDL))


@triton.jit
def silu_fp32(x, PDL: tl.constexpr = False):  # pyright: ignore[reportArgumentType]
    """x / (1 + e^-x) in FP32 with IEEE division, as PyTorch computes it."""
    return tl.math.div_rn(x, 1.0 + exp_fp32(-x, PDL))


@triton.jit
def round_to_tf32(x):
    """FP32 values rounded to TF32's 10 mantissa bits, to nearest even; as FP32. Tensor cores cut
    the others off."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0xFFF + ((bits >> 13) & 1)) & -8192
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def dot_fp32(a, b, total):
    """total + a b of BF16 matrices on tensor cores, sums in FP32. The interpreter's BF16 products
    are wrong, so it gets FP32 ones; products of two BF16 values are exact there."""
    if INTERPRETED_DOT:
        return total + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, total)


def row_stride(x: Tensor, inner: int = 1) -> int | None:
    """Elements from one row of `x` to the next, where a row is its last `inner` dimensions.

    None unless every row is contiguous and all rows are equally far apart, as in a tensor that is
    a slice of the last dimension of a larger one.
    """
    dense = 1
    for size, stride in zip(reversed(x.shape[-inner:]), reversed(x.stride()[-inner:]), strict=True):
        if size != 1 and stride != dense:
            return None
        dense *= size
    step = following = None
    for size, stride in zip(reversed(x.shape[:-inner]), reversed(x.stride()[:-inner]), strict=True):
        if size == 1:
            continue
        if step is None:
            step = stride
        elif stride != following:
            return None
        following = stride * size
    return dense if step is None else step


def outside_domain(**tensors: Tensor) -> str | None:
    """Why a Triton kernel for BF16 cannot take these arguments, or None where it can."""
    for name, tensor in tensors.items():
        if tensor.dtype != torch.bfloat16:
            return f"{name} is {tensor.dtype}, the kernel takes torch.bfloat16"
        if not tensor.is_cuda and not INTERPRETED:
            return f"{name} is on {tensor.device}, the kernel runs on CUDA"
    return None


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """FP32 values to the bits of the nearest BF16 ones, ties to even; uint16, same shape."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def fma_fp32(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z of FP32 values, rounded once.

    The product is exact in FP64. The sum is rounded there to odd, so that no tie appears or is lost
    before the rounding to FP32.
    """
    product, addend = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    even = np.isfinite(total) & (lost != 0) & (total.view(np.int64) % 2 == 0)
    odd = np.nextafter(total, np.copysign(np.inf, lost))
    return np.where(even, odd, total).astype(np.float32)


def _correct_interpreter() -> None:
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def corrected(data, source, target, rounding_mode):
        toward_zero = rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ
        if source == tl.float32 and target == tl.bfloat16 and not toward_zero:
            return round_to_bf16(data)
        if source == tl.bfloat16 and target == tl.float32:
            return data.astype(np.uint32) << 16
        return convert(data, source, target, rounding_mode)

    interpreter._convert_float = corrected
    interpreter_conversion.append(convert)

    builder = interpreter.InterpreterBuilder
    fma = builder.create_fma

    def fused(self, x, y, z):
        if z.data.dtype != np.float32:
            return fma(self, x, y, z)
        return interpreter.TensorHandle(fma_fp32(x.data, y.data, z.data), z.dtype.scalar)

    builder.create_fma = fused


# The interpreter's own conversion, kept for the test that shows why it is replaced.
interpreter_conversion: list[Any] = []

if INTERPRETED:
    _correct_interpreter()
