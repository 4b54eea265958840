"""The profiler's events for Perfetto, with what we know of each kernel in its arguments."""

from collections.abc import Sequence
from typing import Any

from traces.kineto import Event
from traces.origins import Timed
from traces.trace import Kernel, Trace


def enriched(
    events: Sequence[Event], trace: Trace, timed: Sequence[Timed], device: str
) -> list[Event]:
    """`events` with module, region and source on the device's kernels; on a CPU, whose calls are
    several events each, with a track of its own that shows them by module."""
    if device == "cuda":
        for step in timed:
            if len(step.spans) != len(trace.kernels):
                continue
            for span, kernel in zip(step.spans, trace.kernels, strict=True):
                for event in span.events:
                    event.setdefault("args", {}).update(arguments(trace, kernel))
        return list(events)
    process = "kernelwright"
    origin = min((e["ts"] for e in events if "ts" in e), default=0.0)
    names = [
        {"ph": "M", "name": "process_name", "pid": process, "args": {"name": "calls by module"}},
    ]
    calls = [
        {
            "ph": "X",
            "cat": "call",
            "name": f"{kernel.name} ({trace.module(kernel)})",
            "pid": process,
            "tid": "one step, medians",
            "ts": origin + kernel.start_us,
            "dur": kernel.time_us,
            "args": arguments(trace, kernel),
        }
        for kernel in trace.kernels
    ]
    return [*events, *names, *calls]


def arguments(trace: Trace, kernel: Kernel) -> dict[str, Any]:
    return {
        "module": trace.module(kernel),
        "region": trace.region(kernel),
        "source": kernel.source,
        "operator": kernel.op,
        "bytes": kernel.bytes,
        "flops": kernel.flops,
        "ambiguous": kernel.ambiguous,
    }
