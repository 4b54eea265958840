"""Certificates: made of a judged change, the same bytes each time, and certified or not."""

import dataclasses
import functools
import json
from pathlib import Path

import pytest

from harness.__main__ import main
from harness.certificate import (
    NAME,
    Certificate,
    changed_hashes,
    differences,
    folder_of,
    hashes,
    imported,
)
from harness.certify import certificate, enabled_of, judge_change
from harness.command_certify import apart
from harness.environment import environment
from harness.errors import UserError
from harness.records import Latency, Paired
from harness.workload import Workload
from optimized.catalog import FOLDER
from optimized.plan import Enabled

SEED = 5
TARGETS = "decode-bs1", "prefill-8x2048"
CHANGE_FILE = '''"""SwiGLU with the silu's product in place."""

import torch.nn.functional as F

from optimized.change import Change, Contract, Implementation
from optimized.gemv import MAX_ROWS


def build(node, knobs):
    def forward(gate, up):
        return F.silu(gate.float(), inplace=True).mul_(up).to(gate.dtype)

    return forward


CHANGE = Change(
    name="by-hand",
    region="swiglu",
    summary="one FP32 buffer",
    contract=Contract(numerics="transcendental"),
    implementations=(Implementation(backend="torch", devices=("cpu",), build=build),),
)
'''

TOY = str(Path(__file__).with_name("toy_model.py"))
TOY_CHANGE = '''"""The toy's normed sum, written once more."""

import torch

from optimized.change import Change, Contract, Implementation


def build(node, knobs):
    def forward(x, residual):
        residual = residual + x
        wide = residual.float()
        wide = wide - wide.mean(-1, keepdim=True)
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return residual, scaled.to(x.dtype) * node.weight + node.bias

    return forward


CHANGE = Change(
    name="norm",
    region="add_norm",
    summary="the same",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu",), build=build),),
)
'''


def paired(gain_us: float) -> Paired:
    return Paired(
        base_us=100.0,
        candidate_us=100.0 - gain_us,
        candidate_interval_us=(90.0, 99.0),
        gain_us=gain_us,
        gain_interval_us=(gain_us - 1e5, gain_us + 1e5),  # overlaps whatever is measured here
        mde_us=0.5,
        pairs=9,
    )


def certificate_of(workload: Workload, enabled: Enabled) -> Certificate:
    """Of a change judged directly, on the model without another change."""
    judged = judge_change(workload, enabled, targets=TARGETS, region_seed=SEED)
    assert judged.region_verdict.passed, judged.region_verdict.reason
    return certificate(
        workload,
        enabled,
        (),
        region_verdict=judged.region_verdict,
        model_verdict=None,
        latency=Latency(decode=paired(2.0), prefill=paired(3.0)),
        environment=environment(workload.device),
        timed=dict(zip(("decode", "prefill"), TARGETS, strict=True)),
        layers_per_kind=None,
        generated=judged.generated,
    )


@pytest.fixture(scope="module")
def change_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("change") / "by_hand.py"
    path.write_text(CHANGE_FILE)
    return path


@pytest.fixture(scope="module")
def made(change_file) -> Certificate:
    workload = Workload.load("beam", "mini", "cpu")
    return certificate_of(workload, Enabled(name=str(change_file), backend="torch"))


@pytest.fixture
def certified(tmp_path, capsys):
    """Runs `certify` on a certificate: its exit code and what it printed."""

    def run(given: Certificate, *words: str) -> tuple[int, str]:
        path = given.save(tmp_path)
        code = main(["certify", str(path), *words])
        return code, capsys.readouterr().out

    return run


