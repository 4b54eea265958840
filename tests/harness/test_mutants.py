"""The judge refuses what is derived to be wrong, and nothing that is right."""

import functools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.__main__ import main
from harness.errors import ExitCode, UserError
from harness.examine import NAMED
from harness.misuse import Mutant
from harness.mutants import derive_mutants, pair_points
from harness.mutate import Key, Wrong, trace
from harness.region import RegionCases
from harness.replay import ROUNDED, Choice, Plan, replay
from harness.routes import Deviations, find_flips
from harness.survey import (
    EQUIVALENT,
    KILLED,
    SURVIVED,
    Honest,
    Outcome,
    chosen,
    contract_of,
    exit_code,
    honest_changes,
    judge_honest,
    judge_mutant,
    regions_of,
)
from harness.surveyor import Survey, Surveyor, judge_right
from harness.trees import same_bits
from harness.workload import Workload
from optimized.change import Contract, share
from tests.harness.judged import TOY, case_of, change, judged, mini, toy

EVERY = "output zeros", "output constants", "output of the previous call"


@functools.cache
def prepared(model: str, region: str) -> RegionCases:
    workload = mini() if model == "mini" else toy()
    contract = contract_of(region, workload)
    return RegionCases.prepare(workload.model, region, contract, workload, 1)


@functools.cache
def judged_all(model: str, region: str) -> tuple[list[Mutant], list[Outcome]]:
    cases = prepared(model, region)
    mutants = derive_mutants(cases)
    candidate = share(cases.reference)
    return mutants, [judge_mutant(region, cases, candidate, m) for m in mutants]


def interior(cases: RegionCases) -> set[str]:
    """The interior points of all recorded calls, from the rounding points' table."""
    found: set[str] = set()
    for case in cases.recorded:
        node = cases.reference.get_submodule(case.node)
        points = replay(node, case.args, NAMED, None, case.kwargs).points
        found.update(p.name for p in points if p.interior)
    return found


REGIONS = [
    ("mini", "residual_boundary"),
    ("mini", "qk_norm_scale"),
    ("mini", "output_gate"),
    ("mini", "attend"),
    ("mini", "combine"),
    ("toy", "add_norm"),
    ("toy", "choose"),
    ("toy", "linear"),
]


@pytest.mark.parametrize(("model", "region"), REGIONS)
def test_every_mutant_is_killed(model: str, region: str) -> None:
    mutants, outcomes = judged_all(model, region)
    assert {str(o) for o in outcomes if o.status == SURVIVED} == set()
    assert {str(o) for o in outcomes if "raises" in o.reason} == set()  # all of them compute
    assert {o.status for o in outcomes} == {KILLED}
    kinds = Counter(m.kind for m in mutants)
    points = interior(prepared(model, region))
    assert kinds["rounding dropped"] == kinds["rounding moved"] == len(points)
    assert all(kinds[kind] == 1 for kind in EVERY)


def test_an_equivalent_mutant_is_listed_as_such_with_its_evidence() -> None:
    mutants, outcomes = judged_all("mini", "router")
    same = [o for o in outcomes if o.status != KILLED]
    assert {o.status for o in same} == {EQUIVALENT}
    assert {o.kind for o in same} <= {
        "tie order",
        "constant missing",
        "constant in BF16",
        "eps changed",
    }
    cases = prepared("mini", "router")
    judged_cases = sum(len(node.prepared) for node in cases.nodes())
    assert judged_cases > 30
    for outcome in same:
        assert outcome.differing == 0 and outcome.cases == judged_cases
        assert f"{outcome.elements:,} elements" in outcome.reason
    assert {m.kind for m in mutants} >= {
        "operands in TF32",
        "BF16 accumulation",
        "addend missing",
        "sum used for an operand",
    }


