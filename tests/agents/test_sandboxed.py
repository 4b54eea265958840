"""A run that requires the sandbox: what its gate says, what the ledger and the reports hold."""

import subprocess
from pathlib import Path

import pytest

from agents.sandboxed import Gate, needed, objects
from harness.errors import UserError
from harness.ledger import Ledger
from harness.protections import PROTECTIONS
from harness.records import SCHEMA
from harness.workload import Workload
from reports.run import Run

HARNESS = Path(__file__).parents[1] / "harness"
RUN = {
    "schema": SCHEMA,
    "target": "decode-bs1",
    "model": "toy",
    "preset": "toy",
    "device": "cpu",
    "proposer": "auto",
    "seed": 0,
}


def test_a_run_reads_the_objects_that_its_repository_borrows_and_not_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    subprocess.run(["git", "init", "--quiet", first], check=True)
    for source, made in ((first, second), (second, third)):
        subprocess.run(["git", "clone", "--quiet", "--shared", source, made], check=True,
                       capture_output=True)  # fmt: skip
    places = [first, second, third]
    assert {p.resolve() for p in objects(third)} == {p / ".git" / "objects" for p in places}
    assert objects(tmp_path) == []
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"{home}:{home}/bin:{tmp_path}:/usr/bin")
    found = needed("model.py")
    assert home / "bin" in found and Path("/usr/bin") in found and Path("model.py") in found
    assert home not in found and tmp_path not in found
    assert all(path not in found for path in (home / ".netrc", home / ".config"))


def test_the_gate_judges_in_a_worker_and_says_what_protects(tmp_path):
    workload = Workload.load(str(HARNESS / "toy_model.py"), "toy", "cpu")
    ledger = Ledger.create(tmp_path / "run")
    ledger.append("run", RUN)
    said: list[str] = []
    try:
        gate = Gate(workload.model, workload, ledger, said.append)
    except UserError as error:
        pytest.skip(f"this machine lacks a protection: {error}")
    try:
        honest = gate.verdict(str(HARNESS / "cheats" / "honest_one_pass.py"), "torch", 3)
        assert honest.passed and honest.cases > 10
        exits = gate.verdict(str(HARNESS / "cheats" / "exits.py"), "torch", 3)
        assert exits.reason == "ended with exit status 0 before it answered"
        missing = gate.verdict(str(HARNESS / "cheats" / "exits.py"), "cutedsl", 3)
        assert missing.reason == "change exits has no backend 'cutedsl'; it has: torch"
        patched = gate.verdict(str(HARNESS / "cheats" / "slows_reference.py"), "torch", 3)
        assert patched.reason == "replaces AddNorm.forward"
    finally:
        gate.close()
    assert said[0].startswith(f"sandbox: {len(PROTECTIONS)} of {len(PROTECTIONS)} protections")
    read = Run.load(ledger.directory).protections
    assert [row.name for row in read] == list(PROTECTIONS)
    assert all(row.in_force and row.by for row in read)
