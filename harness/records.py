"""The records of a run, torch-free: what the ledger holds and what the reports read.

Records are frozen and keyword-only. A field exists only where it means something: what was not
measured is None, never a made-up number. Times are microseconds and say so in their names.
"""

import re
from dataclasses import dataclass, field
from enum import StrEnum

from harness.drift_record import Drift
from harness.record import Record
from optimized.domain import Domain

SCHEMA = 1
PART = re.compile(r"judged (\d+ of \d+) layers: ")  # a note of a verdict that is not on all


class Status(StrEnum):
    KEPT = "kept"  # judged, measured, faster
    REJECTED = "rejected"  # judged or measured, and refused
    FAILED = "failed"  # broke before a verdict


@dataclass(frozen=True, kw_only=True)
class Environment(Record):
    """What the figures were measured on."""

    device: str  # "cpu" or "cuda"
    device_name: str
    gpu_uuid: str | None
    driver: str | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    cpu_threads: int
    python: str
    torch: str
    triton: str | None
    cuda: str | None
    git_commit: str | None  # with "+dirty" where the tree had changes


@dataclass(frozen=True, kw_only=True)
class Timing(Record):
    """One thing timed on its own."""

    median_us: float
    interval_us: tuple[float, float]  # 95% bootstrap interval of the median
    samples: int


@dataclass(frozen=True, kw_only=True)
class Paired(Record):
    """A candidate timed against its base, in interleaved pairs."""

    base_us: float  # median of the base in these pairs
    candidate_us: float
    candidate_interval_us: tuple[float, float]
    gain_us: float  # median of base - candidate over the pairs
    gain_interval_us: tuple[float, float]  # 95% bootstrap interval
    mde_us: float  # smallest effect that A/A pairs of the same step can tell from none
    pairs: int
    base_interval_us: tuple[float, float] | None = None  # as the candidate's; older ledgers lack it

    @property
    def is_faster(self) -> bool:
        """Whether the gain is beyond the smallest detectable effect, and its interval above 0."""
        return self.gain_us > self.mde_us and self.gain_interval_us[0] > 0

    @property
    def is_slower(self) -> bool:
        """The same for a loss."""
        return self.gain_us < -self.mde_us and self.gain_interval_us[1] < 0


@dataclass(frozen=True, kw_only=True)
class Latency(Record):
    """What a change does to the model; decode and prefill are always measured."""

    decode: Paired
    prefill: Paired


@dataclass(frozen=True, kw_only=True)
class UlpReport(Record):
    """Candidate against the contract's replay for one output tensor, pooled over its cases."""

    output: str
    numerics: str  # "exact", "transcendental" or "reduction"
    elements: int
    bit_equal_share: float
    one_ulp_share: float
    worst_scaled: float  # largest |candidate - replay|, in BF16 ULPs of the row's largest |replay|
    histogram: dict[str, int]  # "0", "1", "2", "3-4", "5-8", ">8": elements at that ULP distance
    worst_index: tuple[int, ...] | None
    worst_values: tuple[float, float] | None  # candidate, replay
    noise_share: float  # share of elements that the reference's own self-noise changes
    allowed_share: float  # derived from noise_share; more differing elements fail
    golden_error: float  # ||c - g|| / ||g|| of the candidate
    reference_golden_error: float


@dataclass(frozen=True, kw_only=True)
class PointReport(Record):
    """One interior rounding point: what the contract says and what the candidate does."""

    point: str
    operator: str
    source: str  # file:line
    declared: str  # "kept", "elided" or "added"
    observed: str  # the same words, or "not visible" where both replays agree on all cases
    visible_share: float  # share of output elements that this rounding changes
    log_likelihood_ratio: float  # above 0: closer to the declared replay


@dataclass(frozen=True, kw_only=True)
class Flip(Record):
    """One row that was routed otherwise than the reference routes it."""

    where: str  # module and step
    output: str  # the submodule that chose, or the output's name
    row: int
    margin: float | None  # between the values of what each chose; None: the reference masks it out
    limit: float  # the most that noise explains; a larger margin fails

    @property
    def excess(self) -> float:
        """By how much the margin is above what noise explains; at most 0 for a near-tie."""
        return float("inf") if self.margin is None else self.margin - self.limit


@dataclass(frozen=True, kw_only=True)
class Routing(Record):
    """All choices that were compared; `flips` lists the largest margins first, and at most some."""

    rows: int
    flipped: int
    flips: tuple[Flip, ...] = ()

    @property
    def largest(self) -> Flip | None:
        """The flip whose margin is furthest from being a near-tie."""
        return self.flips[0] if self.flips else None


@dataclass(frozen=True, kw_only=True)
class Verdict(Record):
    """The numerical verdict on one change; it has a `reason` exactly when it did not pass."""

    scope: str  # "region" or "model"
    passed: bool
    reason: str | None
    cases: int
    seed: int
    outputs: tuple[UlpReport, ...]
    points: tuple[PointReport, ...]
    notes: tuple[str, ...] = ()
    routing: Routing | None = None
    drift: Drift | None = None
    targets: tuple[str, ...] = ()  # timed steps of which calls were to be judged, too
    domain: Domain | None = None  # the calls on which a region was judged; outside, it says nothing

    def __post_init__(self) -> None:
        if self.passed != (self.reason is None):
            raise ValueError("a verdict has a reason exactly when it did not pass")

    @property
    def layers(self) -> str:
        """Of a model's verdict: which of its layers were judged, in words."""
        found = next(filter(None, map(PART.match, self.notes)), None)
        return "every layer" if found is None else f"{found[1]} layers"


