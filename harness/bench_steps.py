"""A plan's steps beside the reference's: eager, in a CUDA graph, compiled, and with the changes.

torch.compile and the plan are timed in interleaved pairs, so that the plan is never said to be
ahead, or behind, by chance.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from torch import nn

from harness import baselines
from harness.bench import compare, default_mode, smallest_effect, time_step
from harness.bench_curve import free, require_room
from harness.ceilings import floor_us
from harness.errors import UserError
from harness.floors import least_work
from harness.record import Record
from harness.records import Ceilings, Paired, Timing
from harness.step import Mode, Step
from harness.workload import Target, Workload

EAGER, GRAPH, COMPILE, PLAN = "eager", "graph", "compile", "plan"
# torch.compile searches for the fastest products of a decode; for a prefill it takes cuBLAS's.
UNTUNED = "default"


@dataclass(frozen=True, kw_only=True)
class Way(Record):
    """One way to run a step; `absent` says why it has no time."""

    name: str
    step: Timing | None
    absent: str | None = None
    note: str | None = None

    def __post_init__(self) -> None:
        if (self.step is None) != (self.absent is not None):
            raise ValueError(f"{self.name}: either a time or a reason for its absence")


@dataclass(frozen=True, kw_only=True)
class StepFigures(Record):
    """All ways of one target; `pair` is torch.compile and the plan in turns.

    A decode's floor is its weights and its cache, each byte read once, at the measured bandwidth; a
    prefill's its products at the measured throughput. A toy, whose weights may stay in a cache, has
    none.
    """

    target: str
    described: str
    weight_floor_us: float | None
    kv_floor_us: float | None
    ways: tuple[Way, ...]
    pair: Paired | None

    @property
    def floor_us(self) -> float | None:
        if self.weight_floor_us is None:
            return None
        return self.weight_floor_us + (self.kv_floor_us or 0.0)


def figures(
    workload: Workload,
    target: Target,
    plan: nn.Module | None,
    *,
    seconds: float,
    ceilings: Ceilings | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> StepFigures:
    """Time `target`; `plan` is the model with its changes, on the same weights. Each timing takes
    `seconds`, what needs to be compiled longer. UserError if its cache does not fit."""
    require_room(workload, target)
    inputs = workload.inputs(target, seed=workload.seed)
    device = workload.device
    decode = target.kind == "decode"
    mode: Mode = default_mode(device) if decode else "eager"

    def timed(name: str, model: nn.Module, mode: Mode) -> Way:
        note(f"{target.describe()}, {name}")
        try:
            with Step(model, inputs, mode) as step:
                return Way(name=name, step=time_step(step, budget_s=seconds))
        except UserError as error:
            return Way(name=name, step=None, absent=str(error))
        finally:
            free(device)

    ways = [timed(EAGER, workload.model, "eager")]
    if decode and device.type == "cuda":
        ways.append(timed(GRAPH, workload.model, "graph"))
    elif decode:
        ways.append(Way(name=GRAPH, step=None, absent="a CPU has no CUDA graphs"))
    pair = None
    missing = baselines.missing_compiler() if device.type == "cpu" else None
    with ExitStack() as stack:
        compiled = with_plan = None
        if missing is not None:
            ways.append(Way(name=COMPILE, step=None, absent=missing))
        else:
            note(f"{target.describe()}, {COMPILE}")
            search = baselines.COMPILE_MODE[device.type] if decode else UNTUNED
            model, took_s, kinds = baselines.compile_layers(workload, search, inputs)
            compiled = stack.enter_context(Step(model, inputs, mode))
            said = f"{kinds} kind(s) of layer, mode {search!r}, compiled in {took_s:.0f} s"
            ways.append(Way(name=COMPILE, step=time_step(compiled, budget_s=seconds), note=said))
        if plan is not None:
            note(f"{target.describe()}, {PLAN}")
            with_plan = stack.enter_context(Step(plan, inputs, mode))
            ways.append(Way(name=PLAN, step=time_step(with_plan, budget_s=seconds)))
        if compiled is not None and with_plan is not None:
            effect = smallest_effect(with_plan, budget_s=seconds)
            pair = compare(compiled, with_plan, effect, budget_s=2 * seconds)
    weights, cache = None, None
    if ceilings is not None and not workload.toy:
        nbytes, operations = least_work(workload.model, inputs.args)
        weights = floor_us(nbytes, 0 if decode else operations, ceilings)
        cache = workload.cache_bytes(target) / ceilings.read_gb_per_s / 1e3 if decode else None
    return StepFigures(
        target=target.name,
        described=target.describe(),
        weight_floor_us=weights,
        kv_floor_us=cache,
        ways=tuple(ways),
        pair=pair,
    )
