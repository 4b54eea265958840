"""Captures one step: which kernels run, whose they are, what they must do, how long they take.

The step runs twice under torch.profiler. Once watched by `recorder`, which says what every launch
is for but slows the host; and a few times alone, in the way that is timed (eager, or a replayed
CUDA graph), which gives the times. `align` carries the origins from the first to the second.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from harness.records import Ceilings
from harness.step import HasArgs, Mode, Step
from traces import perfetto
from traces.assemble import assemble
from traces.kineto import Event
from traces.names import STEP
from traces.origins import read
from traces.outline import outline
from traces.recorder import Recorder, recording
from traces.trace import Trace, save

__all__ = ["Trace", "capture"]

WARM_UPS = 3  # the first steps set up libraries, compile kernels and fill caches
STEPS = {"cpu": 7, "cuda": 3}  # profiled; a host operator's time varies more than a kernel's
UNPROFILED = {"cpu": 20, "cuda": 5}


def capture(
    model: nn.Module,
    inputs: HasArgs | tuple[Any, ...],
    *,
    path: Path | None = None,
    mode: Mode = "eager",
    step: Callable[[], Any] | None = None,
    title: str = "",
    ceilings: Ceilings | None = None,
) -> Trace:
    """Trace `model(*inputs.args)`: the kernels of one step with module, source line and cost.

    `mode` is how the timed steps run; `step`, if given, is what runs one (an existing `Step`, so
    that no second graph is captured). `ceilings` go into the trace, for floors. With a `path` the
    trace is written there, in a form that Perfetto shows and `traces.trace.load` reads; its name
    should end in .json.gz.
    """
    args: tuple[Any, ...] = inputs if isinstance(inputs, tuple) else inputs.args
    eager = Step(model, args, "eager")
    device = eager.device
    for _ in range(WARM_UPS):
        eager()
    _wait(device)
    recorder, recorded = _record(model, args, device)
    own = Step(model, args, mode) if step is None and mode == "graph" else None
    timed_step = step or own or eager
    try:
        step_times_us = _step_times_us(timed_step, device)
        events = _profile(lambda: _run_steps(timed_step, device), device)
    finally:
        if own is not None:
            own.close()
    launches, timed = read(recorder, recorded, events, device.type)
    trace = assemble(
        recorder,
        launches,
        timed,
        outline=outline(model),
        device=device.type,
        mode=timed_step.mode if isinstance(timed_step, Step) else mode,
        step_times_us=step_times_us,
        title=title or type(model).__name__,
        ceilings=ceilings,
    )
    if path is not None:
        save(trace, path, perfetto.enriched(events, trace, timed, device.type))
    return trace


def _record(
    model: nn.Module, args: tuple[Any, ...], device: torch.device
) -> tuple[Recorder, list[Event]]:
    """The step once under the recorder, with the profiler's events."""
    recorders: list[Recorder] = []

    def watched() -> None:
        with recording(model) as recorder, torch.no_grad():
            recorders.append(recorder)
            with record_function(STEP):
                model(*args)
                _wait(device)

    events = _profile(watched, device)
    recorders[0].finish()
    return recorders[0], events


def _run_steps(step: Callable[[], Any], device: torch.device) -> None:
    for _ in range(STEPS[device.type] + 1):
        with record_function(STEP):
            step()
            _wait(device)


def _step_times_us(step: Callable[[], Any], device: torch.device) -> list[float]:
    """Steps without the profiler, each started on an idle device."""
    times = []
    for _ in range(UNPROFILED[device.type]):
        start = time.perf_counter_ns()
        step()
        _wait(device)
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times


def _profile(run: Callable[[], None], device: torch.device) -> list[Event]:
    """The events of `run()` in Chrome's format."""
    # Kineto announces each profile on stderr unless told otherwise before the first.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return json.loads(file.read_bytes())["traceEvents"]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
