"""Where a step's time goes: memory, launch gaps, and the rest, each microsecond once. Torch-free.

Under dependent launch kernels overlap, so their times add up to more than the step. What a kernel
costs is its exposed time: from the end of all that came before it to its own end. Those add up to
the step exactly.
"""

from collections.abc import Sequence

from harness.records import KernelRow, StepBudget
from traces.trace import Kernel, Trace


def exposed_us(trace: Trace) -> list[float]:
    """Each kernel's time until its end that no kernel before it covers, the gap before it included.

    On a CPU operators run one after the other, so that is their own time and the gap.
    """
    if trace.device == "cpu":
        return [k.gap_us + k.time_us for k in trace.kernels]
    found: list[float] = []
    reached = min((k.start_us for k in trace.kernels), default=0.0)
    for kernel in trace.kernels:
        ends = max(reached, kernel.ends_us)
        found.append(ends - reached)
        reached = ends
    return found


def idle_us(trace: Trace) -> list[float]:
    """The part of each kernel's exposed time in which nothing ran."""
    if trace.device == "cpu":
        return [k.gap_us for k in trace.kernels]
    found: list[float] = []
    reached = min((k.start_us for k in trace.kernels), default=0.0)
    for kernel in trace.kernels:
        ends = max(reached, kernel.ends_us)
        found.append(min(max(0.0, kernel.start_us - reached), ends - reached))
        reached = ends
    return found


def step_budget(trace: Trace, rows: Sequence[KernelRow]) -> StepBudget:
    """The step in four parts; `rows` are those of `kernel_rows`, with floors.

    Of a kernel's exposed time, `bound_us` is what its bytes and operations take at the ceilings,
    at most all of it; `rest_us` is what remains: ramps, waiting for the kernel before, and work
    beyond its floor.
    """
    bound = rest = unknown = 0.0
    exposed, idle = exposed_us(trace), idle_us(trace)
    for row, shown, gap in zip(rows, exposed, idle, strict=True):
        busy = shown - gap
        if row.floor_us is None:
            unknown += busy
            continue
        bound += min(busy, row.floor_us)
        rest += max(0.0, busy - row.floor_us)
    total = sum(exposed)
    own = sum(_own_us(k, trace.device) for k in trace.kernels)
    return StepBudget(
        step_us=total,
        bound_us=bound,
        gap_us=sum(idle),
        rest_us=rest,
        unknown_us=unknown,
        hidden_us=max(0.0, own - (total - sum(idle))),
        kernels=len(trace.kernels),
    )


def _own_us(kernel: Kernel, device: str) -> float:
    return kernel.time_us if device == "cpu" else kernel.ends_us - kernel.start_us
