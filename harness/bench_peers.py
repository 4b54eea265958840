"""Our kernels against public ones for the same job: the same calls, in pairs, in CUDA graphs.

A job is a chain of calls (`bench_jobs`); what is reported is the time of one call. Our kernel is
timed against each peer that can be imported, against the region as PyTorch runs it (for a product,
that is cuBLAS) and as torch.compile makes it. The judge says how each rounds under our contract.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from harness.bench import ImpossibleTimeError, Step, compare, default_mode, smallest_effect
from harness.bench_jobs import (
    Job,
    call_side_by_side,
    ends_first,
    last_cache_bytes,
    record_jobs,
    target_of,
)
from harness.call_floors import CallFloors
from harness.cases import REFUSALS
from harness.ceilings import measure_ceilings
from harness.errors import UserError
from harness.record import Record
from harness.records import Ceilings, Paired
from harness.step import Mode
from harness.workload import Workload
from optimized.catalog import changes
from optimized.change import Change, apply_change, nodes, region_of, share
from optimized.compiled import compile_node
from optimized.peers.peer import Bound, Peer, peers
from optimized.plan import Plan, make_knobs

TORCH = "PyTorch"
COMPILED = "torch.compile"
IMPOSSIBLE = "impossible time"
FAILURES = (*REFUSALS, AssertionError, ImportError, OSError)

Call = Callable[[], Any]


class PeerError(Exception):
    """Why a peer could not be timed, on one line."""


@dataclass(frozen=True, kw_only=True)
class PeerRow(Record):
    """One of our kernels against one peer at so many rows; without figures `absent` says why."""

    region: str
    job: str
    shapes: str
    rows: int
    change: str  # ours: "name (backend)"
    peer: str
    ours_us: float | None  # of one call
    peer_us: float | None
    ratio: float | None  # peer / ours: above 1, ours is faster
    ratio_interval: tuple[float, float] | None  # 95%
    mde: float | None  # the smallest part of our time that this run could tell from none
    bytes: int | None  # that one call has to move
    read_share: float | None  # of the read bandwidth, by ours
    calls: int  # in a row
    absent: str | None
    note: str | None = None

    def __post_init__(self) -> None:
        if (self.ratio is None) != (self.absent is not None):
            raise ValueError(f"{self.peer}: either a ratio or a reason for its absence")

    @property
    def outcome(self) -> str:
        """ "faster", "slower" or "equal": what ours is beside the peer, beyond noise."""
        if self.ratio is None or self.ratio_interval is None or self.mde is None:
            return "-"
        low, high = self.ratio_interval
        if abs(self.ratio - 1) <= self.mde or low <= 1 <= high:
            return "equal"
        return "faster" if self.ratio > 1 else "slower"


@dataclass(frozen=True, kw_only=True)
class Ours:
    """One of our changes in a module tree of its own."""

    change: Change
    backend: str
    tree: nn.Module

    @property
    def label(self) -> str:
        return f"{self.change.name} ({self.backend})"


class PeerBench:
    """Times rows of peers until `deadline` (on `time.monotonic`); what is left says so.

    `plan` says which of our changes with which knobs; without one, each in the catalog that runs
    on the device, with its heuristic knobs. `against` names the peers by how their names begin.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        deadline: float,
        plan: Plan | None = None,
        cold_l2: bool = False,
        pair_s: float = 0.4,
        against: Sequence[str] = (),
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.workload, self.deadline = workload, deadline
        self.cold_l2, self.pair_s, self.note = cold_l2, pair_s, note
        self.device = workload.device
        self.mode: Mode = default_mode(self.device)
        self.against = tuple(against)
        self.peers = peers()
        self.absent = {p.name: p.absent(self.device.type) for p in self.peers}
        self.ours = list(self._ours(plan))
        self.floors = CallFloors(self.device)
        self.compiled = False

    @cached_property
    def ceilings(self) -> Ceilings:
        self.floors.ceilings = self.floors.ceilings or measure_ceilings(self.device)
        return self.floors.ceilings

    @property
    def spent(self) -> bool:
        return time.monotonic() > self.deadline

    def _ours(self, plan: Plan | None) -> Iterator[Ours]:
        lines = {line.name: line for line in plan.changes} if plan else {}
        known = [line.change() for line in lines.values()] if plan else changes().values()
        for change in known:
            fitting = [i.backend for i in change.implementations if self.device.type in i.devices]
            if not fitting or not nodes(self.workload.model, change.region):
                continue
            line = lines.get(change.name)
            knobs = make_knobs(change, line) if line else None
            backend, tree = line.backend if line else fitting[0], share(self.workload.model)
            apply_change(tree, change, backend, knobs)
            yield Ours(change=change, backend=backend, tree=tree)

    def rivals(self, region: str) -> list[Peer]:
        """What ours is timed against: PyTorch, torch.compile, and the libraries' functions.

        A region with others inside (a whole layer) is not compiled: that takes minutes for each
        shape, and the baselines are what shows it.
        """
        known = [universal(TORCH, region, lambda node: node.forward)]
        if not self._holds_others(region):
            known.append(universal(COMPILED, region, lambda node: compile_node(node, {})))
        known += [peer for peer in self.peers if peer.region == region]
        return [p for p in known if not self.against or p.name.startswith(self.against)]

    def _holds_others(self, region: str) -> bool:
        first = self.workload.model.get_submodule(nodes(self.workload.model, region)[0])
        compared = {ours.change.region for ours in self.ours}
        return any(region_of(m) in compared for m in first.modules() if m is not first)

    def rows(self, counts: Sequence[int]) -> Iterator[PeerRow]:
        """Every region at `counts` rows, the ends first."""
        cache = last_cache_bytes(self.device)
        regions = list(dict.fromkeys(ours.change.region for ours in self.ours))
        for count in ends_first(counts):
            chosen = target_of(count, self.workload)
            if self.spent:
                self.note(f"{chosen.describe()}: left out, the budget is spent")
                continue
            try:
                inputs = self.workload.inputs(chosen, seed=self.workload.seed)
                jobs = record_jobs(self.workload.model, regions, inputs, cache)
            except torch.OutOfMemoryError:
                self.note(f"{chosen.describe()}: left out, too large for the memory that is free")
                continue
            finally:
                inputs = None
            self.note(f"{chosen.describe()}: {len(jobs)} kinds of calls")
            if self.device.type == "cuda" and not self.compiled:
                self.compile(jobs)
            for job in jobs:
                for ours in self.ours:
                    if ours.change.region == job.region:
                        yield from self._job(job, ours, cache)
                job.calls.clear()  # a prefill's arguments are large

    def compile(self, jobs: Sequence[Job]) -> None:
        """Make one call of ours and of each library's function in `jobs`, in threads: some compile
        their kernels for most of a minute. What fails, fails again where it is timed."""
        self.note("  compiling what is not compiled yet, side by side")
        calls = list[Call]()
        for job in jobs:
            args, name = job.calls[0], job.names[0]
            mine = [o.tree for o in self.ours if o.change.region == job.region]
            calls += [_call(tree.get_submodule(name).forward, args) for tree in mine]
            for rival in self.rivals(job.region):
                if rival.name not in (TORCH, COMPILED) and self.absent.get(rival.name) is None:
                    calls.append(lambda job=job, rival=rival: next(self._bound(job, rival))())
        call_side_by_side(calls, self.deadline)
        self.compiled = True

    def _job(self, job: Job, ours: Ours, cache: int) -> Iterator[PeerRow]:
        mine = [ours.tree.get_submodule(name) for name in job.names]
        declined = getattr(mine[0], "declines", None)
        reason = declined(*job.calls[0]) if declined is not None else None
        note = f"the reference runs, our kernel declines: {reason}" if reason else None
        calls = 1 if self.cold_l2 else job.chain(cache)
        self.note(f"  {job.label} ({job.region}), {calls} calls in a row")
        chain = [_call(node.forward, args) for node, args in zip(mine, job.calls, strict=True)]
        rivals = self.rivals(job.region)
        try:
            step = self._step(chain, calls) if rivals else None
        except (*FAILURES, UserError) as error:
            for rival in rivals:
                yield self._row(job, ours, rival.name, None, calls, f"ours: {said(error)}", note)
            return
        if step is None:
            return
        with step:
            effect = None
            for rival in rivals:
                absent = self.absent.get(rival.name)
                if absent is None and self.spent:
                    absent = "the budget was spent before"
                pair = None
                if absent is None:
                    if effect is None:
                        options: Any = {"budget_s": self.pair_s, "cold_l2": self.cold_l2}
                        effect = smallest_effect(step, **options)
                    absent, pair = self._against(step, effect, job, rival, calls)
                    pair = pair if absent is None else None
                yield self._row(job, ours, rival.name, pair, calls, absent, note)

    def _against(
        self, step: Step, effect: float, job: Job, rival: Peer, calls: int
    ) -> tuple[str | None, Paired | None]:
        """Why there is no comparison, or the comparison: base is the rival, candidate is ours."""
        try:
            pair = self._compare(step, effect, list(self._bound(job, rival)), calls)
        except PeerError as error:
            return str(error), None
        return self._impossible(job, rival.name, pair, calls), pair

    def _impossible(self, job: Job, rival: str, pair: Paired, calls: int) -> str | None:
        """Why one of the two times cannot be: it is below what bytes and operations take."""
        node = self.workload.model.get_submodule(job.names[0])
        cached = 0 if self.cold_l2 else last_cache_bytes(self.device) // len(job.names)
        try:
            for whose, time_us in (("ours", pair.candidate_us), (rival, pair.base_us)):
                what = f"{whose}, one call of {job.label},"
                self.floors.require(node, job, what, time_us / calls, cached=cached)
        except ImpossibleTimeError as error:
            return f"{IMPOSSIBLE}: {error}"
        return None

    def _compare(self, step: Step, effect: float, theirs: Sequence[Call], calls: int) -> Paired:
        options: Any = {"budget_s": self.pair_s, "cold_l2": self.cold_l2}
        try:
            with self._step(theirs, calls) as base:
                return compare(base, step, effect, **options)
        except Exception as error:  # a library may raise anything
            raise PeerError(said(error)) from error

    def _bound(self, job: Job, rival: Peer) -> Iterator[Call]:
        for name, args in zip(job.names, job.calls, strict=True):
            node = self.workload.model.get_submodule(name)
            try:
                reason = rival.guard(node, *args) if rival.guard is not None else None
                bound = rival.bind(node, *args) if reason is None else None
            except Exception as error:  # a library may raise anything
                raise PeerError(said(error)) from error
            if bound is None:
                raise PeerError(f"declines: {reason}")
            yield bound.run

    def _step(self, chain: Sequence[Call], calls: int) -> Step:
        def run(_: torch.Tensor) -> Any:
            result = None
            for i in range(calls):
                result = chain[i % len(chain)]()
            return result

        return Step(run, (torch.empty(0, device=self.device),), self.mode)

    def _row(
        self,
        job: Job,
        ours: Ours,
        rival: str,
        pair: Paired | None,
        calls: int,
        absent: str | None,
        note: str | None,
    ) -> PeerRow:
        mine = None if pair is None else pair.candidate_us / calls
        share_ = None
        if mine is not None:
            share_ = job.nbytes / mine / 1e3 / self.ceilings.read_gb_per_s
        return PeerRow(
            region=job.region,
            job=job.label,
            shapes=job.shapes,
            rows=job.rows,
            change=ours.label,
            peer=rival,
            ours_us=mine,
            peer_us=None if pair is None else pair.base_us / calls,
            ratio=None if pair is None else 1 + pair.gain_us / pair.candidate_us,
            ratio_interval=None if pair is None else _ratios(pair),
            mde=None if pair is None else pair.mde_us / pair.candidate_us,
            bytes=job.nbytes,
            read_share=share_,
            calls=calls,
            absent=absent,
            note=note,
        )


def universal(name: str, region: str, forward: Callable[[nn.Module], Callable[..., Any]]) -> Peer:
    """A way to run any region, as a peer."""

    def bind(node: nn.Module, *args: Any) -> Bound:
        return Bound(run=_call(forward(node), args))

    both = "cpu", "cuda"
    return Peer(name=name, region=region, library="torch", bind=bind, devices=both)


def said(error: BaseException) -> str:
    """What went wrong, on one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Call:
    return lambda: function(*args)


def _ratios(pair: Paired) -> tuple[float, float]:
    ends = [1 + g / c for g in pair.gain_interval_us for c in pair.candidate_interval_us]
    return min(ends), max(ends)