def test_it_holds_what_was_judged_and_on_which_calls(made, tmp_path):
    verdict = made.region_verdict
    assert (made.region, made.model, made.preset, made.region_seed) == ("swiglu", "beam", "mini", 5)
    assert verdict.targets == TARGETS
    assert [o.output for o in verdict.outputs] == [
        "out", "decode-bs1: out", "prefill-8x2048: out"
    ]  # fmt: skip
    assert all(output.bit_equal_share == 1.0 for output in verdict.outputs)
    gates = [call.arguments["gate"] for call in verdict.domain.calls]
    dense = next(g for g in gates if len(g.sizes) == 3)
    assert dense.sizes[:2] == ((1, 8), (1, 64))  # the prefill's 8 x 64, cut down for a toy
    assert dense.sizes[2][0] == dense.sizes[2][1]
    assert set(made.hashes.kernel) >= {"by_hand.py", "optimized/change.py", "optimized/gemv.py"}
    assert "optimized/swiglu.py" not in made.hashes.kernel
    assert {"reference/beam.py", "reference/layers.py"} <= set(made.hashes.oracle)
    assert {"harness/examine.py", "harness/certificate.py"} <= set(made.hashes.judge)
    path = made.save(tmp_path / "prs" / "01-by-hand")
    assert path.name == NAME
    assert Certificate.load(path) == made
    assert Certificate.load(path).save(tmp_path / "again").read_bytes() == path.read_bytes()


def test_the_same_seed_reproduces_it(made, certified):
    code, out = certified(made)
    assert (code, out.splitlines()[-1]) == (0, "reproduced"), out
    assert "region verdict: as certified" in out


def test_times_are_taken_again(tmp_path, certified):
    path = tmp_path / "norm.py"
    path.write_text(TOY_CHANGE)
    made = certificate_of(
        Workload.load(TOY, "toy", "cpu"), Enabled(name=str(path), backend="torch")
    )
    code, out = certified(made, "--time", "--seconds", "0.1")
    assert (code, out.splitlines()[-1]) == (0, "reproduced"), out
    assert "decode gain, us: 2.0 [" in out


def test_intervals_that_do_not_meet_differ():
    def of(decode: tuple[float, float]) -> Latency:
        pair = dataclasses.replace(paired(2.0), gain_interval_us=decode)
        return Latency(decode=pair, prefill=paired(3.0))

    assert apart(of((1.0, 2.0)), of((2.0, 9.0))) == []
    assert apart(of((1.0, 2.0)), of((3.0, 9.0))) == [
        "decode.gain_interval_us: [1.0, 2.0], here [3.0, 9.0]"
    ]


def test_a_changed_kernel_another_seed_and_a_forged_count_are_found(made, certified, change_file):
    """All three at once, since each verdict takes seconds."""
    verdict = made.region_verdict
    first = verdict.outputs[0]
    histogram = {**first.histogram, "1": 7}
    forged = dataclasses.replace(
        verdict,
        outputs=(dataclasses.replace(first, histogram=histogram), *verdict.outputs[1:]),
    )
    kernel = {**made.hashes.kernel, "by_hand.py": "0" * 64}
    changed = dataclasses.replace(
        made,
        region_seed=SEED + 1,
        region_verdict=forged,
        hashes=dataclasses.replace(made.hashes, kernel=kernel),
        contract=dataclasses.replace(made.contract, batch_invariant=True),
    )
    code, out = certified(changed)
    assert code == 1
    assert "hashes: 1 difference(s)\n  kernel: by_hand.py\n" in out
    assert "  seed: 5, here 6\n" in out
    assert "  outputs[0].histogram.1: 7, here 0\n" in out
    assert "contract: 1 difference(s)\n  batch_invariant: True, here False\n" in out
    last = out.splitlines()[-1]
    assert last.startswith("differs: hashes: kernel: by_hand.py; contract: batch_invariant")
    assert "region verdict: " in last


def test_on_another_kind_of_device_only_the_outcome_counts(made, certified):
    elsewhere = dataclasses.replace(made.environment, device_name="another processor")
    broken = dataclasses.replace(
        made,
        environment=elsewhere,
        region_verdict=dataclasses.replace(made.region_verdict, cases=3),
    )
    code, out = certified(broken, "--json")
    found = json.loads(out)
    assert (code, found["reproduced"]) == (0, True), found["differences"]
    assert found["other"][0].startswith("device_name another processor, here ")
    assert found["differences"]["region verdict"] == []