def test_what_the_list_of_mistakes_asks_for_is_derived() -> None:
    derived = {
        region: {m.kind for m in derive_mutants(prepared("mini", region))}
        for region in ("residual_boundary", "qk_norm_rope", "qk_norm_scale", "experts")
    }
    assert {"eps changed", "integer off by one", "count of a mean off by one"} <= derived[
        "residual_boundary"
    ]
    assert {
        "parts interleaved",
        "parts swapped",
        "multiply-add fused",
        "write left out",
        "write misplaced",
    } <= derived["qk_norm_rope"]
    assert "argument off by one" in derived["qk_norm_scale"]
    assert "tie order" in derived["experts"]
    combine = {m.kind for m in derive_mutants(prepared("mini", "combine"))}
    assert {"sum reordered", "constant missing", "multiply-add fused"} <= combine


def test_a_dropped_rounding_is_what_the_replay_elides() -> None:
    """Two implementations of "not rounded there" agree, one of them the judge's own."""
    case = case_of("residual_boundary")
    node = mini().model.get_submodule(case.node)
    first = replay(node, case.args, NAMED, None, case.kwargs)
    dropped = [
        m
        for m in derive_mutants(prepared("mini", "residual_boundary"))
        if m.kind == "rounding dropped"
    ]
    assert len(dropped) == 4
    for mutant in dropped:
        elided = replay(node, case.args, Plan(elide=frozenset((mutant.point,))), first)
        rounded = replay(node, case.args, ROUNDED, first)
        made = mutant.build(node)
        with torch.no_grad():
            h, x = made(*case.args)
        assert made.times == 1
        ours, plain = elided.outputs, rounded.outputs
        differs = [int((mine != ours[n]).sum()) for n, mine in zip(ours, (h, x), strict=True)]
        visible = [int((plain[n] != ours[n]).sum()) for n in ours]
        assert sum(visible) > 1000 > 100 * sum(differs)


class Pieces(nn.Module):
    """Rounds on the way into slices of a buffer of its own, and in place."""

    def forward(self, x: Tensor) -> Tensor:
        made = torch.empty_like(x)
        half = x.shape[-1] // 2
        made[..., :half] = x[..., :half].float() * 1.7
        made[..., half:] = x[..., half:] * 0.3
        made.mul_(1.1)
        return (made.float().square() * 0.7).to(x.dtype)


def test_roundings_in_memory_of_the_node_s_own_are_left_out() -> None:
    node, x = Pieces(), torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    first = replay(node, (x,), NAMED)
    pairs = pair_points(first.points, trace(node, (x,), {}))
    assert [(p.operator, c.key.called) for p, c in pairs if p.interior] == [
        ("copy", "copy"),
        ("mul", "mul"),
        ("mul", "mul"),
    ]
    for point, call in pairs:
        elided = replay(node, (x,), Plan(elide=frozenset((point.name,))), first).outputs["out"]
        wrong = Wrong(node, {}, call.key)
        mine = wrong(x)
        assert wrong.times == 1 and same_bits(mine, elided)
        assert same_bits(mine, node(x)) != point.interior


def test_an_unaltered_run_is_the_reference() -> None:
    for region in ("qk_norm_rope", "experts", "router"):
        case = case_of(region)
        node = mini().model.get_submodule(case.node)
        args, _ = case.clones(prepared("mini", region).measured.fixed)
        again, _ = case.clones(prepared("mini", region).measured.fixed)
        with torch.no_grad():
            plain, same = node(*args), Wrong(node, {})(*again)
        plain, same = (r if isinstance(r, tuple) else (r,) for r in (plain, same))
        assert all(same_bits(a, b) for a, b in zip(plain, same, strict=True))
        assert all(
            same_bits(a, b) for a, b in zip(args, again, strict=True) if isinstance(a, Tensor)
        )


