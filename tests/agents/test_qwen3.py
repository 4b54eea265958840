"""An architecture that the product does not know, from another library, in one file."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from agents.budget import Budget
from agents.loop import Loop
from agents.progress import Progress
from agents.proposers.base import Suggestion
from agents.session import Session
from harness.judge import judge_region, self_test
from harness.ledger import Ledger
from harness.records import Status
from harness.selftest import regions
from harness.workload import Workload
from optimized.change import Change, Contract, Implementation, apply_change, share

FILE = str(Path(__file__).with_name("qwen3_moe.py"))
NORM = "qwen3_moe_rmsnorm"


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload.load(FILE, "mini", "cpu")


def normed(node: Any, _: Any) -> Callable[[Tensor], Tensor]:
    """As the reference: the normed row is rounded before its weight."""

    def forward(x: Tensor) -> Tensor:
        wide = x.float()
        scale = (wide.square().mean(-1, keepdim=True) + node.variance_epsilon).rsqrt()
        return (wide * scale).to(x.dtype) * node.weight

    return forward


def rounded_once(node: Any, _: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        wide = x.float()
        scale = (wide.square().mean(-1, keepdim=True) + node.variance_epsilon).rsqrt()
        return (wide * scale * node.weight.float()).to(x.dtype)

    return forward


def changing(build: Callable[..., Any]) -> Change:
    return Change(
        name=build.__name__,
        region=NORM,
        summary="the norm",
        contract=Contract(numerics="reduction"),
        implementations=(Implementation(backend="torch", devices=("cpu",), build=build),),
    )


def verdict(workload: Workload, build: Callable[..., Any]):
    change = changing(build)
    model = share(workload.model)
    assert len(apply_change(model, change, "torch")) == 9  # four a layer and the last
    return judge_region(workload.model, model, change, "torch", workload, 0)


def test_its_regions_are_found_and_replayed(workload: Workload) -> None:
    self_test(workload.model, workload, 0)
    assert NORM in regions(workload.model)


def test_a_norm_that_rounds_as_it_does_passes(workload: Workload) -> None:
    found = verdict(workload, normed)
    assert (found.passed, found.reason) == (True, None)


def test_a_norm_that_rounds_once_is_refused_by_the_librarys_own_line(workload: Workload) -> None:
    found = verdict(workload, rounded_once)
    assert not found.passed and found.reason is not None
    assert "`hidden_states.to(input_dtype)`" in found.reason
    assert "modeling_qwen3_moe.py" in found.reason


@pytest.mark.slow
def test_the_loop_profiles_it_proposes_and_decides(workload: Workload, tmp_path: Path) -> None:
    budget = Budget(0.5)
    ledger = Ledger.create(tmp_path / "run")
    session = Session(workload, ledger, "decode-bs1", budget, Progress(budget))
    session.set_effects({"decode": 0.0, "prefill": 0.0})
    loop = Loop(session, "inductor", None)
    session.profile("before")
    proposed = {s.proposal.region: s for s in loop.proposer.propose(loop.context())}
    assert {NORM, "qwen3_moe_experts"} <= proposed.keys()
    assert proposed[NORM].proposal.launches_saved > 0
    suggestion = suggest_with(proposed[NORM], normed)
    attempt = loop.attempt(suggestion)
    assert attempt.region_verdict is not None and attempt.region_verdict.passed
    assert attempt.latency is not None and attempt.audit is not None
    assert attempt.audit.reason is None
    assert attempt.status in (Status.KEPT, Status.REJECTED)  # as this machine's clock has it


def suggest_with(found: Suggestion, build: Callable[..., Any]) -> Suggestion:
    """What was proposed, carried out by `build`: no compiler's time."""
    proposal = replace(found.proposal, change=build.__name__, backend="torch")
    return Suggestion(proposal=proposal, change=changing(build))
