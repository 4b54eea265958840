"""Fusion candidates found in a trace: what each region would gain as one kernel a call.

Every class of modules that launches kernels is a candidate; nothing here knows a model or a region.
A region's matrix products and attentions stay kernels of their own, except that products which
share an operand and do not wait for each other can be packed into one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.records import Ceilings, Record
from traces.kernels import KernelTable, bytes_us, floor_us
from traces.layers import as_outline
from traces.trace import Kernel, Trace


@dataclass(frozen=True, kw_only=True)
class Opportunity(Record):
    """What one region costs in a step, and what it could gain."""

    region: str
    node_count: int
    launches: int
    launches_saved: int
    bytes_saved: int  # of tensors that would no longer leave the kernel
    time_us: float  # of its kernels
    gap_us: float  # idle time between its kernels
    floor_us: float
    predicted_us: float  # gain a step; negative where a fused call would cost more
    bound_us: float  # gain a step if the region took only its floor
    contains: tuple[str, ...]  # regions whose calls happen inside this one's
    inside: tuple[str, ...]  # regions whose calls this one's happen in


def opportunities(
    rows: KernelTable, ceilings: Ceilings, model: Any, *, call_us: float | None = None
) -> list[Opportunity]:
    """All candidates, the largest predicted gain first.

    `rows` are those of `kernel_rows`, `model` is the traced module or its `Outline`. `call_us` is
    what calling a fused kernel costs on the host where that is part of the step; on a CPU it is
    measured unless given, on a GPU a kernel costs `ceilings.launch_us`.
    """
    trace = rows.trace
    if call_us is None:
        if trace.device == "cpu":
            from traces.overhead import compiled_call_us  # compiles a function, so only on demand

            call_us = compiled_call_us()
        else:
            call_us = ceilings.launch_us
    regions = {m.name: m.region for m in as_outline(model).modules}
    found = _Calls(trace, regions)
    scale = _unprofiled(trace)
    results = []
    for region, calls in found.by_region.items():
        parts = [_weigh(trace, kernels, ceilings, call_us, scale) for kernels in calls.values()]
        modules = {trace.calls[call].module for call in calls}
        floor = sum(p.floor_us for p in parts)
        now = sum(p.now_us for p in parts)
        bound = max(0.0, now - floor)
        results.append(
            Opportunity(
                region=region,
                node_count=len(modules),
                launches=sum(p.launches for p in parts),
                launches_saved=sum(p.launches_saved for p in parts),
                bytes_saved=sum(p.bytes_saved for p in parts),
                time_us=sum(p.time_us for p in parts),
                gap_us=sum(p.gap_us for p in parts),
                floor_us=floor,
                predicted_us=min(bound, now - sum(p.after_us for p in parts)),
                bound_us=bound,
                contains=tuple(sorted(found.contains[region])),
                inside=tuple(sorted(r for r, inner in found.contains.items() if region in inner)),
            )
        )
    return sorted(results, key=lambda o: -o.predicted_us)


class _Calls:
    """The kernels of each region's calls (a region inside itself counts once)."""

    def __init__(self, trace: Trace, regions: dict[str, str | None]) -> None:
        self.by_region: dict[str, dict[int, list[int]]] = {}
        self.contains: dict[str, set[str]] = {}
        for i, kernel in enumerate(trace.kernels):
            if not kernel.sure and kernel.ambiguous:
                continue
            outermost: dict[str, int] = {}
            inner: list[str] = []
            for call in trace.enclosing(kernel.call):
                region = regions.get(trace.calls[call].module)
                if region is None:
                    continue
                outermost[region] = call
                self.contains.setdefault(region, set()).update(r for r in inner if r != region)
                inner.append(region)
            for region, call in outermost.items():
                self.by_region.setdefault(region, {}).setdefault(call, []).append(i)


@dataclass(frozen=True, kw_only=True)
class _Weight:
    launches: int
    launches_saved: int
    bytes_saved: int
    time_us: float
    gap_us: float
    floor_us: float
    now_us: float  # kernels and the gaps between them, without what the profiler adds
    after_us: float


