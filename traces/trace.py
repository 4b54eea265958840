"""What a trace is, torch-free: the kernels of one step, the module calls that launched them, and
the file they are kept in.

A trace file is one gzipped JSON object that Chrome and Perfetto open (`traceEvents`); our own
record stands in it under `KEY`, so that tables, layer maps and diffs need neither torch nor the
model.
"""

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.records import Ceilings, Record

KEY = "kernelwright"
SCHEMA = 1

Access = tuple[int, int]  # (value, bytes of it that are touched); a value is one tensor storage


@dataclass(frozen=True, kw_only=True)
class ModuleInfo(Record):
    """One module of the traced model."""

    name: str  # qualified, "" for the model itself
    cls: str
    region: str | None  # None for the model itself
    kind: str | None  # what the module calls itself among its siblings, if it does
    source: str | None  # file:line of its class's forward


@dataclass(frozen=True, kw_only=True)
class Outline(Record):
    """A model's modules in order, and which of them are its layers."""

    modules: tuple[ModuleInfo, ...]
    layers: tuple[str, ...]

    @cached_property
    def by_name(self) -> dict[str, ModuleInfo]:
        return {m.name: m for m in self.modules}


@dataclass(frozen=True, kw_only=True)
class Call(Record):
    """One call of a module's forward; `parent` is the index of the call that it happened in."""

    module: str
    parent: int | None
    opaque: bool = False  # its forward was replaced, so that its interior has no operators to see


@dataclass(frozen=True, kw_only=True)
class Kernel(Record):
    """One kernel in launch order, or one operator call on a CPU."""

    name: str
    op: str | None  # the operator that launched it
    call: int | None  # index of the innermost module call, None where nothing is known
    source: str | None
    start_us: float  # from the start of the step
    time_us: float
    gap_us: float  # idle time before it
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    flops: int | None
    costed: bool  # whether reads, writes and flops are known
    matmul: bool  # a matrix product or an attention: work that stays a kernel of its own
    peak: str  # which peak bounds its flops: "bf16" or "fp32"
    ambiguous: bool
    written: bool
    end_us: float | None = None  # of the very step whose `start_us` it is; `time_us` is a median

    @property
    def ends_us(self) -> float:
        return self.start_us + self.time_us if self.end_us is None else self.end_us

    @property
    def bytes(self) -> int | None:
        if not self.costed:
            return None
        return sum(n for _, n in self.reads) + sum(n for _, n in self.writes)

    @property
    def sure(self) -> bool:
        """Whether both the module and the source line are known beyond doubt."""
        return self.call is not None and self.source is not None and not self.ambiguous


@dataclass(frozen=True, kw_only=True)
class Trace(Record):
    """One step of a model, attributed."""

    device: str  # "cpu" or "cuda"
    mode: str  # "eager" or "graph"
    steps: int  # profiled steps; times are medians over them
    step_us: float  # one step without the profiler, median
    fastest_step_us: float  # the least disturbed of those
    profiled_step_us: float
    kernels: tuple[Kernel, ...]
    calls: tuple[Call, ...]
    given: tuple[int, ...]  # values that the step finds: weights, caches, inputs
    outputs: tuple[int, ...]  # values that the step returns
    outline: Outline
    title: str = ""
    ceilings: Ceilings | None = None
    must_read_bytes: int | None = None  # see `compulsory_bytes`; None in older traces

    def module(self, kernel: Kernel) -> str:
        """The innermost module that launched the kernel; "" for the model's own forward."""
        return "" if kernel.call is None else self.calls[kernel.call].module

    def region(self, kernel: Kernel) -> str | None:
        info = self.outline.by_name.get(self.module(kernel))
        return None if info is None else info.region

    def enclosing(self, call: int | None) -> Iterable[int]:
        """The call and all calls around it, innermost first."""
        while call is not None:
            yield call
            call = self.calls[call].parent

    @property
    def ambiguous(self) -> tuple[Kernel, ...]:
        return tuple(k for k in self.kernels if k.ambiguous)

    @property
    def compulsory_bytes(self) -> int:
        """Bytes that any implementation of the step must read: of each value that it is given, the
        most that one operator or replaced module call reads; in older traces, that one kernel does.
        It is a floor for other implementations where the step is the reference's."""
        if self.must_read_bytes is not None:
            return self.must_read_bytes
        given = set(self.given)
        touched: dict[int, int] = {}
        for kernel in self.kernels:
            for value, count in kernel.reads:
                if value in given:
                    touched[value] = max(touched.get(value, 0), count)
        return sum(touched.values())

    def summary(self) -> dict[str, Any]:
        """The step in figures: times in us, kernels, and the share of the time attributed."""
        total = sum(k.time_us for k in self.kernels)
        sure = sum(k.time_us for k in self.kernels if k.sure)
        return {
            "device": self.device,
            "mode": self.mode,
            "step_us": self.step_us,
            "profiled_step_us": self.profiled_step_us,
            "kernels": len(self.kernels),
            "kernel_us": total,
            "gap_us": sum(k.gap_us for k in self.kernels),
            "attributed_share": sure / total if total else 1.0,
            "ambiguous": len(self.ambiguous),
            "compulsory_bytes": self.compulsory_bytes,
        }


def save(trace: Trace, path: Path, events: Sequence[dict[str, Any]] = ()) -> None:
    """Write the trace and its Perfetto events; gzipped where the name ends in .gz."""
    content = {
        "schemaVersion": 1,
        "displayTimeUnit": "ns",
        "traceEvents": list(events),
        KEY: {"schema": SCHEMA, **trace.to_json()},
    }
    text = json.dumps(content, separators=(",", ":")).encode()
    try:
        path.write_bytes(gzip.compress(text, 6) if path.suffix == ".gz" else text)
    except OSError as error:
        raise UserError(
            f"cannot write the trace {path}: {error.strerror}; name another file or free space"
        ) from error


def load(path: Path) -> Trace:
    """Read a file that `save` wrote; UserError where it is anything else."""
    hint = "make one with: python -m traces capture -o FILE.json.gz"
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the trace {path}: {error.strerror}; {hint}") from error
    try:
        content = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (ValueError, EOFError, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is not a trace: neither JSON nor gzipped JSON; {hint}") from error
    found = content.get(KEY) if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise UserError(f"{path} has no {KEY!r} record, so another tool wrote it; {hint}")
    schema = found.pop("schema", None)
    if schema != SCHEMA:
        raise UserError(f"{path} has schema {schema}, this version reads {SCHEMA}; {hint}")
    try:
        return Trace.from_json(found)
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; {hint}") from error
