"""A candidate that cheats while it is timed, or spoils the reference, meets the loop itself."""

import gc
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from agents.budget import Budget
from agents.loop import Loop
from agents.progress import Progress
from agents.proposers.base import Suggestion
from agents.session import Session
from harness.errors import SelfTestError
from harness.ledger import Ledger
from harness.records import Attempt, Proposal, Status
from harness.workload import Workload
from optimized.change import Change, Contract, Implementation

TOY = str(Path(__file__).with_name("toy_model.py"))
REGION = "scaled_norm"


@pytest.fixture
def loop(tmp_path: Path) -> Loop:
    """A loop on a model of its own, as it stands once its smallest effect is known."""
    budget = Budget(0.5)
    workload = Workload.load(TOY, "toy", "cpu")
    ledger = Ledger.create(tmp_path / "run")
    session = Session(workload, ledger, "decode-bs1", budget, Progress(budget))
    session.set_effects({"decode": 0.0, "prefill": 0.0})
    return Loop(session, "auto", None)


def suggestion(build: Callable[..., Any]) -> Suggestion:
    implementation = Implementation(backend="torch", devices=("cpu",), build=build)
    change = Change(
        name=build.__name__,
        region=REGION,
        summary="a cheat",
        contract=Contract(numerics="reduction"),
        implementations=(implementation,),
    )
    proposal = Proposal(
        change=change.name,
        region=REGION,
        backend="torch",
        hypothesis="nobody looks",
        launches_saved=0,
        bytes_saved=0,
        predicted_us=1.0,
        bound_us=1.0,
        node_count=3,
    )
    return Suggestion(proposal=proposal, change=change)


def skips_while_timed(node: Any, _knobs: Any) -> Callable[[Tensor], Tensor]:
    """Garbage collection is off while steps are timed: then the last result must do."""
    last: dict[torch.Size, Tensor] = {}

    def forward(x: Tensor) -> Tensor:
        if gc.isenabled() or x.shape not in last:
            last[x.shape] = node.forward(x)
        return last[x.shape].clone()

    return forward


def spoils_a_weight(node: Any, _knobs: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        result = node.forward(x)
        node.weight.data[-1] += 1
        return result

    return forward


def test_skipping_work_while_timed_is_refused_by_the_audit(loop: Loop) -> None:
    attempt = loop.attempt(suggestion(skips_while_timed))
    assert attempt.region_verdict is not None and attempt.region_verdict.passed
    assert attempt.latency is not None and attempt.audit is not None
    assert attempt.status is Status.REJECTED
    first, *rest = attempt.audit.calls
    assert (first.step, first.when) == ("decode", "among the timed calls")
    assert first.reason is not None
    assert attempt.reason == f"audit: decode, among the timed calls: {first.reason}"
    assert [call.step for call in rest] == ["prefill", "decode", "prefill"]
    assert rest[1].reason is None  # nobody timed that one
    assert loop.ledger.all("attempt", Attempt) == [attempt]
    assert list(attempt.spent_s) == ["region", "timing", "audit"]  # and no verdict on layers
    assert 0.9 * attempt.seconds - 1 < sum(attempt.spent_s.values()) <= attempt.seconds + 0.3
    samples = loop.ledger.last("samples")  # its figures are theirs
    assert samples is not None and samples["index"] == attempt.index
    for kind, pairs in samples["us"].items():
        pair = getattr(attempt.latency, kind)
        assert len(pairs) == pair.pairs
        assert median([us for a, _, _, b in pairs for us in (a, b)]) == pytest.approx(
            pair.base_us, abs=0.01
        )
        assert median([us for _, a, b, _ in pairs for us in (a, b)]) == pytest.approx(
            pair.candidate_us, abs=0.01
        )


def test_a_control_whose_audit_fails_was_not_refused_by_the_keep_rule(loop: Loop) -> None:
    attempt = loop.attempt(suggestion(skips_while_timed), control="identity")
    assert attempt.status is Status.FAILED
    assert attempt.reason.startswith("its audit failed, though it is honest: decode, among")
    assert loop.history.controls == frozenset()


def test_a_spoilt_reference_is_recorded_and_stops_the_run(loop: Loop) -> None:
    with pytest.raises(SelfTestError, match=r"changed the reference's weight blocks\.0\.norm\.w"):
        loop.attempt(suggestion(spoils_a_weight))
    (attempt,) = loop.ledger.all("attempt", Attempt)
    assert attempt.status is Status.FAILED
    assert attempt.reason == "it changed the reference's weight blocks.0.norm.weight"


def honest(node: Any, _knobs: Any) -> Callable[[Tensor], Tensor]:
    return node.forward


def test_a_timed_step_that_could_not_be_judged_is_said(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("harness.domains.free_bytes", lambda _: 0)
    attempt = loop.attempt(suggestion(honest))
    assert attempt.region_verdict is not None and attempt.region_verdict.passed
    said = [line for line in capsys.readouterr().err.splitlines() if "not judged" in line]
    assert len(said) == len(attempt.region_verdict.targets)
    assert said[0].endswith(
        "honest: decode-bs1: not judged, its caches do not fit beside the weights; the reference "
        "runs there"
    )