def _weigh(
    trace: Trace, members: Sequence[int], ceilings: Ceilings, call_us: float, scale: float
) -> _Weight:
    """One call: now, and as few kernels as can be."""
    kernels = [trace.kernels[i] for i in members]
    packs = _packs(kernels)
    private = _private(trace, members)
    segments = _segments(kernels, packs)
    saved = 0
    for value in private:
        users = [n for n, k in enumerate(kernels) if value in _values(k)]
        if len({segments[n] for n in users}) == 1:  # made and used in one fused kernel
            saved += sum(n for k in kernels for v, n in (*k.reads, *k.writes) if v == value)
    floor = _floor_us(kernels, private, ceilings)
    time_us = sum(k.time_us for k in kernels)
    gap_us = sum(k.gap_us for k in kernels[1:])
    heavy_us = 0.0
    for pack in packs:
        total = sum(kernels[n].time_us for n in pack)
        heavy_us += max(0.0, total * scale - (len(pack) - 1) * ceilings.launch_us)
    light = [k for k in kernels if not k.matmul]
    fused_us = heavy_us + _floor_us(light, private, ceilings)
    if trace.device == "cpu" or not packs:  # a CPU calls products from inside the fused call
        fused_us += call_us
    return _Weight(
        launches=len(kernels),
        launches_saved=len(kernels) - max(1, len(packs)),
        bytes_saved=saved,
        time_us=time_us,
        gap_us=gap_us,
        floor_us=floor,
        now_us=(time_us + gap_us) * scale,
        after_us=max(fused_us, floor),
    )


def _unprofiled(trace: Trace) -> float:
    """The share of the profiled time that is left without the profiler: gains are made there.

    Medians of single kernels are hardly disturbed by other work on the machine, whole steps are,
    so the fastest step is what they are held against.
    """
    profiled_us = sum(k.time_us + k.gap_us for k in trace.kernels)
    return min(1.0, trace.fastest_step_us / profiled_us) if profiled_us else 1.0


def _values(kernel: Kernel) -> Iterable[int]:
    return [value for value, _ in (*kernel.reads, *kernel.writes)]


def _packs(kernels: Sequence[Kernel]) -> list[list[int]]:
    """The matrix products and attentions, those packed together that share an operand and do not
    wait for anything that was made since the first of them."""
    packs: list[list[int]] = []
    for n, kernel in enumerate(kernels):
        if not kernel.matmul:
            continue
        mine = {value for value, _ in kernel.reads}
        for pack in packs:
            since = {v for k in kernels[pack[0] : n] for v, _ in k.writes}
            theirs = {v for m in pack for v, _ in kernels[m].reads}
            if mine & theirs and not mine & since:
                pack.append(n)
                break
        else:
            packs.append([n])
    return packs


def _private(trace: Trace, members: Sequence[int]) -> set[int]:
    """Values that the call makes itself and that nothing outside it touches."""
    own = set(members)
    inside = [trace.kernels[i] for i in members]
    made = {v for k in inside for v, _ in k.writes} - {*trace.given, *trace.outputs}
    for i, kernel in enumerate(trace.kernels):
        if i not in own and made:
            made -= set(_values(kernel))
    return made


def _segments(kernels: Sequence[Kernel], packs: Sequence[Sequence[int]]) -> list[int]:
    """Which fused kernel each one would join: with what it depends on, else with what needs it."""
    of_heavy = {n: s for s, pack in enumerate(packs, start=1) for n in pack}
    made_in: dict[int, int] = {}
    segments = [0] * len(kernels)
    for n, kernel in enumerate(kernels):
        level = max((made_in.get(v, 0) for v, _ in kernel.reads), default=0)
        segments[n] = of_heavy.get(n, level)
        made_in |= {v: segments[n] for v, _ in kernel.writes}
    for n in range(len(kernels) - 1, -1, -1):
        if segments[n] == 0 and packs:
            made = {v for v, _ in kernels[n].writes}
            users = [
                segments[m]
                for m in range(n + 1, len(kernels))
                if segments[m] and made & {v for v, _ in kernels[m].reads}
            ]
            segments[n] = min(users, default=1)
    return segments


def _floor_us(kernels: Sequence[Kernel], private: set[int], ceilings: Ceilings) -> float:
    """The least time of the call: what it must read and write outside itself, and its products."""
    touched: dict[tuple[int, str], int] = {}
    for kernel in kernels:
        for kind, accesses in (("read", kernel.reads), ("write", kernel.writes)):
            for value, count in accesses:
                key = value, kind
                if value not in private:
                    touched[key] = max(touched.get(key, 0), count)
    made = {value for value, kind in touched if kind == "write"}
    nbytes = sum(n for (v, kind), n in touched.items() if kind == "write" or v not in made)
    heavy = sum(
        floor_us(0, k.flops or 0, k.peak, ceilings) for k in kernels if k.matmul and k.costed
    )
    return max(bytes_us(nbytes, ceilings), heavy)
