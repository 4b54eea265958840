"""`python -m harness bisect`: a wrong change between honest ones is named, with its point."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.__main__ import main
from harness.bisect import first_failing, judge_every_node
from harness.errors import UserError
from harness.ledger import Ledger
from harness.records import SCHEMA, Attempt, Latency, Paired, Status, Verdict
from optimized.change import apply_change, share
from tests.harness.judged import change, toy

TOY = str(Path(__file__).with_name("toy_model.py"))

CHANGE_FILE = """
import torch
from optimized.change import Change, Contract, Implementation

def build(node, knobs):
{body}
    return forward

CHANGE = Change(
    name="{name}",
    region="{region}",
    summary="written for a test",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
"""
HONEST = """
    def forward(*args):
        return node(*args)
"""
ELIDED = """
    def forward(x, residual):
        residual = residual + x
        wide = residual.float()
        wide = wide - wide.mean(-1, keepdim=True)
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        weighed = (scaled * node.weight.float()).to(x.dtype)
        return residual, weighed + node.bias
"""
PAIR = Paired(
    base_us=2.0,
    candidate_us=1.0,
    candidate_interval_us=(1.0, 1.0),
    gain_us=1.0,
    gain_interval_us=(1.0, 1.0),
    mde_us=0.1,
    pairs=5,
)
PASSED = Verdict(
    scope="region", passed=True, reason=None, cases=1, seed=0, outputs=(), points=()
)  # fmt: skip


def write_run(folder: Path, changes: dict[str, str], status: Status = Status.KEPT) -> str:
    """A run whose kept changes are files: region -> body, in order."""
    ledger = Ledger.create(folder / "run")
    header = {"schema": SCHEMA, "target": "decode-bs1", "model": TOY, "preset": "toy"}
    header |= {"device": "cpu", "proposer": "auto", "seed": 0}
    ledger.append("run", header)
    for i, (region, body) in enumerate(changes.items(), start=1):
        path = folder / f"{region}_by_hand.py"
        path.write_text(CHANGE_FILE.format(name=f"{region}-by-hand", region=region, body=body))
        attempt = Attempt(
            index=i, name=str(path), region=region, backend="torch", status=status,
            reason="for a test", predicted_us=None, bound_us=None, knobs={}, region_verdict=PASSED,
            model_verdict=None, latency=Latency(decode=PAIR, prefill=PAIR), control=None,
            parent=None, seconds=1.0,
        )  # fmt: skip
        ledger.append("attempt", attempt)
    return str(ledger.directory)


def test_the_wrong_change_and_its_point_are_named(tmp_path, capsys):
    run = write_run(tmp_path, {"choose": HONEST, "add_norm": ELIDED, "mix": HONEST})
    assert main(["bisect", run, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["found"]
    assert (found["index"], found["change"], found["backend"]) == (2, "add_norm-by-hand", "torch")
    assert found["judged"] == [3, 1, 2]
    assert not found["model_verdict"]["passed"]
    (point,) = found["points"]
    assert point["point"] == "scaled.to(x.dtype)"
    assert (point["operator"], point["declared"], point["observed"]) == (
        "_to_copy",
        "kept",
        "elided",
    )
    file, _, line = point["source"].rpartition(":")
    assert file.endswith("toy_model.py")
    assert "scaled.to(x.dtype)" in Path(TOY).read_text().splitlines()[int(line) - 1]
    assert 0.01 < point["visible_share"] < 1
    reason = found["region_verdict"]["reason"]
    assert reason.startswith("rounds once where the reference rounds at `scaled.to(x.dtype)`")


def test_a_table_for_people(tmp_path, capsys):
    assert main(["bisect", write_run(tmp_path, {"add_norm": ELIDED})]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "change 1 of 1 is the first that fails: add_norm-by-hand (torch)"
    assert lines[1].startswith("the model up to it: ") and "blocks." in lines[1]  # any seed
    assert lines[-1].startswith("scaled.to(x.dtype)  _to_copy  tests/harness/toy_model.py:")


def test_a_stack_that_passes_gives_0(tmp_path, capsys):
    assert main(["bisect", write_run(tmp_path, {"choose": HONEST})]) == 0
    assert capsys.readouterr().out.endswith("toy with all 1 change(s) passes\n")


def test_a_run_that_kept_nothing_and_no_run_are_one_line(tmp_path):
    run = write_run(tmp_path, {"choose": HONEST}, Status.REJECTED)
    for words, message in ((run, "kept no change"), (str(tmp_path), "is not a run")):
        with pytest.raises(UserError, match=message) as caught:
            main(["bisect", words])
        assert "\n" not in str(caught.value)


def test_a_rounding_left_out_in_one_node_alone_is_found_among_all():
    def build(node: Any) -> Callable[..., Any]:
        def forward(x: Tensor, residual: Tensor):
            residual = residual + x
            wide = residual.float()
            wide = wide - wide.mean(-1, keepdim=True)
            scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
            if node is not wrong:
                scaled = scaled.to(x.dtype)
            return residual, (scaled * node.weight).to(x.dtype) + node.bias

        return forward

    candidate = share(toy().model)
    wrong = candidate.get_submodule("blocks.1.first")
    made = change("add_norm", build)
    apply_change(candidate, made, "torch")
    verdict = judge_every_node(candidate, made, toy(), 0)
    assert verdict.reason is not None
    assert verdict.reason.startswith("rounds once where the reference rounds at `scaled.to(x.d")
    assert verdict.cases == 4 * 5  # nodes, steps


@pytest.mark.parametrize(("count", "first"), [(1, 1), (2, 1), (7, 5), (8, 8), (9, 1)])
def test_halving_finds_the_first(count, first):
    asked = []

    def judge(length: int) -> Verdict:
        asked.append(length)
        reason = f"of {length}" if length >= first else None
        return Verdict(
            scope="model", passed=reason is None, reason=reason, cases=1, seed=0, outputs=(),
            points=(),
        )  # fmt: skip

    found = first_failing(count, judge)
    assert found is not None
    assert found[0] == first and found[1].reason == f"of {first}"
    assert len(asked) <= 1 + count.bit_length()
    assert first == 1 or first - 1 in asked
