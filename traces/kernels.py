"""The kernel table: what each kernel of a step takes and must do, and how far apart the two are."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from harness.records import Ceilings, KernelRow, StepBudget
from traces.budget import exposed_us, step_budget
from traces.trace import Kernel, Trace

By = Literal["kernel", "module", "region", "line"]
BY: tuple[By, ...] = ("kernel", "module", "region", "line")
NAMES_SHOWN = 3
BEYOND_MEMORY = (
    "Over 100% of the read bandwidth: part of the bytes came from a cache, or the trace is an older"
    " one, which books all bytes of a region on one of its kernels."
)
N = TypeVar("N", int, float)


class KernelTable(list[KernelRow]):
    """The rows of one step in launch order, and the trace that they come from."""

    def __init__(self, rows: Sequence[KernelRow], trace: Trace) -> None:
        super().__init__(rows)
        self.trace = trace

    @property
    def budget(self) -> StepBudget:
        """Where the step's time goes; see `traces.budget`."""
        return step_budget(self.trace, self)

    def summary(self) -> dict[str, Any]:
        """The trace's summary, with that."""
        return {**self.trace.summary(), "budget": self.budget.to_json()}


def kernel_rows(trace: Trace, ceilings: Ceilings | None = None) -> KernelTable:
    """One row for each kernel in launch order; floors need ceilings, the trace's own by default."""
    ceilings = ceilings or trace.ceilings
    shown = exposed_us(trace)
    rows = [
        KernelRow(
            name=kernel.name,
            module=trace.module(kernel),
            region=trace.region(kernel),
            source=kernel.source,
            calls=1,
            time_us=kernel.time_us,
            bytes=kernel.bytes,
            flops=kernel.flops,
            floor_us=None if ceilings is None else kernel_floor_us(kernel, ceilings),
            gap_us=kernel.gap_us,
            ambiguous=kernel.ambiguous,
            written=kernel.written,
            exposed_us=round(exposed, 3),
        )
        for kernel, exposed in zip(trace.kernels, shown, strict=True)
    ]
    return KernelTable(rows, trace)


def kernel_floor_us(kernel: Kernel, ceilings: Ceilings) -> float | None:
    """The least time for the kernel's bytes and operations, overlapped; None where unknown."""
    if kernel.bytes is None:
        return None
    return floor_us(kernel.bytes, kernel.flops or 0, kernel.peak, ceilings)


def floor_us(nbytes: int, flops: int, peak: str, ceilings: Ceilings) -> float:
    """The larger of bytes over bandwidth and operations over the peak of their dtype, in us."""
    tflop_per_s = ceilings.bf16_tflop_per_s if peak == "bf16" else ceilings.fp32_tflop_per_s
    return max(bytes_us(nbytes, ceilings), flops / tflop_per_s / 1e6)


def bytes_us(nbytes: int, ceilings: Ceilings) -> float:
    """The least time to move `nbytes`: at the better of the read and the copy bandwidth."""
    return nbytes / max(ceilings.read_gb_per_s, ceilings.copy_gb_per_s) / 1e3


def headroom(row: KernelRow) -> float | None:
    """How many times its floor the row takes; None where the floor is unknown or nothing."""
    return row.time_us / row.floor_us if row.floor_us else None


def beyond_memory(rows: Sequence[KernelRow], ceilings: Ceilings | None) -> bool:
    """Whether a row's bytes moved faster than the memory delivers any: see `BEYOND_MEMORY`."""
    if ceilings is None:
        return False
    return any((row.read_share(ceilings) or 0.0) > 1.0 for row in rows)


KEYS: dict[By, Callable[[KernelRow], str]] = {
    "kernel": lambda row: row.name,
    "module": lambda row: wildcard(row.module),
    "region": lambda row: row.region or "",
    "line": lambda row: row.source or "",
}


def aggregate(rows: Sequence[KernelRow], by: By = "kernel") -> list[KernelRow]:
    """The rows summed by kernel name, module (indices as *), region or line, longest first."""
    if by not in KEYS:
        raise ValueError(f"by is {by!r}; choose one of {', '.join(BY)}")
    groups: dict[str, list[KernelRow]] = {}
    for row in rows:
        groups.setdefault(KEYS[by](row), []).append(row)
    return sorted((_summed(group) for group in groups.values()), key=lambda row: -row.time_us)


def wildcard(module: str) -> str:
    """A module's name with the indices of its lists replaced: "layers.3.mlp" -> "layers.*.mlp"."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def _summed(rows: Sequence[KernelRow]) -> KernelRow:
    times: dict[str, float] = {}
    for row in rows:
        times[row.name] = times.get(row.name, 0.0) + row.time_us
    names = sorted(times, key=lambda name: -times[name])
    more = f", {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    modules = [row.module for row in rows]
    regions = {row.region for row in rows}
    sources = {row.source for row in rows}
    return KernelRow(
        name=", ".join(names[:NAMES_SHOWN]) + more,
        module=common(modules),
        region=regions.pop() if len(regions) == 1 else None,
        source=sources.pop() if len(sources) == 1 else None,
        calls=sum(row.calls for row in rows),
        time_us=sum(row.time_us for row in rows),
        bytes=_total([row.bytes for row in rows]),
        flops=_total([row.flops for row in rows]),
        floor_us=_total([row.floor_us for row in rows]),
        gap_us=_total([row.gap_us for row in rows]),
        ambiguous=any(row.ambiguous for row in rows),
        written=all(row.written for row in rows),
        exposed_us=_total([row.exposed_us for row in rows]),
    )


def _total(values: Sequence[N | None]) -> N | None:
    """The sum, or None where a part is unknown."""
    known = [v for v in values if v is not None]
    return sum(known[1:], known[0]) if known and len(known) == len(values) else None


def common(modules: Sequence[str]) -> str:
    """One name for several modules: * where they differ, cut where their depths do."""
    first, *others = sorted(set(modules), key=lambda m: (m.count("."), m))
    parts = first.split(".")
    for other in others:
        theirs = other.split(".")
        same = [a if a == b else "*" for a, b in zip(parts, theirs, strict=False)]
        parts = same
    while len(parts) > 1 and parts[-1] == "*" and len({m.count(".") for m in modules}) > 1:
        parts.pop()
    return ".".join(parts)
