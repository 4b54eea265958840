"""A rounding that is left out at one of its uses, and the judge that tells it from all others."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.__main__ import main
from harness.errors import ExitCode
from harness.mutants import derive_mutants
from harness.points import points_for_model, points_table
from harness.policy import Policy
from harness.records import Verdict
from harness.region import RegionCases
from harness.replay import NATIVE, Noise, Plan, replay
from harness.survey import KILLED, judge_mutant
from harness.trees import same_bits
from harness.workload import Workload
from optimized.change import Contract, share
from tests.harness.judged import change, judged

FILE = str(Path(__file__).with_name("toy_uses.py"))
NORM = "norm: (wide * scale).to(x.dtype)"
IN_GATE = f"{NORM} in gate"
ALLOWED = Policy(allow_elided=True)


@functools.cache
def uses() -> Workload:
    return Workload.load(FILE, "uses", "cpu")


def fork(unrounded: set[str]) -> Callable[[nn.Module], Callable[..., Any]]:
    """The region in FP32, rounded at its points, but for what the modules in `unrounded` read."""

    def build(_: nn.Module) -> Callable[..., Any]:
        def forward(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
            wide = x.float()
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
            low = wide.bfloat16().float()
            gate = torch.sigmoid((wide if "gate" in unrounded else low) @ weight.float())
            scaled = (wide if "scale" in unrounded else low) * scale.float()
            return (gate * scaled.bfloat16().float()).bfloat16()

        return forward

    return build


def verdict(unrounded: set[str], *elides: str) -> Verdict:
    contract = Contract(numerics="reduction", elides=dict.fromkeys(elides, "one kernel"))
    return judged(uses(), change("fork", fork(unrounded), contract), policy=ALLOWED)


def test_a_replay_elides_one_use_alone() -> None:
    node, model = uses().model.fork, uses().model
    x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    args = x, model.mix.weight, model.scale
    first = replay(node, args, NATIVE)
    seen = []
    for elide, unrounded in (
        ({IN_GATE}, {"gate"}),
        ({f"{NORM} in scale"}, {"scale"}),
        ({IN_GATE, f"{NORM} in scale"}, {"gate", "scale"}),
        ({NORM}, {"gate", "scale"}),
        ({NORM, IN_GATE}, {"gate", "scale"}),
        (set(), set()),
    ):
        found = replay(node, args, Plan(elide=frozenset(elide)), first).outputs["out"]
        by_hand = fork(unrounded)(node)(*args)
        assert (found != by_hand).float().mean() < 1e-2, elide  # the product's order
        seen.append(found)
    for i, a in enumerate(seen[:3]):
        assert (a != seen[5]).float().mean() > 0.05, i
    assert (seen[0] != seen[3]).float().mean() > 0.05
    assert same_bits(seen[2], seen[3]) and same_bits(seen[3], seen[4])
    assert same_bits(seen[5], first.outputs["out"])


def test_a_write_to_it_ends_what_was_kept() -> None:
    class Reader(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float() * 3

    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reader = Reader()

        def forward(self, x: Tensor):
            y = (x.float() / 3).to(x.dtype)
            before = self.reader(y)
            y[0] = 1.0
            return before, self.reader(y), y

    x = torch.randn(3, 8).bfloat16()
    module = Writer()
    first = replay(module, (x,), NATIVE)
    use = "(x.float() / 3).to(x.dtype) in reader"
    before, after, y = replay(module, (x,), Plan(elide=frozenset((use,))), first).outputs.values()
    assert same_bits(before, x.float() / 3 * 3)
    assert same_bits(after, module(x)[1]) and same_bits(y, module(x)[2])


def test_points_list_who_reads_them() -> None:
    points = {p.name: p for p in points_for_model(uses())}
    assert points[f"fork.{NORM}"].readers == ("fork.gate", "fork.scale")
    assert points["fork.scale: rows * scale"].readers == ()
    columns, rows = points_table(list(points.values()))
    assert ["fork.gate, fork.scale"] == [
        row[columns.index("read by")] for row in rows if row[0] == "fork.norm"
    ]


@pytest.mark.parametrize("unrounded", [{"gate"}, set()], ids=["honest", "rounds-everywhere"])
def test_the_declared_use_is_told_from_none(unrounded: set[str]) -> None:
    found = verdict(unrounded, IN_GATE)
    observed = {p.point: p.observed for p in found.points}
    assert observed[NORM] == "kept"
    if unrounded:
        assert found.passed, found.reason
        assert observed[IN_GATE] == "elided"
        return
    assert found.reason is not None and observed[IN_GATE] == "kept"
    assert f"rounds at `{IN_GATE}`" in found.reason and "which its contract elides" in found.reason


def test_eliding_everywhere_is_not_eliding_at_one_use() -> None:
    found = verdict({"gate", "scale"}, IN_GATE)
    assert found.reason is not None
    assert f"elides everywhere what its contract elides only at `{IN_GATE}`" in found.reason
    assert {p.point: p.observed for p in found.points}[NORM] == "elided"
    assert verdict({"gate", "scale"}, NORM).passed


def test_an_undeclared_use_is_named() -> None:
    for module in ("gate", "scale"):
        found = verdict({module})
        assert found.reason is not None
        assert f"rounds once where the reference rounds at `{NORM} in {module}`" in found.reason
    found = verdict({"gate"}, NORM)
    assert found.reason is not None and f"`{NORM}`" in found.reason


def test_a_use_that_is_not_there_is_refused() -> None:
    found = verdict({"gate"}, f"{NORM} in head")
    assert found.reason is not None and "which the region does not round at" in found.reason


def test_each_use_gives_a_mutant_that_is_killed_and_one_that_the_replay_elides() -> None:
    model = uses().model
    cases = RegionCases.prepare(model, "fork", Contract(numerics="reduction"), uses(), 1)
    made = {m.point: m for m in derive_mutants(cases) if m.kind == "rounding dropped"}
    assert [p for p in made if " in " in p] == [IN_GATE, f"{NORM} in scale"]
    case = cases.recorded[0]
    first = replay(model.fork, case.args, NATIVE)
    for point, mutant in made.items():
        assert judge_mutant("fork", cases, share(model), mutant).status == KILLED
        elided = replay(model.fork, case.args, Plan(elide=frozenset((point,))), first)
        apart = elided.outputs["out"] != mutant.build(model.fork)(*case.args)
        assert (
            apart.float().mean()
            < 1e-2
            < (elided.outputs["out"] != first.outputs["out"]).float().mean()
        )


def test_a_rounding_is_added_in_one_module_alone() -> None:
    model, add = uses().model, "matmul_operands_tf32"

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = type(model.fork.gate)(), type(model.fork.gate)()

        def forward(self, x: Tensor, weight: Tensor):
            return self.first(x, weight), self.second(x, weight)

    args = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(2)).unbind()
    args = args[0], torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    twice = Twice()
    first = replay(twice, args, NATIVE)
    everywhere = replay(twice, args, Plan(add=frozenset((add,))), first).outputs
    second = replay(twice, args, Plan(add=frozenset((f"{add} in second",))), first).outputs
    assert torch.equal(second["out[0]"], first.outputs["out[0]"])
    assert torch.equal(second["out[1]"], everywhere["out[1]"])
    assert not torch.equal(second["out[1]"], second["out[0]"])
    noisy = replay(twice, args, Plan(add=frozenset((add,)), noise=Noise(seed=1)), first).outputs
    assert 0 < (noisy["out[1]"] - everywhere["out[1]"]).abs().max() < 1e-5  # sums in other orders


def test_a_policy_names_what_it_allows() -> None:
    contract = Contract(
        numerics="reduction",
        elides={IN_GATE: "one kernel"},
        adds={"matmul_operands_tf32 in gate": "tensor cores"},
    )
    assert "--allow-elided" in (Policy().refusal(contract) or "")
    refused = Policy.allowing(["elided"]).refusal(contract)
    assert refused is not None and "--allow-added" in refused
    both = Policy.allowing(["elided", "matmul_operands_tf32"])
    assert both.refusal(contract) is None
    assert Policy.allowing(both.allows) == both and Policy().allows == ()


def test_the_command_line_allows_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "unrounded_gate.py"
    file.write_text(
        f"""
import torch
from optimized.change import Change, Contract, Implementation

def build(node, knobs):
    def forward(x, weight, scale):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        scaled = (wide.to(x.dtype) * scale).float()
        return (torch.sigmoid(wide @ weight.float()) * scaled).to(x.dtype)
    return forward

CHANGE = Change(
    name="unrounded_gate", region="fork", summary="the gate reads the norm in FP32",
    contract=Contract(numerics="reduction", elides={{{IN_GATE!r}: "one kernel"}}),
    implementations=(Implementation(backend="torch", devices=("cpu",), build=build),),
)
"""
    )
    words = ["verify", str(file), "--model", FILE, "--preset", "uses", "--device", "cpu", "--json"]
    assert main([*words, "--allow-elided"]) == ExitCode.DONE
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    observed = {p["point"]: p["observed"] for p in verdicts[0]["points"]}
    assert observed[IN_GATE] == "elided" and observed[NORM] == "kept"
    assert [v["passed"] for v in verdicts] == [True, True]