def test_until_fault_decides_as_the_full_verdict_does() -> None:
    cases = prepared("toy", "add_norm")
    candidate = share(cases.reference)
    assert cases.judge(candidate, until_fault=True).passed
    assert cases.judge(candidate).passed
    mutants, outcomes = judged_all("toy", "add_norm")
    for mutant, outcome in list(zip(mutants, outcomes, strict=True))[::13]:

        def build(node: nn.Module, mutant: Mutant = mutant) -> Any:
            return mutant.build(node)

        made = change("add_norm", build, cases.measured.contract)
        verdict = judged(toy(), made, 1, alone=True)
        assert (not verdict.passed) == (outcome.status == KILLED)


def test_many_candidates_get_the_verdict_of_one_alone() -> None:
    """Kept cases carry nothing from one candidate to the next."""
    cases = prepared("toy", "choose")
    candidate = share(cases.reference)
    first = cases.judge(candidate, "torch")
    for mutant in derive_mutants(cases)[:3]:
        judge_mutant("choose", cases, candidate, mutant)
    made = change("choose", lambda n: n.forward, cases.measured.contract)
    alone = judged(toy(), made, 1, alone=True)
    again = cases.judge(share(cases.reference), "torch")
    assert first == again == alone


def test_until_fault_needs_kept_cases() -> None:
    contract = Contract(numerics="reduction")
    cases = RegionCases.prepare(toy().model, "choose", contract, toy(), 1, keep=False)
    with pytest.raises(ValueError, match="keep=True"):
        cases.judge(toy().model, until_fault=True)


def test_a_tie_explains_another_order_only_where_there_is_noise() -> None:
    values = torch.tensor([[3.0, 1.0, 3.0, 0.0]])
    ours, theirs = torch.tensor([[0, 2]]), torch.tensor([[2, 0]])
    pairs, choices = [("chosen", ours, theirs)], [Choice(values, 2)]
    assert find_flips(pairs, choices, Deviations()).unexplained is not None
    noisy = find_flips(pairs, choices, Deviations(relative={0: 1e-6}))
    assert noisy.unexplained is None and noisy.count == 1


def test_a_mutant_that_no_case_reaches_is_no_equivalent() -> None:
    cases = prepared("toy", "choose")
    nowhere = Key("nowhere", "add", 0)
    mutant = Mutant(
        kind="addend missing",
        what="nothing",
        point="nowhere",
        operator="add",
        source="",
        build=lambda node: Wrong(node, {nowhere: lambda run, func, args, kwargs: args[0]}),
    )
    outcome = judge_mutant("choose", cases, share(cases.reference), mutant)
    assert (outcome.status, outcome.differing) == (SURVIVED, 0)
    assert outcome.reason == "the judged cases never reach the operator"
    assert exit_code([outcome], []) == ExitCode.FOUND


def test_regions_and_samples_are_chosen() -> None:
    known = set(regions_of(mini(), None))
    assert known >= {"residual_boundary", "step_tables", "embedding", "layer", "attention"}
    assert known >= {"linear", "rmsnorm", "dense_mlp"}
    assert not known & {"decoder", "module_list"}  # judged layer by layer
    assert set(regions_of(toy(), None)) == {
        *("embedding", "linear", "choose", "add_norm", "block", "mix", "mixture")
    }
    assert regions_of(toy(), ["choose"]) == ["choose"]
    with pytest.raises(UserError, match="no region 'nothing'; it has: embedding, linear"):
        regions_of(toy(), ["nothing"])
    assert chosen(9, None, None, 0) == list(range(9))
    assert chosen(9, 2, None, 0) == [0, 1]
    drawn = chosen(9, None, 4, 7)
    assert len(set(drawn)) == 4 and drawn == sorted(drawn) == chosen(9, None, 4, 7)
    assert chosen(3, None, 4, 7) == [0, 1, 2]


def test_honest_changes_are_accepted() -> None:
    changes = honest_changes(mini(), ["combine", "swiglu"])
    assert {(c.name, backend) for c, backend in changes} == {
        ("reference", "reference"),
        ("combine", "inductor"),
        ("swiglu", "inductor"),
    }
    plain = [pair for pair in changes if pair[1] == "reference"]
    verdicts = list(judge_honest(mini(), plain, iter(range(20, 24)), 4))
    assert [(v.accepted, v.reason) for v in verdicts] == [(True, None)] * 4
    assert [v.seed for v in verdicts] == list(range(20, 24))


