"""A model in a process of its own: its fingerprints and its times, as orders ask."""

import io
import json
import os
import subprocess
import sys

import pytest
import torch

from harness import rig
from harness.workload import Workload
from optimized.change import share
from tests.layout import ROOT

ORDER = {
    "model": "tests/agents/toy_model.py", "preset": "auto", "device": "cpu", "seed": 0,
    "target": "decode-bs1", "plan": None,
}  # fmt: skip


def served(*orders: dict) -> list[dict]:
    out = io.StringIO()
    rig.serve(iter(json.dumps(order) for order in orders), out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_it_answers_with_times_and_the_same_points_twice() -> None:
    first, times, points, again = served(
        ORDER, {"take": "prefill", "count": 3}, {"points": True}, {"points": True}
    )
    assert first["environment"]["device"] == "cpu"
    assert len(times["us"]) == 3 and min(times["us"]) > 0
    assert points == again and points["unstable"] == []
    names = list(points["points"])
    assert any(n.startswith("reference, decode after it: ") for n in names)
    assert {"result, ragged prefill: blocks.0.mixer", "result, decode after it: the output"} <= (
        set(names)
    )


def test_a_failure_is_an_answer_and_the_last_one() -> None:
    answers = served({**ORDER, "preset": "huge"}, {"points": True})
    assert len(answers) == 1 and "no preset 'huge'" in answers[0]["error"]


def test_one_rounding_shows_from_its_point_on() -> None:
    workload = Workload.load(ORDER["model"], "auto", "cpu")
    unchanged, changed = share(workload.model), share(workload.model)
    norm = changed.blocks[1].norm
    forward = norm.forward
    norm.forward = lambda x: forward(x).float().mul(1 + 2**-7).bfloat16()

    def points(model: torch.nn.Module) -> dict[str, str]:
        clock = rig.Clock(workload.device)
        made = rig.Rig(workload=workload, target="decode-bs1", result=model, clock=clock)
        return made.points()["points"]

    before, after = points(unchanged), points(changed)
    other = [name for name in before if before[name] != after[name]]
    assert other[0] == "result, ragged prefill: blocks.1.norm"
    assert not any("blocks.0" in name or name.startswith("reference") for name in other)


def test_a_plan_is_applied(tmp_path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('model = "toy"\ndevice = "cpu"\n[[change]]\nname = "nothing"\nbackend = "a"\n')
    (answer,) = served({**ORDER, "plan": str(plan)})
    assert "nothing" in answer["error"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_a_mark_tells_every_bit_in_its_place(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1, 0, 0], [0, 1, 1]]).to(dtype)
    assert rig.mark(tensor) == rig.mark(tensor.clone())
    moved = tensor.flip(0)
    assert sorted(moved.flatten().tolist()) == sorted(tensor.flatten().tolist())
    others = [moved, tensor.t(), tensor.reshape(3, 2), tensor.flip(1)]
    marks = {rig.mark(t) for t in (tensor, *others)}
    assert len(marks) == 1 + len(others)
    name = str(dtype).removeprefix("torch.")
    assert rig.mark(tensor).endswith(f"{name} [2, 3]")


@pytest.mark.skipif(sys.platform != "linux", reason="addresses are fixed on Linux alone")
def test_addresses_are_the_same_in_every_process_where_that_is_allowed() -> None:
    code = "from harness.rig import unrandomised; unrandomised(); print(id(object()))"
    allowed = "import ctypes; print(ctypes.CDLL(None).personality(0x0040000))"

    def said(words: str) -> str:
        command = [sys.executable, "-c", words]
        environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout

    if said(allowed).strip() == "-1":
        pytest.skip("this container forbids personality(2)")
    assert said(code) == said(code)


def test_a_mark_tells_signed_zeros_apart() -> None:
    zeros = torch.zeros(4, dtype=torch.bfloat16)
    assert rig.mark(zeros) != rig.mark(-zeros)
