"""Parts of a run as its reports see it: what was asked for, a step's kernels, the model's times."""

from dataclasses import dataclass, field
from typing import Any

from harness.records import Audit, KernelRow, Latency, StepBudget, Timing

KINDS = ("decode", "prefill")


@dataclass(frozen=True, kw_only=True)
class Header:
    """What the run was asked to do; `workload` describes the timed steps by "decode", "prefill"."""

    target: str
    model: str
    preset: str
    device: str  # "cpu" or "cuda"
    seed: int
    proposer: str
    options: dict[str, Any]
    workload: dict[str, str]
    note: str = ""  # what the preset says about itself
    stands_on: tuple[str, ...] = ()  # changes of the plan that the run began with

    @property
    def kind(self) -> str:
        """Which of KINDS the target is: what is traced, and what a change is kept for."""
        return self.target.partition("-")[0]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernels of one step of the target in launch order, and how far to trust the profile."""

    rows: tuple[KernelRow, ...]
    step_us: float | None  # the step unprofiled
    profiled_step_us: float | None
    attributed_share: float | None  # share of device time with a module and a source line
    budget: StepBudget | None = None  # where the step's time goes; older ledgers lack it
    compulsory_bytes: int | None = None  # what any implementation of the step must read


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The model as it stands, timed on its own; `name` is the change that was kept last, or ""."""

    name: str
    decode: Timing
    prefill: Timing
    other_targets: dict[str, Timing | str] = field(default_factory=dict)  # or why it has no figure
    pairs: Latency | None = None  # against the unchanged model, run as its candidates are
    audit: Audit | None = None  # of the very steps of `pairs`
