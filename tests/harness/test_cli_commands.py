"""`python -m harness` on a model that the product does not know, and on words it cannot use."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from harness import command_bench
from harness.__main__ import main
from harness.errors import UserError
from harness.records import Ceilings

TOY = str(Path(__file__).with_name("toy_model.py"))

CEILINGS = Ceilings(
    device_name="a CPU",
    read_gb_per_s=1.0,
    copy_gb_per_s=1.0,
    bf16_tflop_per_s=1.0,
    fp32_tflop_per_s=1.0,
    launch_us=1.0,
)

CHANGE_FILE = """
import torch
from optimized.change import Change, Contract, Implementation

def build(node, knobs):
    def forward(x, residual):
        residual = residual + x
        wide = residual.float()
        wide = wide - wide.mean(-1, keepdim=True)
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return residual, {result}
    return forward

CHANGE = Change(
    name="by-hand",
    region="add_norm",
    summary="the same, written once more",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
"""
HONEST = "scaled.to(x.dtype) * node.weight + node.bias"
ELIDED = "(scaled * node.weight + node.bias).to(x.dtype)"


@pytest.fixture
def change_file(tmp_path):
    def write(result: str) -> str:
        path = tmp_path / "by_hand.py"
        path.write_text(CHANGE_FILE.replace("{result}", result))
        return str(path)

    return write


def test_an_honest_change_passes_and_is_timed(change_file, capsys, monkeypatch):
    monkeypatch.setattr("harness.outside.SLOPE_S", 0.02)  # in short bursts, as many as always
    assert main(["verify", change_file(HONEST), "--model", TOY, "--json", "--time"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["change"], found["backend"], found["passed"]) == ("by-hand", "torch", True)
    assert [verdict["scope"] for verdict in found["verdicts"]] == ["region", "model"]
    assert found["latency"]["decode"]["base_us"] > 0
    assert found["latency"]["prefill"]["pairs"] >= 5


def test_an_elided_rounding_is_named_and_gives_1(change_file, capsys):
    assert main(["verify", change_file(ELIDED), "--model", TOY, "--time"]) == 1
    out = capsys.readouterr().out
    assert "by-hand (torch), region: REJECTED: " in out
    assert "interior rounding points" in out
    assert "elided" in out
    assert out.endswith("not timed: only what passed is\n")


def test_a_verdict_s_seed_is_drawn_told_and_gives_it_again(change_file, capsys):
    words = ["verify", change_file(ELIDED), "--model", TOY, "--json"]
    found = []
    for again in (False, False, True):
        more = ["--seed", str(found[1]["seed"])] if again else []
        assert main([*words, *more]) == 1
        (verdict,) = json.loads(capsys.readouterr().out)["verdicts"]
        found.append(verdict)
    assert found[0]["seed"] != found[1]["seed"] > 0
    assert found[1] == found[2] and found[0]["outputs"] != found[1]["outputs"]


def test_rounding_points_are_listed_with_their_lines(capsys):
    assert main(["rounding-points", "--model", TOY]) == 0
    out = capsys.readouterr().out
    assert "scaled.to(x.dtype) * self.weight" in out
    assert "toy_model.py:" in out


def test_baselines_of_any_model(capsys, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["bench", "--model", TOY, "--minutes", "0.1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    eager, graph, compiled = found["baselines"]
    assert eager["decode"]["median_us"] > 0 and eager["prefill"]["median_us"] > 0
    assert graph["absent"] == "a CPU has no CUDA graphs"
    assert compiled["absent"].startswith("no C++ compiler (no-such-compiler)")
    assert found["environment"]["device"] == "cpu"


def test_the_table_of_baselines_says_what_was_timed(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    out = tmp_path / "made" / "here"
    assert main(["bench", "--model", TOY, "--minutes", "0.1", "--out", str(out)]) == 0
    found = json.loads((out / "bench.json").read_text())
    assert [b["name"] for b in found["baselines"]] == ["eager", "graph", "compile"]
    lines = capsys.readouterr().out.splitlines()
    assert "decode 1 x 1 token(s), context 250" in lines[1]
    assert lines[2].startswith("eager") and " us [" in lines[2]
    assert lines[-2] == "graph: a CPU has no CUDA graphs"


def test_a_step_against_itself(capsys):
    words = ["aa", "--model", TOY, "--comparisons", "3", "--seconds", "0.1", "--json"]
    code = main(words)
    found = json.loads(capsys.readouterr().out)
    assert len(found["comparisons"]) == 3
    assert all(pair["mde_us"] >= found["smallest_effect_us"] for pair in found["comparisons"])
    assert code == (1 if found["alarms"] else 0)


def test_ceilings_say_how_many_threads_had_a_cpus(capsys, monkeypatch):
    monkeypatch.setattr(command_bench, "measure_ceilings", lambda device: CEILINGS)
    assert main(["ceilings", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert f"threads: {torch.get_num_threads()} (a toy's runs use 1), measured" in said


def test_ceilings_as_json(capsys):
    assert main(["ceilings", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["read_gb_per_s"] > 0


BAD = [
    (["verify", "nope"], "unknown change 'nope'; known: .*swiglu.*, or the path of a change file"),
    (["verify", "no.py"], "no change file at no.py; give the path of a .py file or a known name"),
    (["verify", "inductor:nope"], "change inductor:nope: the model has no region 'nope'"),
    (["verify", "swiglu", "--model", TOY], "change swiglu: the model has no region 'swiglu'"),
    (
        ["verify", "swiglu", "--backend", "cutedsl"],
        "change swiglu has no backend 'cutedsl'; it has: triton, inductor",
    ),
    (["bench", "--target", "nope"], "unknown target 'nope'; choose one of decode-bs1, "),
    (["aa", "--preset", "nope"], "model beam has no preset 'nope'; choose one of "),
    (["ceilings", "--device", "tpu"], "unknown device 'tpu'; choose auto, cpu or cuda"),
    (["bench", "--out", TOY], "--out .*: File exists; name a folder to write into"),
    (["bench", "--peers", "--out", "/proc/x"], "--out /proc/x: .*; name a folder to write into"),
    (["bench", "--curve", "batch", "--out", "/proc/x"], "--out /proc/x: .*; name a folder to wri"),
    (["mutants", "--out", "/proc/x"], "--out /proc/x: .*; name a folder to write into"),
    (["bench", "--peers", "--against", "nope"], "no peer's name begins with 'nope'; known: PyTor"),
    (["bench", "--evaluations", "--plan", "x"], "--plan is for --peers or --curve; give that, or"),
    (["bench", "--peers", "--plan", "x", "--beyond-domain"], "--beyond-domain is for --curve or -"),
    (["bench", "--peers", "--target", "decode-bs1"], "--target is for --plan; give that, or leav"),
    (["bench", "--plan", "gone.toml"], "no plan at gone.toml; name a plan.toml, or a run's folder"),
    (["bench", "--rows", "1"], "--rows is for --peers; give that, or leave it out"),
    (["bench", "--workers", "2"], "--workers is for --evaluations; give that, or leave it out"),
    (["bench", "--seconds", "2"], "--seconds is for --peers or --plan or several targets; give"),
    (["bench", "--budget-minutes", "2"], "--budget-minutes is for --peers or --curve; give that"),
    (["bench", "--peers", "--minutes", "2"], "--minutes is for the baselines of one target; give"),
    (
        ["bench", "--peers", "--beyond-domain"],
        "--beyond-domain is for --curve or --plan; give that",
    ),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[" ".join(w)[-40:] for w, _ in BAD])
def test_bad_input_is_one_line(words, message):
    with pytest.raises(UserError, match=message) as caught:
        main(words)
    assert "\n" not in str(caught.value)


def test_a_change_for_another_device_says_what_there_is(change_file):
    path = Path(change_file(HONEST))
    path.write_text(path.read_text().replace('("cpu", "cuda")', '("cuda",)'))
    with pytest.raises(UserError) as caught:
        main(["verify", str(path), "--model", TOY, "--device", "cpu"])
    assert str(caught.value) == "change by-hand has nothing for cpu, only torch (on cuda)"


PLAN = """
model = "beam"
device = "NVIDIA H200"

[[change]]
name = "parallel_projection"
backend = "triton"
[change.knobs."D=256,M=1,O=128"]
warps = 1
rows = 1
block = 256
stages = 1
engine = "cutedsl"
hold = "shared"
"""


@pytest.mark.parametrize("what", [["--peers", "--rows", "1"], ["--target", "decode-bs8"]])
def test_a_plan_of_another_device_says_what_it_needs(what, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN)
    with pytest.raises(UserError) as caught:
        main(["bench", "--plan", str(plan), "--preset", "mini", "--device", "cpu", *what])
    assert str(caught.value) == (
        f"{plan}: engine 'cutedsl' cannot run here: it needs a CUDA device; or take engine 'triton'"
    )


USAGE = [
    ([], "error: the following arguments are required: COMMAND; see python -m harness --help"),
    (
        ["bench", "--minutes", "0"],
        "error: argument --minutes: '0' is not a finite number above 0; see ",
    ),
    (
        ["aa", "--comparisons", "x"],
        "error: argument --comparisons: 'x' is not a whole number of at least 1; see ",
    ),
    (["verify", "x", "--seed", "99999999999999999999"], "error: argument --seed: '999999999999999"),
    (["mutants", "--budget-minutes", "inf"], "error: argument --budget-minutes: 'inf' is not a f"),
]


@pytest.mark.parametrize(("words", "line"), USAGE, ids=[" ".join(w) for w, _ in USAGE])
def test_bad_usage_is_one_line_at_once(words, line):
    start = time.perf_counter()
    command = [sys.executable, "-m", "harness", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1
    assert time.perf_counter() - start < 5
