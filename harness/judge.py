"""Verdicts: does a candidate compute what the reference computes, at its rounding points?

`judge_region` judges the nodes that a change replaces (`harness.region` judges several candidates
on the same cases), `judge_model` (`harness.layers`) the whole model layer by layer, and `self_test`
the judge's own replay against the reference.
"""

from torch import nn

from harness.layers import judge_model
from harness.policy import Policy
from harness.records import Verdict
from harness.region import RegionCases
from harness.selftest import self_test
from harness.workload import Workload
from optimized.change import Change

__all__ = ["judge_model", "judge_region", "self_test"]


def judge_region(
    reference: nn.Module,
    candidate: nn.Module,
    change: Change,
    backend: str,
    workload: Workload,
    seed: int,
    *,
    policy: Policy | None = None,
) -> Verdict:
    """Judge `change` as applied (with `backend`) in `candidate`, a tree that shares parameters with
    `reference`. What `backend` computes with does not matter to the judge; it names the verdict.

    The region's nodes are called as the reference calls them in prefills and decodes drawn from
    `seed`, and on cases derived from those calls.
    """
    cases = RegionCases.prepare(
        reference, change.region, change.contract, workload, seed, policy, keep=False
    )
    return cases.judge(candidate, backend)
