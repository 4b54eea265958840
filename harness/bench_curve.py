"""Step time against context, or against batch: the weights stay where they are, only caches change.

Beside each time stands what its bytes take at the measured bandwidth: the weights that the step
touches, each read once, and the cache.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from harness.bench import default_mode, time_step
from harness.bench_jobs import ends_first
from harness.ceilings import measure_ceilings
from harness.errors import UserError
from harness.floors import least_work
from harness.record import Record
from harness.records import Ceilings, Timing
from harness.step import Step
from harness.workload import StepInputs, Target, Workload, free_bytes

CONTEXTS = tuple(1 << n for n in range(10, 21))  # 1K to 1M tokens, batch 1
BATCHES = tuple(1 << n for n in range(9))  # 1 to 256 sequences
CONTEXT_OF_BATCHES = 8192
TOY = 64  # a toy's contexts are so much shorter
POINT_S = 1.0
REFERENCE = "reference"


@dataclass(frozen=True, kw_only=True)
class Point(Record):
    """One decode step of `model` ("reference" or the plan's name); `absent` says why no time."""

    model: str
    batch: int
    context: int
    step: Timing | None
    weight_bytes: int | None  # that the step touches
    kv_bytes: int
    weight_floor_us: float | None
    kv_floor_us: float
    absent: str | None

    def __post_init__(self) -> None:
        if (self.step is None) != (self.absent is not None):
            raise ValueError("a point has either a time or a reason for its absence")

    @property
    def floor_us(self) -> float | None:
        return None if self.weight_floor_us is None else self.weight_floor_us + self.kv_floor_us


def targets(kind: str, *, toy: bool) -> list[Target]:
    """The decodes of a curve, "context" or "batch", in the order in which they are measured."""
    scale = TOY if toy else 1
    if kind == "context":
        pairs = [(1, context // scale) for context in ends_first(CONTEXTS)]
    else:
        pairs = [(batch, CONTEXT_OF_BATCHES // scale) for batch in ends_first(BATCHES)]
    return [Target(name=f"b{b}-c{c}", batch=b, tokens=1, context=c) for b, c in pairs]


def curve(
    workload: Workload,
    models: dict[str, nn.Module],
    chosen: Sequence[Target],
    *,
    deadline: float,
    ceilings: Ceilings | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Iterator[Point]:
    """Each of `models`, which share their weights, at each target, until `deadline`.

    `models` maps a name to a module; the first is timed first, on the same cache.
    """
    bandwidth = (ceilings or measure_ceilings(workload.device)).read_gb_per_s * 1e3  # bytes per us
    for target in chosen:
        kv_bytes = workload.cache_bytes(target)
        empty = Point(
            model="",
            batch=target.batch,
            context=target.context,
            step=None,
            weight_bytes=None,
            kv_bytes=kv_bytes,
            weight_floor_us=None,
            kv_floor_us=kv_bytes / bandwidth,
            absent="the budget was spent before",
        )
        inputs: StepInputs | None = None
        weight_bytes: int | None = None
        for name, model in models.items():
            point = replace(empty, model=name)
            if time.monotonic() < deadline:
                note(f"{target.describe()}, {name}")
                try:
                    if inputs is None:
                        require_room(workload, target)
                        inputs = workload.inputs(target, seed=workload.seed)
                        weight_bytes = least_work(workload.model, inputs.args)[0]
                    found = _timed(model, inputs, workload.device)
                    point = replace(point, step=found, absent=None)
                except (UserError, torch.OutOfMemoryError) as error:
                    point = replace(point, absent=str(error).splitlines()[0])
            if weight_bytes is not None:
                floor = weight_bytes / bandwidth
                point = replace(point, weight_bytes=weight_bytes, weight_floor_us=floor)
            yield point
        del inputs
        free(workload.device)


def require_room(workload: Workload, target: Target) -> None:
    """UserError if the cache of `target` does not fit beside the weights, which are there."""
    needed, there = workload.cache_bytes(target), free_bytes(workload.device)
    if needed > there:
        raise UserError(
            f"a cache of {needed / 2**30:.1f} GiB does not fit: {there / 2**30:.1f} GiB are free"
        )


def _timed(model: nn.Module, inputs: StepInputs, device: torch.device) -> Timing:
    try:
        with Step(model, inputs, default_mode(device)) as step:
            return time_step(step, budget_s=POINT_S)
    finally:
        free(device)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