def test_the_command_counts_and_exits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["mutants", "--model", TOY, "--preset", "toy", "--device", "cpu"]
    only = [*words, "--region", "choose", "--limit", "4", "--honest", "2", "--json"]
    assert main(only) == ExitCode.DONE
    record = json.loads(capsys.readouterr().out)
    every = len(derive_mutants(prepared("toy", "choose")))
    assert record["counts"] == {
        "mutants": every,
        "killed": 4,
        "survived": 0,
        "equivalent": 0,
        "not judged": every - 4,
    }
    assert [h["accepted"] for h in record["honest"]] == [True, True]
    assert len({h["seed"] for h in record["honest"]}) == 2


def test_the_number_of_processes_changes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("harness.surveyor.PART", 2)  # several tasks of one region
    words = ["mutants", "--model", TOY, "--preset", "toy", "--device", "cpu", "--seed", "3"]
    words += ["--region", "choose", "linear", "--limit", "3", "--honest", "2"]
    found = []
    for jobs in ("1", "2"):
        folder = tmp_path / jobs
        assert main([*words, "--jobs", jobs, "--out", str(folder)]) == ExitCode.DONE
        record = json.loads((folder / "mutants.json").read_text())
        assert record.pop("command").endswith(f"--jobs {jobs} --out {folder}")
        assert record.pop("environment")["device"] == "cpu"
        assert (record.pop("jobs"), record.pop("seconds") > 0) == (int(jobs), True)
        table = (folder / "mutants.txt").read_text()
        assert table == capsys.readouterr().out
        for mutant in record["mutants"]:
            assert mutant.pop("seconds") > 0
        found.append((record, table.rpartition(";")[0]))
    assert found[0] == found[1]
    assert found[0][0]["counts"]["killed"] == 6 == len(found[0][0]["mutants"])
    assert [h["name"] for h in found[0][0]["honest"]] == ["reference", "reference"]


def test_a_spent_budget_judges_nothing_and_says_what_was_not_begun(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["mutants", "--model", TOY, "--preset", "toy", "--device", "cpu"]
    words += ["--region", "choose", "linear", "--budget-minutes", "1e-9"]
    assert main(words) == ExitCode.OUT_OF_BUDGET
    printed = capsys.readouterr().out
    assert "not begun, since the budget was spent: choose" in printed
    assert "not begun, since the budget was spent: linear" in printed
    assert printed.splitlines()[-1].startswith("0 of 0 mutants killed, 0 survived")


def test_what_is_found_decides_the_exit_code() -> None:
    _, outcomes = judged_all("toy", "choose")
    right = Honest(
        region="choose", name="reference", backend="", seed=1, accepted=True, reason=None, cases=9
    )
    assert exit_code(outcomes, [right]) == ExitCode.DONE
    assert exit_code(outcomes, [replace(right, accepted=False)]) == ExitCode.FOUND
    assert exit_code([replace(outcomes[0], status=SURVIVED)], [right]) == ExitCode.FOUND
    assert exit_code([], []) == ExitCode.OUT_OF_BUDGET


def test_a_region_that_no_step_calls_is_no_wrong_rejection() -> None:
    """A decoder's steps call no encoder: nothing is judged there, and nothing counts."""
    survey = Survey(model="muse-spark", preset="mini", device="cpu", seed=0)
    worker = Surveyor(survey, Workload.load("muse-spark", "mini", "cpu"))
    assert judge_right(["gelu_mlp"], 0, range(1, 2), worker) == []
    (soft_cap,) = judge_right(["soft_cap"], 0, range(1, 2), worker)
    assert soft_cap.accepted and soft_cap.cases > 0
