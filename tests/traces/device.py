"""Turns what the profiler saw on a CPU into what it sees on a GPU.

Each operator that moves memory launches one kernel, or as many as `kernels` says: a runtime event
inside the operator's range, and a device event with the same correlation that runs later. The
ranges around them are real; only the device is made up.
"""

from collections.abc import Callable, Sequence
from typing import Any

from traces.names import LAUNCH, OPERATOR, STEP, index_of
from traces.observed import Operator
from traces.recorder import Recorder

Event = dict[str, Any]
Kernel = tuple[str, float]  # name, duration in us
GAP_US = 0.5


def one_kernel(operator: Operator) -> list[Kernel]:
    """A kernel named after the operator, unless it is a view."""
    return [(f"void {operator.name}_kernel<4>(int)", 2.0)] if operator.work.writes else []


def eager_events(
    host: Sequence[Event],
    recorder: Recorder,
    kernels: Callable[[Operator], list[Kernel]] = one_kernel,
) -> list[Event]:
    """The events of a recorded step on a GPU; the device runs behind the host. A direct launch is
    one kernel of 3 us."""
    events = list(host)
    step = next(e for e in host if e["name"] == STEP)
    ranges = [e for e in host if e["name"].startswith((OPERATOR, LAUNCH)) and e["ph"] == "X"]
    clock = step["ts"] + 40.0
    for e in sorted(ranges, key=lambda e: e["ts"]):
        index, direct = index_of(e["name"]), e["name"].startswith(LAUNCH)
        own = [(recorder.launches[index].name, 3.0)] if direct else None
        for name, duration in own or kernels(recorder.operators[index]):
            correlation = len(events)
            launch = e["ts"] + e["dur"] / 2
            clock = max(clock, launch) + GAP_US
            events += launched(name, correlation, launch, clock, duration, e["tid"])
            clock += duration
    stretch(events, step, clock)
    return events


def replay_events(names: Sequence[Kernel], repeats: int = 3) -> list[Event]:
    """Replays of one CUDA graph: every kernel of a replay has the graph launch's correlation."""
    events: list[Event] = []
    clock = 1000.0
    for repeat in range(repeats):
        start = clock
        events.append(runtime("cudaGraphLaunch", repeat, clock + 1.0, 7))
        clock += 10.0
        for name, duration in names:
            kind = "gpu_memset" if name.startswith("Memset") else "kernel"
            events.append(device(name, repeat, clock, duration, kind))
            clock += duration + GAP_US
        step = {"ph": "X", "cat": "user_annotation", "name": STEP, "tid": 7}
        events.append({**step, "ts": start, "dur": clock - start + 1.0})
        clock += 5.0
    return events


def launched(
    name: str, correlation: int, launch: float, start: float, duration: float, tid: int
) -> list[Event]:
    return [
        runtime("cudaLaunchKernel", correlation, launch, tid),
        device(name, correlation, start, duration, "kernel"),
    ]


def runtime(name: str, correlation: int, ts: float, tid: int) -> Event:
    where = {"ph": "X", "cat": "cuda_runtime", "tid": tid, "ts": ts, "dur": 0.1}
    return {**where, "name": name, "args": {"correlation": correlation, "cbid": 211}}


def device(name: str, correlation: int, ts: float, duration: float, kind: str) -> Event:
    where = {"ph": "X", "cat": kind, "pid": 0, "tid": 7, "ts": ts, "dur": duration}
    return {**where, "name": name, "args": {"correlation": correlation, "stream": 7}}


def stretch(events: list[Event], step: Event, until: float) -> None:
    """Let the step's range end when the device has, as waiting for it does."""
    step["dur"] = max(step["dur"], until - step["ts"] + 1.0)