@dataclass(frozen=True, kw_only=True)
class Proposal(Record):
    """A change somebody thinks is worth trying, with what it should bring."""

    change: str  # name of a change in optimized/, or "inductor:<region>"
    region: str
    backend: str
    hypothesis: str
    launches_saved: int  # per step of the target
    bytes_saved: int  # per step of the target
    predicted_us: float  # gain per step of the target
    bound_us: float  # the gain if the region took only its floor
    node_count: int


@dataclass(frozen=True, kw_only=True)
class AuditedCall(Record):
    """The timed executable run once on inputs drawn afterwards, against its module; it has a
    `reason` exactly when they did not agree."""

    step: str  # "decode" or "prefill"
    when: str  # "among the timed calls" or "after timing"
    seed: int  # of the inputs
    compared_with: str  # what the module was run as
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class Clocks(Record):
    """One step timed from inside its stream and from outside, in turns."""

    inside_us: float
    outside_us: float  # slope of N and 2 N runs by another clock
    difference_us: float  # median of outside - inside
    spread_us: float  # what noise alone shows of that
    gap_us: float  # what starting a run may cost in one of the two
    reason: str | None  # why they cannot both be true


@dataclass(frozen=True, kw_only=True)
class Audit(Record):
    """Whether what was timed is what was judged, and took the time it seems to have taken."""

    calls: tuple[AuditedCall, ...]
    clocks: Clocks | None = None

    @property
    def reason(self) -> str | None:
        """The first thing that was wrong, or None."""
        for call in self.calls:
            if call.reason is not None:
                return f"{call.step}, {call.when}: {call.reason}"
        if self.clocks is not None and self.clocks.reason is not None:
            return self.clocks.reason
        return None


@dataclass(frozen=True, kw_only=True)
class Attempt(Record):
    """A change that was tried, and what came of it."""

    index: int
    name: str
    region: str
    backend: str
    status: Status
    reason: str
    predicted_us: float | None
    bound_us: float | None
    knobs: dict[str, dict[str, int | str | bool | float]]  # by shape, such as "D=5120,T=1"
    region_verdict: Verdict | None
    model_verdict: Verdict | None
    latency: Latency | None
    control: str | None  # "identity" or "slowed" for the loop's own controls, else None
    parent: str | None  # id of the last kept attempt
    seconds: float
    generated_source: str | None = None  # file in the run directory, for compiled regions
    audit: Audit | None = None
    spent_s: dict[str, float] = field(default_factory=dict)  # of its seconds, by what took them

    def __post_init__(self) -> None:
        passed = self.region_verdict is not None and self.region_verdict.passed
        if self.latency is not None and not passed:
            raise ValueError(f"{self.name}: a latency without a passed verdict")
        if self.status is Status.KEPT and self.latency is None:
            raise ValueError(f"{self.name}: kept without a latency")


@dataclass(frozen=True, kw_only=True)
class Baseline(Record):
    """One way to run the unchanged reference; `absent` says why it has no figures."""

    name: str  # "eager", "graph" or "compile"
    decode: Timing | None
    prefill: Timing | None
    absent: str | None
    note: str | None = None

    def __post_init__(self) -> None:
        if (self.decode is None) != (self.absent is not None):
            raise ValueError(f"baseline {self.name}: either times or a reason for their absence")


@dataclass(frozen=True, kw_only=True)
class KernelRow(Record):
    """One kernel of a step in launch order, or all its calls where `calls` > 1.

    On a CPU a kernel is one operator call and its time is that operator's self time.
    """

    name: str
    module: str  # qualified name in the model, "" for the model's own forward
    region: str | None
    source: str | None  # file:line of the Python line that launched it
    calls: int
    time_us: float  # sum over the calls
    bytes: int | None
    flops: int | None
    floor_us: float | None
    gap_us: float | None  # idle time before it, summed
    ambiguous: bool = False
    written: bool = False  # a kernel from optimized/, not a library's or the compiler's
    exposed_us: float | None = None  # until its end, of what no kernel before it covers

    def read_share(self, ceilings: "Ceilings") -> float | None:
        """The share of the read bandwidth at which its bytes moved in its own time."""
        if not self.bytes or not self.time_us:
            return None
        return self.bytes / self.time_us / 1e3 / ceilings.read_gb_per_s


@dataclass(frozen=True, kw_only=True)
class StepBudget(Record):
    """Where the time of one profiled step goes, each microsecond once: the four parts after
    `step_us` add up to it."""

    step_us: float  # from the first kernel's start to the last one's end
    bound_us: float  # what bytes and operations take at the ceilings
    gap_us: float  # nothing ran
    rest_us: float  # ramps, waiting for the kernel before, work beyond the floor
    unknown_us: float  # kernels whose bytes are not known
    hidden_us: float  # of kernels, while one before them still ran: not a part of the step
    kernels: int


@dataclass(frozen=True, kw_only=True)
class LayerMap(Record):
    """The kernels of one layer of each kind, in launch order."""

    kind: str  # "moe_sliding", ...: what tells this layer from others
    module: str
    kernels: tuple[KernelRow, ...]


@dataclass(frozen=True, kw_only=True)
class Ceilings(Record):
    """What this machine can do at most, measured."""

    device_name: str
    read_gb_per_s: float
    copy_gb_per_s: float
    bf16_tflop_per_s: float
    fp32_tflop_per_s: float
    launch_us: float  # one smallest kernel in a CUDA graph, or one operator call on a CPU
