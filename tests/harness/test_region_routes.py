"""A region's verdict lists what was routed otherwise, with margins."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.records import Verdict
from harness.region import RegionCases
from harness.routes import LISTED, Deviations, routing
from harness.verify_tables import print_verdict
from harness.workload import Workload
from optimized.change import Contract
from tests.harness.judged import change, judged, mini

TWINS = 1, 2  # experts made alike


def scores(node: Any, x: Tensor) -> Tensor:
    return torch.sigmoid(F.linear(x.float(), node.weight))


def test_flips_at_ties_pass_and_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    workload = Workload.load("beam", "mini", "cpu")
    gates = [m for m in workload.model.modules() if getattr(type(m), "region", "") == "router"]
    for gate in gates:
        for tensor in (gate.weight, gate.e_score_correction_bias):
            tensor[TWINS[1]] = tensor[TWINS[0]]

    def other_twin_first(node: Any) -> Callable[..., Any]:
        def forward(x: Tensor):
            weights, experts = node.choose(scores(node, x))
            twin = sum(torch.where(experts == a, b - a, 0) for a, b in (TWINS, TWINS[::-1]))
            return weights, experts + twin

        return forward

    verdict = judged(workload, change("router", other_twin_first))
    assert verdict.passed, verdict.reason
    found = verdict.routing
    assert found is not None and 50 < found.flipped < found.rows
    assert len(found.flips) == LISTED
    for flip in found.flips:
        assert flip.output == "out[1]"
        assert flip.margin == 0 < flip.limit < 1e-4
    assert {flip.where.rpartition(", ")[0] for flip in found.flips} <= {
        name for name, m in workload.model.named_modules() if m in gates
    }
    assert f"{found.flipped} row(s) routed differently, each a near-tie of the reference" in (
        " ".join(verdict.notes)
    )
    assert Verdict.from_json(verdict.to_json()) == verdict
    print_verdict("twins", verdict)
    shown = capsys.readouterr().out
    title = f"{found.flipped:,} of {found.rows:,} rows of choices differ; the largest margins\n"
    assert title in shown
    worst = found.flips[0]
    (line,) = [text for text in shown.splitlines() if text.startswith(worst.where)][:1]
    assert line.removeprefix(worst.where).split()[0] == "out[1]"
    assert line.split()[-2:] == ["0", f"{worst.limit:.3g}"]


def test_flips_that_fail_are_listed_with_the_worst_first() -> None:
    def reversed_every_tenth(node: Any) -> Callable[..., Any]:
        def forward(x: Tensor):
            weights, experts = node.choose(scores(node, x))
            experts[::10] = experts[::10].flip(-1)
            return weights, experts

        return forward

    verdict = judged(mini(), change("router", reversed_every_tenth))
    found = verdict.routing
    assert not verdict.passed and found is not None
    assert found.rows / 12 < found.flipped < found.rows / 7  # short calls have their first row
    excess = [flip.excess for flip in found.flips]
    assert excess == sorted(excess, reverse=True) and excess[0] > 0.1
    assert all(flip.row % 10 == 0 for flip in found.flips)


def test_no_flip_is_said_and_no_choice_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    contract = Contract(numerics="reduction")
    cases = RegionCases.prepare(mini().model, "router", contract, mini(), 1, keep=False)
    verdict = cases.judge(mini().model)
    found = verdict.routing
    assert found is not None and (found.flipped, found.flips) == (0, ())
    print_verdict("itself", verdict)
    assert f"{found.rows:,} rows of choices compared, none differs\n" in capsys.readouterr().out
    boundary = change("output_gate", lambda node: node.forward, Contract(numerics="reduction"))
    assert judged(mini(), boundary).routing is None


def test_records_are_merged() -> None:
    one, two = Deviations(rows=5, flipped=1), Deviations(rows=7)
    before = routing([one])
    assert before is not None
    both = routing([two], before)
    assert both is not None and (both.rows, both.flipped) == (12, 1)
    assert routing([Deviations()], before) == before
    assert routing([Deviations()]) is None
