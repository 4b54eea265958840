"""What a device can do at most, measured: the yardstick of every floor.

Each figure is the best of several runs, not their median: a ceiling that noise lowers would call
honest times impossible.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.clock import Clock, quiet
from harness.environment import cpu_name
from harness.records import Ceilings
from harness.step import Step, default_mode
from reference.numerics import set_numerics

BUDGET_S = 0.4  # for each figure
AT_LEAST = 3  # runs of each figure
# Bytes of one buffer, far beyond any cache; width of a square GEMM that fills the device.
BUFFER = {"cuda": 2 << 30, "cpu": 256 << 20}
BF16_WIDTH = {"cuda": 8192, "cpu": 1024}
FP32_WIDTH = {"cuda": 4096, "cpu": 1024}
CHAIN = 1000  # smallest operations in a row


def measure_ceilings(device: torch.device) -> Ceilings:
    """Read and copy bandwidth, BF16 and FP32 matrix products, and the smallest operation.

    Takes about three seconds and, on CUDA, 4 GiB for a moment.
    """
    set_numerics()
    kind = device.type
    words = BUFFER[kind] // 4
    source = torch.ones(words, device=device)
    read_us = _best_us(torch.sum, source)
    copy_us = _best_us(torch.Tensor.copy_, torch.empty_like(source), source)
    del source
    ceilings = Ceilings(
        device_name=torch.cuda.get_device_name(device) if kind == "cuda" else cpu_name(),
        read_gb_per_s=BUFFER[kind] / read_us / 1e3,
        copy_gb_per_s=2 * BUFFER[kind] / copy_us / 1e3,
        bf16_tflop_per_s=_gemm_tflop_per_s(BF16_WIDTH[kind], torch.bfloat16, device),
        fp32_tflop_per_s=_gemm_tflop_per_s(FP32_WIDTH[kind], torch.float32, device),
        launch_us=_best_us(_chain, torch.zeros(1, device=device)) / CHAIN,
    )
    if kind == "cuda":
        torch.cuda.empty_cache()
    return ceilings


def floor_us(nbytes: int, flops: int, ceilings: Ceilings) -> float:
    """The least time, in us, for reading `nbytes` and computing `flops` in BF16, overlapped."""
    by_bytes = nbytes / ceilings.read_gb_per_s / 1e3
    by_flops = flops / ceilings.bf16_tflop_per_s / 1e6
    return max(by_bytes, by_flops)


def rows(ceilings: Ceilings) -> list[tuple[str, str]]:
    """(what, figure with its unit), for a table."""
    return [
        ("read bandwidth", f"{ceilings.read_gb_per_s:,.1f} GB/s"),
        ("copy bandwidth (read + write)", f"{ceilings.copy_gb_per_s:,.1f} GB/s"),
        ("BF16 matrix product", f"{ceilings.bf16_tflop_per_s:,.3f} TFLOP/s"),
        ("FP32 matrix product, no TF32", f"{ceilings.fp32_tflop_per_s:,.3f} TFLOP/s"),
        ("smallest operation (on a GPU a kernel in a graph)", f"{ceilings.launch_us:.2f} us"),
    ]


def _gemm_tflop_per_s(width: int, dtype: torch.dtype, device: torch.device) -> float:
    """Random operands: the power that a product draws, so its clock, depends on the values."""
    generator = torch.Generator(device).manual_seed(0)
    shape = width, width
    a, b = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in "ab")
    return 2 * width**3 / _best_us(torch.mm, a, b) / 1e6


def _chain(x: Tensor) -> None:
    for _ in range(CHAIN):
        x.add_(1)


def _best_us(function: Callable[..., Any], *args: Tensor) -> float:
    """The shortest of the runs that fit the budget, in us."""
    device = args[0].device
    with Step(function, args, default_mode(device)) as step, quiet():
        clock = Clock(device)
        clock.warm_up([step], limit_s=BUDGET_S)
        times: list[float] = []
        deadline = time.perf_counter() + BUDGET_S
        while len(times) < AT_LEAST or time.perf_counter() < deadline:
            times += clock.take([step])
    return min(times)
