"""Two changes with a known answer, offered to the keep rule in every run: it must refuse both.

The identity changes nothing; the slowed one computes the same and takes 3% of a step longer. Both
go the whole way: applied, judged, timed, decided.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from optimized.change import Change, Contract, Implementation

IDENTITY = "identity"
SLOWED = "slowed"
SLOWED_BY = 0.03
CYCLES_PER_PROBE = 1_000_000


def identity(region: str, device_type: str) -> Change:
    return _control(
        IDENTITY, region, device_type, "the reference itself", lambda node, _: node.forward
    )


def slowed(region: str, device: torch.device, step_us: float, node_count: int) -> Change:
    """The reference plus a delay in each of the region's nodes, 3% of a step in all."""
    wait = waiter(device, SLOWED_BY * step_us / node_count)

    def build(node: nn.Module, _knobs: Any) -> Callable[..., Any]:
        def forward(*args: Any) -> Any:
            wait()
            return node.forward(*args)

        return forward

    summary = f"the reference, made {SLOWED_BY:.0%} of a step slower"
    return _control(SLOWED, region, device.type, summary, build)


def _control(name: str, region: str, device_type: str, summary: str, build: Any) -> Change:
    return Change(
        name=f"control:{name}",
        region=region,
        summary=summary,
        contract=Contract(numerics="reduction"),
        implementations=(Implementation(backend="torch", devices=(device_type,), build=build),),
    )


def waiter(device: torch.device, delay_us: float) -> Callable[[], None]:
    """A function that keeps `device` busy for `delay_us`; a CUDA graph can capture it."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(CYCLES_PER_PROBE)  # the first launch loads the kernel
        start.record()
        torch.cuda._sleep(CYCLES_PER_PROBE)
        end.record()
        end.synchronize()
        cycles = round(delay_us * CYCLES_PER_PROBE / (start.elapsed_time(end) * 1e3))
        return lambda: torch.cuda._sleep(cycles)

    def spin() -> None:
        until = time.perf_counter_ns() + round(delay_us * 1e3)
        while time.perf_counter_ns() < until:
            pass

    return spin
