"""A run's certificates: written when a change is kept, the same bytes from the ledger."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from agents.certificates import EVENT, certify, compile_kept, restore
from agents.grounds import ground_of
from agents.stack import enabled, plan_for, stack
from harness.bisect import read_run
from harness.certificate import Certificate
from harness.environment import cpu_name, environment
from harness.errors import UserError
from harness.ledger import Ledger
from harness.records import Attempt
from harness.workload import Workload
from optimized.catalog import changes
from optimized.plan import Plan
from optimized.plan_text import place
from reports.pr_record import COMMITTED, COMPILED, GROUND, Compiled, Ground
from tests.agents.bundle_run import TIMED, main

TOY = str(Path(__file__).with_name("toy_model.py"))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Ledger, Workload]:
    """A ledger with two kept changes, the second judged on the first, both certified."""
    return main(tmp_path_factory.mktemp("run"), TOY)


def files(ledger: Ledger, name: str = "certificate.json") -> dict[str, bytes]:
    found = sorted((ledger.directory / "prs").glob(f"*/{name}"))
    return {path.parent.name: path.read_bytes() for path in found}


def test_each_kept_change_has_one_in_a_folder_of_its_own(run):
    ledger, workload = run
    assert list(files(ledger)) == ["03-again-3", "04-again-4"]
    first, second = (Certificate.load(p) for p in sorted(ledger.directory.glob("prs/*/*.json")))
    assert first.parents == ()
    (parent,) = second.parents
    assert parent.name == first.change.name
    assert parent.domain == first.region_verdict.domain is not None
    assert second.change.domain is None and second.region_verdict.domain is not None
    assert (second.region_seed, second.timed) == (4, TIMED)
    assert second.latency is not None and second.latency.decode.pairs == 9


def test_they_are_rebuilt_from_the_ledger_bit_by_bit(run):
    ledger, workload = run
    before, patches = files(ledger), files(ledger, "change.patch")
    for name in before:
        (ledger.directory / "prs" / name / "certificate.json").unlink()
        (ledger.directory / "prs" / name / "change.patch").unlink()
    assert restore(ledger, workload, TIMED, None) is None
    assert files(ledger) == before and files(ledger, "change.patch") == patches
    assert len(ledger.all(EVENT, Certificate)) == 2


def test_one_that_a_kill_prevented_is_made_when_the_run_goes_on(run, tmp_path):
    ledger, workload = run
    cut = Ledger.create(tmp_path / "run")
    events = list(ledger.events())
    for event in events[:-1]:  # the last is the second certificate
        cut.append(event.kind, event.data)
    here = environment(workload.device)
    cut.append("resumed", dataclasses.replace(here, temperature_c=50))
    assert restore(cut, workload, TIMED, None) is None
    assert files(cut) == files(ledger)
    assert [e.kind for e in cut.events()][-4:] == ["resumed", GROUND, COMMITTED, EVENT]
    assert files(cut, "change.patch").keys() == files(ledger, "change.patch").keys()


def test_what_other_files_judged_is_not_certified(run, tmp_path):
    ledger, workload = run
    cut = Ledger.create(tmp_path / "run")
    for event in list(ledger.events())[:-1]:
        cut.append(event.kind, event.data)
    later = dataclasses.replace(environment(workload.device), git_commit="another")
    cut.append("resumed", later)
    assert restore(cut, workload, TIMED, None) == (
        "not certified, since other files may have judged it: "
        + ledger.all("attempt", Attempt)[1].name
    )
    assert list(files(cut)) == ["03-again-3"]


def test_kernels_are_compiled_for_every_target_once_all_is_timed(run, tmp_path, monkeypatch):
    """Of the kept changes that have some, each once, and shown in their bundles."""
    ledger, _ = run
    shutil.copytree(ledger.directory, tmp_path / "run", symlinks=True)
    (tmp_path / "run" / ledger.path.name).unlink()
    shutil.rmtree(tmp_path / "run" / "prs")
    end = Ledger.create(tmp_path / "run")
    for event in ledger.events():
        triton = {"backend": "triton"} if event.kind == "attempt" else {}
        end.append(event.kind, event.data | triton)
    asked = []

    def compiling(index, modules, root=None):
        asked.append((index, "again_3" in modules, root is not None))
        return Compiled(index=index, kernels=(), absent=f"no kernel in {index}")

    monkeypatch.setattr("agents.certificates.compiled", compiling)
    for _ in range(2):
        compile_kept(end)
    assert sorted(asked) == [(3, True, True), (4, False, True)]
    assert [c.index for c in end.all(COMPILED, Compiled)] == [3, 4]
    page = (end.directory / "prs" / "04-again-4" / "PR.md").read_text()
    assert "no kernel in 4" in page


def test_what_a_plan_enables_has_the_domain(run):
    ledger, _ = run
    attempt = ledger.all("attempt", Attempt)[0]
    assert enabled(attempt).domain == attempt.region_verdict.domain
    old = dataclasses.replace(
        attempt, region_verdict=dataclasses.replace(attempt.region_verdict, domain=None)
    )
    assert enabled(old).domain is None


def test_a_patch_that_cannot_be_made_says_why(run, tmp_path):
    ledger, _ = run
    attempt = ledger.all("attempt", Attempt)[0]
    made = ledger.all(EVENT, Certificate)[0]
    plan = place(made.model, made.environment.device_name)
    found = ground_of(attempt, made, started=("another",))
    assert found.obstacle == (
        f"{plan} enables nothing, which is not what this run stood on; "
        f"start a run with --plan {plan}"
    )
    clash = tmp_path / "clash.py"
    known = next(iter(changes()))
    clash.write_text(Path(attempt.name).read_text().replace("again-3", known))
    found = ground_of(dataclasses.replace(attempt, name=str(clash)), made, started=())
    assert found.obstacle == f"optimized/ has a change called {known} already; rename this one"
    there = dataclasses.replace(made.environment, git_commit="0" * 40 + "+dirty")
    found = ground_of(attempt, dataclasses.replace(made, environment=there), started=())
    assert found.obstacle == f"commit {'0' * 40} of the run is not in this repository"
    assert (found.before, found.files, found.commit) == ({}, {}, "0" * 40)


def test_files_that_differ_from_the_commit_are_named(run):
    ledger, _ = run
    attempt = ledger.all("attempt", Attempt)[0]
    made = ledger.all(EVENT, Certificate)[0]
    judge = {**made.hashes.judge, "harness/never_committed.py": "0" * 64}
    odd = dataclasses.replace(made, hashes=dataclasses.replace(made.hashes, judge=judge))
    found = ground_of(attempt, odd, started=())
    assert "harness/never_committed.py" in found.others
    assert found.files["optimized/again_3.py"] == Path(attempt.name).read_text()


def test_a_run_stands_on_a_plan(run, tmp_path):
    """The first change as a plan, the second kept on it: parents, stack, patch."""
    ledger, workload = run
    first, second = ledger.all("attempt", Attempt)
    file = tmp_path / "plan.toml"
    Plan(model="toy", device="x", changes=(enabled(first),)).save(file)
    begun = plan_for(str(file), workload)
    assert begun is not None and begun.describe() == f"stands on {file}: {first.name}"
    on = Ledger.create(tmp_path / "run")
    header = ledger.last("run") or {}
    on.append("run", {**header, "stands_on": begun.lines()})
    on.append("environment", environment(workload.device))
    assert stack(on) == [enabled(first)]
    on.append("attempt", second)
    certify(on, workload, TIMED, None, generated=None)
    assert stack(on) == [enabled(first), enabled(second)] == list(read_run(on).changes)
    assert Certificate.load(
        next(tmp_path.glob("run/prs/*/certificate.json"))
    ) == dataclasses.replace(
        ledger.all(EVENT, Certificate)[1], environment=environment(workload.device)
    )
    (found,) = on.all(GROUND, Ground)
    assert (found.obstacle or "").endswith(
        "enables nothing, which is not what this run stood on; "
        f"start a run with --plan {place(TOY, cpu_name())}"
    )
    assert plan_for("none", workload) is None
    assert plan_for("auto", workload) is None  # the repository has none for this toy
    wrong = dataclasses.replace(enabled(first), knobs={"N=1": {"warps": 1}}, name="nope")
    Plan(model="toy", device="x", changes=(wrong,)).save(file)
    with pytest.raises(UserError, match=f"{file}: unknown change 'nope'"):
        plan_for(str(file), workload)
