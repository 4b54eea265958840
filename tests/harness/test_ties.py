"""Exact ties: options that no noise tells apart come in the order that the reference promises."""

import copy

import pytest
import torch

from harness.cases import activations, record, storages
from harness.mutants import derive_mutants
from harness.region import RegionCases
from harness.replay import NATIVE, replay
from harness.steps import steps
from harness.survey import judge_mutant, put
from harness.ties import PERIOD, exact_ties, shared, tied
from optimized.change import Contract, nodes, share
from tests.harness.judged import mini

REGION = "router"


@pytest.fixture(scope="module")
def cases() -> RegionCases:
    contract = Contract(numerics="reduction")
    return RegionCases.prepare(mini().model, REGION, contract, mini(), 3)


def tie_of(cases):
    ready = next(n for n in cases.nodes() if any(p.case.tied for p in n.prepared))
    return ready, next(p for p in ready.prepared if p.case.tied)


def test_the_case_has_ties_and_gives_the_vectors_back(cases):
    ready, prepared = tie_of(cases)
    bias = ready.node.e_score_correction_bias
    before = bias.clone()
    assert prepared.case.tied == ("e_score_correction_bias",)
    with pytest.raises(RuntimeError, match="stop"), tied(ready.node, prepared.case):
        assert torch.equal(bias, before[torch.arange(len(bias)) % PERIOD])
        raise RuntimeError("stop")
    assert torch.equal(bias, before)
    values = prepared.first.choices[-1].values
    assert len(values[0][torch.isfinite(values[0])].unique()) <= PERIOD
    assert prepared.first.outputs["out[1]"].unique(dim=0).shape[0] == 1  # all tokens alike


def test_the_opposite_order_is_refused(cases):
    wrong = [m for m in derive_mutants(cases) if m.kind == "tie order"]
    assert wrong
    for mutant in wrong:
        outcome = judge_mutant(REGION, cases, share(cases.reference), mutant)
        assert outcome.status == "killed" and "exact ties" in outcome.reason, outcome.reason


def test_the_reference_itself_passes(cases):
    verdict = cases.judge(share(cases.reference))
    assert verdict.passed, verdict.reason


def test_a_candidate_with_vectors_of_its_own_is_not_judged_on_them(cases):
    ready, prepared = tie_of(cases)
    other = copy.deepcopy(ready.node)
    assert shared(ready.node, ready.node, prepared.case)
    assert not shared(ready.node, other, prepared.case)
    candidate = share(cases.reference)
    put(candidate, ready.name, ready.node, ready.node.forward)
    candidate.get_submodule(ready.name)._buffers["e_score_correction_bias"] = (
        ready.node.e_score_correction_bias.clone()
    )
    verdict = cases.judge(candidate)
    assert any("exact ties: the candidate has other vectors" in note for note in verdict.notes)


def test_nothing_is_tied_where_nothing_is_chosen():
    model = mini().model
    name = nodes(model, "swiglu")[0]
    [call, *_], _ = record(model, [name], list(steps(mini(), 0))[:1], 1 << 30)
    node = model.get_submodule(name)
    first = replay(node, call.args, NATIVE, None, call.kwargs)
    chosen = activations(node, call, storages(model), set())
    assert exact_ties(node, call, chosen, first.choices) is None
