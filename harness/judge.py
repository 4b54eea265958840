"""Verdicts: does a candidate compute what the reference computes, at its rounding points?

`judge_region` judges the nodes that a change replaces, `judge_model` (`harness.layers`) the whole
model layer by layer, and `self_test` the judge's own replay against the reference.
"""

import random
from collections.abc import Iterable

import torch
from torch import nn

from harness import verdicts
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
    storages,
)
from harness.examine import Examination, Prepared
from harness.explain import Sample
from harness.layers import judge_model
from harness.nodes import pick_nodes
from harness.observe import checksums
from harness.policy import DEFAULT, Policy
from harness.records import Verdict
from harness.replay import NATIVE, replay
from harness.routes import Deviations
from harness.selftest import self_test
from harness.steps import steps
from harness.workload import Workload, free_bytes
from optimized.change import Change, nodes

MOST_FLIPS = 48  # replays of a node with one rounding flipped
EDGE_RUNS = 4  # noise replays of a derived case
SAMPLES = 3  # cases kept to explain a difference
CASE_SHARE = 64  # one recorded call may take 1/64 of the free memory
LARGEST_ON_HOST = 64 << 20  # bytes of one on a CPU

__all__ = ["judge_model", "judge_region", "self_test"]


def judge_region(
    reference: nn.Module,
    candidate: nn.Module,
    change: Change,
    backend: str,
    workload: Workload,
    seed: int,
    *,
    policy: Policy = DEFAULT,
) -> Verdict:
    """Judge `change` as applied (with `backend`) in `candidate`, a tree that shares parameters with
    `reference`. What `backend` computes with does not matter to the judge; it names the verdict.

    The region's nodes are called as the reference calls them in prefills and decodes drawn from
    `seed`, and on cases derived from those calls.
    """
    exam = Examination(change.contract, storages(reference, candidate), seed)
    exam.faults.add("policy", policy.refusal(change.contract))
    if exam.faults.reason is not None:
        return verdicts.verdict(exam, "region", [])
    names = pick_nodes(reference, nodes(reference, change.region), seed)
    limit = case_limit(workload)
    recorded, notes = record(reference, names, steps(workload, seed, note=exam.notes.append), limit)
    exam.notes += notes
    samples: list[Sample] = []
    derived_from = random.Random(seed).choice([n for n in names if _calls(recorded, n)] or names)
    total = max(1, len(recorded))
    runs = max(2, -(-policy.permutations // total))
    for name in names:
        calls = _calls(recorded, name)
        if not calls:
            exam.notes.append(f"{name} was not called")
            continue
        ours, mine = reference.get_submodule(name), candidate.get_submodule(name)
        before = checksums(mine, calls, exam.fixed)
        where = axes(calls)
        cases = calls + (_derived(ours, calls, where, exam, seed) if name == derived_from else [])
        samples += examine_node(exam, ours, mine, cases, runs)[: SAMPLES - len(samples)]
        batch_variance(exam, ours, mine, calls)
        after = checksums(mine, calls, exam.fixed)
        if changed := [n for n in before if before[n] != after.get(n)]:
            exam.faults.add("parameters", f"changes the parameter {changed[0]} of {name}")
    return verdicts.verdict(exam, "region", samples, backend)


def examine_node(
    exam: Examination, ours: nn.Module, mine: nn.Module, cases: list[Case], runs: int
) -> list[Sample]:
    """All cases of one node: noise first, so that routing margins are known, then the candidate."""
    prepared: list[Prepared] = []
    deviations = Deviations()
    for case in cases:
        try:
            ready = exam.prepare(ours, case)
            exam.measure_noise(ours, ready, runs if case.typical else EDGE_RUNS, deviations)
        except torch.OutOfMemoryError:
            exam.notes.append(f"{name_of(case)}: too large to replay")
            continue
        except REFUSALS:
            if case.typical:
                raise
            continue  # the reference does not take these arguments either
        prepared.append(ready)
    samples, weighed = [], 0
    for ready in prepared:
        try:
            seen = exam.judge(ours, mine, ready, deviations)
            if seen is None:
                break  # it broke: more cases would say the same
            if weighed < MOST_FLIPS:
                weighed += exam.weigh_points(ours, ready, seen)
        except torch.OutOfMemoryError:
            exam.notes.append(f"{name_of(ready.case)}: too large to judge")
            continue
        if ready.case.typical:
            samples.append(Sample(ours, ready, seen))
    return samples


def name_of(case: Case) -> str:
    return f"{case.node}, {case.name}"


def case_limit(workload: Workload) -> int:
    share = free_bytes(workload.device) // CASE_SHARE
    return share if workload.device.type == "cuda" else min(share, LARGEST_ON_HOST)


def _calls(recorded: Iterable[Case], name: str) -> list[Case]:
    return [case for case in recorded if case.node == name]


def _derived(
    ours: nn.Module, calls: list[Case], where: Axes, exam: Examination, seed: int
) -> list[Case]:
    """Edge cases from the node's first call, and near-ties if it makes choices."""
    first = replay(ours, calls[0].args, NATIVE, None, calls[0].kwargs)
    chosen = activations(ours, calls[0], exam.fixed, set(first.written))
    found = derive(calls[0], where, chosen, torch.Generator().manual_seed(seed))
    if not first.choices:
        return found

    def choose(case: Case) -> torch.Tensor | None:
        results = replay(ours, case.args, NATIVE, None, case.kwargs).outputs.values()
        integers = [t for t in results if not t.is_floating_point() and t.ndim > 1]
        return integers[0] if integers else None

    ties = near_ties(calls[0], chosen, choose)
    return found if ties is None else [*found, ties]
