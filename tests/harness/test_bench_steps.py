"""A plan's steps beside the baselines: what is absent says why, floors add up, a loss exits 1."""

import json
from pathlib import Path

import pytest

from harness.__main__ import main
from harness.bench_steps import StepFigures, Way, figures
from harness.command_steps import against
from harness.errors import ExitCode
from harness.floors import least_work
from harness.records import Ceilings, Paired
from harness.workload import Target, Workload
from optimized.change import share

TOY = str(Path(__file__).parent.parent / "agents" / "toy_model.py")
CEILINGS = Ceilings(
    device_name="a card",
    read_gb_per_s=10.0,
    copy_gb_per_s=9.0,
    bf16_tflop_per_s=1.0,
    fp32_tflop_per_s=1.0,
    launch_us=1.0,
)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


def toy(monkeypatch: pytest.MonkeyPatch) -> Workload:
    workload = Workload.load(TOY, "auto", "cpu")
    monkeypatch.setattr(Workload, "toy", False)  # as if its weights did not fit a cache
    return workload


@pytest.mark.usefixtures("no_compiler")
def test_a_decode_has_every_way_or_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = toy(monkeypatch)
    target = Target(name="small", batch=2, tokens=1, context=16)
    plan = share(workload.model)
    found = figures(workload, target, plan, seconds=0.02, ceilings=CEILINGS)
    assert [way.name for way in found.ways] == ["eager", "graph", "compile", "plan"]
    eager, graph, compiled, planned = found.ways
    assert eager.step is not None and eager.step.median_us > 0
    assert planned.step is not None and planned.step.samples >= 5
    assert graph.absent == "a CPU has no CUDA graphs"
    assert str(compiled.absent).startswith("no C++ compiler (no-such-compiler)")
    assert found.pair is None  # nothing to be set against
    weights = least_work(workload.model, workload.inputs(target).args)[0]
    assert found.weight_floor_us == pytest.approx(weights / 1e4)
    assert found.kv_floor_us == pytest.approx(workload.cache_bytes(target) / 1e4)
    assert found.floor_us == pytest.approx((weights + workload.cache_bytes(target)) / 1e4)


@pytest.mark.usefixtures("no_compiler")
def test_a_prefill_is_bound_by_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = toy(monkeypatch)
    target = Target(name="prompt", batch=1, tokens=64, context=64)
    slow = Ceilings.from_json({**CEILINGS.to_json(), "bf16_tflop_per_s": 1e-3})
    found = figures(workload, target, None, seconds=0.02, ceilings=slow)
    operations = least_work(workload.model, workload.inputs(target).args)[1]
    assert [way.name for way in found.ways] == ["eager", "compile"]
    assert found.floor_us == pytest.approx(operations / 1e3)
    assert found.kv_floor_us is None


def test_a_way_has_a_time_or_a_reason() -> None:
    with pytest.raises(ValueError, match="graph: either a time or a reason"):
        Way(name="graph", step=None)


def pair(gain_us: float) -> Paired:
    return Paired(
        base_us=100.0,
        candidate_us=100.0 - gain_us,
        candidate_interval_us=(0.0, 0.0),
        gain_us=gain_us,
        gain_interval_us=(gain_us - 1.0, gain_us + 1.0),
        mde_us=5.0,
        pairs=9,
    )


@pytest.mark.parametrize(
    ("gain_us", "says"),
    [
        (20.0, "faster, 1.250x; 20.0 us [19.0, 21.0] (smallest detectable effect 5.0 us)"),
        (-25.0, "slower, 0.800x; -25.0 us [-26.0, -24.0] (smallest detectable effect 5.0 us)"),
        (-4.0, "no different, 0.962x; -4.0 us [-5.0, -3.0] (smallest detectable effect 5.0 us)"),
    ],
)
def test_the_pair_in_words(gain_us: float, says: str) -> None:
    one = StepFigures(
        target="t",
        described="a step",
        weight_floor_us=None,
        kv_floor_us=None,
        ways=(),
        pair=pair(gain_us),
    )
    assert against(one) == says


@pytest.mark.usefixtures("no_compiler")
def test_several_targets_and_a_plan_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(
        'model = "beam"\ndevice = "x"\n[[change]]\nname = "swiglu"\nbackend = "torch"\n'
    )
    words = ["bench", "--model", TOY, "--target", "decode-bs1", "decode-bs8", "--seconds", "0.02"]
    assert main([*words, "--out", str(tmp_path / "out")]) == ExitCode.DONE
    found = json.loads((tmp_path / "out" / "steps.json").read_text())
    assert [one["target"] for one in found["steps"]] == ["decode-bs1", "decode-bs8"]
    assert all(len(one["ways"]) == 3 for one in found["steps"])  # no plan was given
    out = capsys.readouterr().out
    assert "decode 8 x 1 token(s), context" in out and "graph: a CPU has no CUDA graphs" in out
    with pytest.raises(Exception, match=r"plan.toml: .*swiglu"):
        main([*words, "--plan", str(plan)])
