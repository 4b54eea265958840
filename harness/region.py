"""A region's cases, prepared once, and any number of candidates judged on them.

All that depends on the reference and the contract alone is in the preparation: recorded and
derived calls, the contract's replays, noise, FP64 results, replays with one rounding flipped. For
one candidate the nodes are prepared one after the other and forgotten; for several they are kept.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from harness import bounds, verdicts
from harness.batches import batch_variance
from harness.cases import (
    REFUSALS,
    Axes,
    Case,
    activations,
    axes,
    derive,
    near_ties,
    record,
    results_of,
    storages,
)
from harness.examine import Examination, Prepared
from harness.explain import Sample
from harness.nodes import called_nodes, one_of_each, pick_nodes
from harness.noise import kinds
from harness.observe import Observed, checksums
from harness.operators import is_real
from harness.policy import Policy
from harness.records import Verdict
from harness.replay import NATIVE, replay
from harness.routes import Deviations, routing
from harness.spent import spent
from harness.steps import steps
from harness.tables import tables, vary
from harness.ties import exact_ties, shared, tied
from harness.workload import Workload, free_bytes, give_back
from optimized.change import Contract, nodes

MOST_FLIPS = 48  # replays of a node with one rounding flipped
EDGE_RUNS = 4  # noise replays of a derived case
SAMPLES = 3  # cases kept to explain a difference
CASE_SHARE = 64  # one recorded call may take 1/64 of the free memory
LARGEST_ON_HOST = 64 << 20  # bytes of one on a CPU
KEPT_SHARE = 64  # a case's replays are kept if they take less than 1/64 of what is free
GOLDEN_BYTES = 8  # of an element in FP64

More = Callable[[nn.Module, list[Case]], list[Case]]
Watch = Callable[[Prepared, Observed], None]


@dataclass
class NodeCases:
    """One node of the reference, its recorded calls, and all its cases with their replays."""

    name: str
    node: nn.Module
    calls: list[Case]
    prepared: list[Prepared]
    deviations: Deviations
    weighed: list[bool]  # whether roundings are told apart in that case


@dataclass(kw_only=True)
class RegionCases:
    """What candidates for one region are judged on; see `prepare` and `judge`."""

    reference: nn.Module
    names: list[str]
    derived_from: set[str]  # one node of each behaviour
    recorded: list[Case]
    seed: int
    runs: int  # noise replays of a typical case
    limit_bytes: int  # of one call's arguments
    keep: bool
    refusal: str | None  # why the policy refuses the contract
    measured: Examination  # of no candidate: its noise, names and notes
    kept: list[NodeCases] | None = None
    kills: Counter[str] = field(default_factory=Counter)  # by node and case
    deviations: dict[str, Deviations] = field(default_factory=dict)  # of sorted values, by node
    more: More | None = None  # cases for one candidate alone, of the first node

    @classmethod
    def prepare(
        cls,
        reference: nn.Module,
        region: str,
        contract: Contract,
        workload: Workload,
        seed: int,
        policy: Policy | None = None,
        *,
        keep: bool = True,
    ) -> "RegionCases":
        """Record the calls of the region's nodes in prefills and decodes drawn from `seed`.

        The policy is the workload's unless another is given. With `keep`, everything prepared is
        held in memory from the first candidate on.
        """
        exam = Examination(contract, storages(reference), seed)
        policy = policy or workload.policy
        refusal = policy.refusal(contract)
        names = nodes(reference, region)
        if refusal is None:
            names = called_nodes(reference, names, workload)
        names = pick_nodes(reference, names, seed)
        recorded: list[Case] = []
        limit_bytes = case_limit(workload)
        if refusal is None:
            inputs = steps(workload, seed, note=exam.notes.append)
            with spent("region: recording calls"):
                recorded, notes = record(reference, names, inputs, limit_bytes)
            exam.notes += notes
        called = [n for n in names if _calls(recorded, n)]
        exam.notes += [f"{n} was not called" for n in names if n not in called and recorded]
        return cls(
            reference=reference,
            names=called,
            derived_from=one_of_each(reference, called, seed),
            recorded=recorded,
            seed=seed,
            runs=max(kinds(workload.device), -(-policy.permutations // max(1, len(recorded)))),
            limit_bytes=limit_bytes,
            keep=keep,
            refusal=refusal,
            measured=exam,
        )

    def judge(
        self,
        candidate: nn.Module,
        backend: str | None = None,
        *,
        until_fault: bool = False,
        watch: Watch | None = None,
    ) -> Verdict:
        """Judge one candidate, a tree that shares parameters with the reference.

        With `until_fault` (for kept cases) no more is run than it takes to refuse it, and no
        explanation is looked for; whether it passes is the same. `watch` sees each call.
        """
        limits = self.limits() if until_fault else None
        exam = self.measured.beside(storages(self.reference, candidate), limits)
        exam.faults.add("policy", self.refusal)
        samples: list[Sample] = []
        routes: list[Deviations] = []  # this candidate's flips
        for node in self.nodes() if self.refusal is None else ():
            routes.append(Deviations(relative=node.deviations.relative))
            mine = candidate.get_submodule(node.name)
            found = self._judge_node(exam, node, mine, routes[-1], watch)
            samples += found[: SAMPLES - len(samples)]
            if exam.decided:
                break
        exam.noise_runs = self.measured.noise_runs
        exam.notes = [*self.measured.notes, *exam.notes]
        found = [] if until_fault else samples
        return verdicts.verdict(exam, "region", found, backend, routing=routing(routes))

    def nodes(self) -> Iterator[NodeCases]:
        """Each node, prepared; kept if there is to be another candidate."""
        if self.kept is not None:
            yield from self.kept
            return
        found: list[NodeCases] = []
        for name in self.names:
            ready = self._prepare_node(name)
            if self.keep:
                self._complete(ready)
                found.append(ready)
            else:
                yield ready
        if self.keep:
            self.kept = found
            yield from found

    def limits(self) -> dict[str, int]:
        """How many elements of each output may differ when all cases have been judged."""
        if not self.keep:
            raise ValueError("until_fault needs kept cases: prepare with keep=True")
        found, exam = {}, self.measured
        sizes: dict[str, Counter[str]] = defaultdict(Counter)
        for node in self.nodes():
            for ready in node.prepared:
                for name, tensor in ready.contract.results.items():
                    if is_real(tensor.dtype):
                        mask = ready.masks.get(name)
                        size = tensor.numel()
                        if mask is not None:
                            size = int(mask.expand_as(tensor).sum())
                        sizes[name][ready.where] += size
        for name, by_case in sizes.items():
            tally = exam.tally(name)
            exact = tally.numerics == "exact"
            found[tally.output] = 0 if exact else bounds.limits(tally.noise, by_case)[0].allowed
        return found

    @spent("region: replays and noise")
    def _prepare_node(self, name: str) -> NodeCases:
        """All cases of one node: noise first, so that routing margins are known."""
        exam, node = self.measured, self.reference.get_submodule(name)
        calls = _calls(self.recorded, name)
        cases = calls + (self._derived(node, calls) if name in self.derived_from else [])
        if self.more is not None and name == self.names[0]:
            cases += self.more(node, calls)
        ready = NodeCases(name, node, calls, [], Deviations(), [])
        self.deviations[name] = ready.deviations
        flips = 0
        for case in cases:
            runs = self.runs if case.typical else EDGE_RUNS
            # Of exact ties alone, for there is no noise in them.
            margins = Deviations() if case.tied else ready.deviations
            try:
                with tied(node, case):
                    prepared = exam.prepare(node, case)
                    exam.measure_noise(node, prepared, runs, margins)
            except torch.OutOfMemoryError:
                exam.notes.append(f"{name}, {case.name}: too large to replay")
                continue
            except REFUSALS:
                if case.typical:
                    raise
                continue  # the reference does not take these arguments either
            ready.prepared.append(prepared)
            ready.weighed.append(flips < MOST_FLIPS or case.telling)
            flips += len(exam.roundings(prepared))
        return ready

    def _complete(self, node: NodeCases) -> None:
        """The replays that one candidate would have made for itself, while memory allows."""
        for prepared, weighed in zip(node.prepared, node.weighed, strict=True):
            if prepared.case.tied:
                continue  # replays need the tied values
            results = [t for t in prepared.contract.results.values() if is_real(t.dtype)]
            replays = 1 + weighed * len(self.measured.roundings(prepared))
            size = replays * sum(t.numel() * GOLDEN_BYTES for t in results)
            device = results[0].device if results else None
            if device is not None and size > free_bytes(device) // KEPT_SHARE:
                continue
            prepared.golden = self.measured.golden_results(node.node, prepared)
            if weighed:
                prepared.flips = list(self.measured.flips(node.node, prepared))

    def _judge_node(
        self,
        exam: Examination,
        node: NodeCases,
        mine: nn.Module,
        routes: Deviations,
        watch: Watch | None,
    ) -> list[Sample]:
        before = checksums(mine, node.calls, exam.fixed)
        samples = []
        order = list(zip(node.prepared, node.weighed, strict=True))
        if exam.limits is not None:
            order.sort(key=lambda pair: -self.kills[pair[0].where])
        for ready, weighed in order:
            routes.where = ready.where
            if not shared(node.node, mine, ready.case):
                exam.notes.append(f"{ready.where}: the candidate has other vectors")
                continue
            margins = Deviations(where=ready.where) if ready.case.tied else routes
            try:
                with spent("region: the candidate"), tied(node.node, ready.case):
                    seen = exam.judge(node.node, mine, ready, margins)
                if seen is not None and watch is not None:
                    watch(ready, seen)
                if seen is None or exam.decided:
                    self.kills[ready.where] += 1
                    break  # more cases would say the same
                if weighed and not ready.case.tied:
                    with spent("region: telling roundings apart"):
                        exam.weigh_points(node.node, ready, seen)
            except torch.OutOfMemoryError:
                exam.notes.append(f"{ready.where}: too large to judge")
                continue
            if ready.case.typical:
                samples.append(Sample(node.node, ready, seen))
        wide = self.limit_bytes if node.name in self.derived_from else 0
        batch_variance(exam, node.node, mine, node.calls, wide)
        after = checksums(mine, node.calls, exam.fixed)
        if changed := [n for n in before if before[n] != after.get(n)]:
            text = f"changes the parameter {changed[0]} of {node.name}"
            exam.faults.add("parameters", text)
        return samples

    def _derived(self, ours: nn.Module, calls: list[Case]) -> list[Case]:
        """Edge cases from the node's first call, and near-ties if it makes choices."""
        where: Axes = axes(calls)
        first = replay(ours, calls[0].args, NATIVE, None, calls[0].kwargs)
        chosen = activations(ours, calls[0], self.measured.fixed, set(first.written))
        generator = torch.Generator().manual_seed(self.seed)
        found = derive(calls[0], where, chosen, generator)
        wide = tables(ours, calls[0], self.measured.fixed, {*chosen})
        found += vary(ours, calls[0], wide, self.measured.fixed, generator)
        if not first.choices:
            return found

        def choose(case: Case) -> torch.Tensor | None:
            results = results_of(ours, case, self.measured.fixed).values()
            integers = [t for t in results if not t.is_floating_point() and t.ndim > 1]
            return integers[0] if integers else None

        ties = (
            near_ties(calls[0], chosen, choose),
            exact_ties(ours, calls[0], chosen, first.choices),
        )
        return found + [case for case in ties if case is not None]


def case_limit(workload: Workload) -> int:
    give_back(workload.device)
    share = free_bytes(workload.device) // CASE_SHARE
    return share if workload.device.type == "cuda" else min(share, LARGEST_ON_HOST)


def _calls(recorded: list[Case], name: str) -> list[Case]:
    return [case for case in recorded if case.node == name]