def bad_files(made: Certificate) -> dict[str, tuple[str, str]]:
    data = json.loads(json.dumps(made.to_json()))
    return {
        "text": ("not json", "is not a certificate: Expecting value"),
        "list": ("[]", "is not a certificate of schema 1 .it has None.; certify it with"),
        "schema": (json.dumps({**data, "schema": 9}), "schema 1 .it has 9."),
        "field": (json.dumps({**data, "more": 1}), r"Certificate has no field \['more'\]"),
        "missing": (json.dumps({"schema": 1}), "missing 1. required keyword-only arguments"),
        "domain": (
            json.dumps({**data, "region_verdict": {**data["region_verdict"], "domain": 3}}),
            "is not a certificate: not a domain",
        ),
        "change": (
            json.dumps({**data, "change": {**data["change"], "name": "nope"}}),
            "unknown change 'nope'; known: ",
        ),
        "file": (
            json.dumps({**data, "change": {**data["change"], "name": "gone.py"}}),
            "no change file at gone.py; certify it where it lies",
        ),
        "model": (json.dumps({**data, "model": "nope"}), "unknown model 'nope'; known: beam"),
    }


CASES = "text", "list", "schema", "field", "missing", "domain", "change", "file", "model"


@pytest.mark.parametrize("what", CASES)
def test_a_bad_file_is_one_line(what, made, tmp_path):
    text, message = bad_files(made)[what]
    path = tmp_path / NAME
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        main(["certify", str(path)])
    assert "\n" not in str(caught.value)


def test_an_absent_file_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"^cannot read .*none.json: No such file"):
        main(["certify", str(tmp_path / "none.json")])


def test_parents_are_applied_with_their_domains(made):
    """Re-making the plan: the parent outside its domain leaves the reference's result."""
    workload = Workload.load("beam", "mini", "cpu")
    parent = enabled_of(dataclasses.replace(made.change, domain=made.region_verdict.domain))
    with pytest.raises(UserError, match="was already replaced by by-hand"):
        judge_change(workload, parent, [parent], targets=(), region_seed=1)


def test_hashes_follow_the_files(tmp_path):
    model = tmp_path / "model.py"
    model.write_text("from reference import cache\nimport torch\n")
    kernel = tmp_path / "kernel.py"
    kernel.write_text("from optimized.gemv import sizes\n")
    take = functools.partial(hashes, kernel, model)
    before = take("# AOT ID: ['0_inference']\nx = 1\n")
    assert set(before.oracle) == {"model.py", "reference/cache.py"}
    assert changed_hashes(before, take("# AOT ID: ['3_inference']\nx = 1\n")) == []
    assert changed_hashes(before, take("x = 2\n")) == ["kernel: generated source"]
    assert changed_hashes(before, take(None)) == ["kernel: generated source is gone"]
    kernel.write_text("from optimized.gemv import sizes  # changed\n")
    assert changed_hashes(before, take("# AOT ID: ['0_inference']\nx = 1\n")) == [
        "kernel: kernel.py"
    ]
    assert FOLDER / "triton_support.py" in imported(kernel, "optimized")


def test_differences_are_named_by_field():
    a = {"x": [1, {"y": 2.0}], "z": None, "gone": 1, "n": float("nan")}
    b = {"x": [1, {"y": 3.0}, 4], "z": 0, "new": 1, "n": float("nan")}
    assert differences(a, b) == [
        "x: 2 items, here 3",
        "x[1].y: 2.0, here 3.0",
        "z: None, here 0",
        "gone: present, here not so",
        "new: absent, here not so",
    ]


def test_a_change_has_a_folder_of_its_own(tmp_path):
    assert folder_of(tmp_path, 7, "inductor:qk_norm") == tmp_path / "prs" / "07-inductor-qk-norm"
    assert folder_of(tmp_path, 12, "some/By_Hand.py") == tmp_path / "prs" / "12-by-hand"
