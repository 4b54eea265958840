"""A run's certificates: written when a change is kept, the same bytes from the ledger."""

import dataclasses
from pathlib import Path

import pytest

from agents.certificates import EVENT, certify, enabled, restore
from harness.certificate import Certificate
from harness.certify import judge_change
from harness.environment import environment
from harness.ledger import Ledger
from harness.records import Attempt, Latency, Paired, Status
from harness.workload import Workload
from optimized.plan import Enabled

TOY = str(Path(__file__).with_name("toy_model.py"))
TIMED = {"decode": "decode-bs1", "prefill": "prefill-8x2048"}
PAIR = Paired(
    base_us=100.0,
    candidate_us=90.0,
    candidate_interval_us=(89.0, 91.0),
    gain_us=10.0,
    gain_interval_us=(9.0, 11.0),
    mde_us=1.0,
    pairs=9,
)
CHANGE = """
from optimized.change import Change, Contract, Implementation

CHANGE = Change(
    name="again", region="{region}", summary="the same", contract=Contract(numerics="reduction"),
    implementations=(
        Implementation(backend="torch", devices=("cpu",), build=lambda node, _: node.forward),
    ),
)
"""


def toy_regions() -> list[str]:
    from harness.selftest import regions

    return list(regions(Workload.load(TOY, "toy", "cpu").model))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Ledger, Workload]:
    """A ledger with two kept changes, the second judged on the first, both certified."""
    folder = tmp_path_factory.mktemp("run")
    workload = Workload.load(TOY, "toy", "cpu")
    ledger = Ledger.create(folder / "run")
    ledger.append("run", {"schema": 1})
    ledger.append("environment", environment(workload.device))
    parents: list[Enabled] = []
    for index, region in enumerate(toy_regions()[:2], start=3):
        file = folder / f"change_{index}.py"
        file.write_text(CHANGE.replace("{region}", region))
        line = Enabled(name=str(file), backend="torch")
        judged = judge_change(
            workload, line, parents, targets=tuple(TIMED.values()), region_seed=index
        )
        assert judged.region_verdict.passed, judged.region_verdict.reason
        attempt = Attempt(
            index=index,
            name=line.name,
            region=region,
            backend="torch",
            status=Status.KEPT,
            reason="decode gained 10.0 us",
            predicted_us=None,
            bound_us=None,
            knobs={},
            region_verdict=judged.region_verdict,
            model_verdict=None,
            latency=Latency(decode=PAIR, prefill=PAIR),
            control=None,
            parent=None,
            seconds=1.0,
        )
        ledger.append("attempt", attempt)
        certify(ledger, workload, TIMED, None, generated=None)
        parents.append(enabled(attempt))
    return ledger, workload


def files(ledger: Ledger) -> dict[str, bytes]:
    found = sorted((ledger.directory / "prs").glob("*/certificate.json"))
    return {path.parent.name: path.read_bytes() for path in found}


def test_each_kept_change_has_one_in_a_folder_of_its_own(run):
    ledger, workload = run
    assert list(files(ledger)) == ["03-change-3", "04-change-4"]
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
    before = files(ledger)
    for name in before:
        (ledger.directory / "prs" / name / "certificate.json").unlink()
    assert restore(ledger, workload, TIMED, None) is None
    assert files(ledger) == before
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
    assert [e.kind for e in cut.events()][-2:] == ["resumed", EVENT]


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
    assert list(files(cut)) == ["03-change-3"]


def test_what_a_plan_enables_has_the_domain(run):
    ledger, _ = run
    attempt = ledger.all("attempt", Attempt)[0]
    assert enabled(attempt).domain == attempt.region_verdict.domain
    old = dataclasses.replace(
        attempt, region_verdict=dataclasses.replace(attempt.region_verdict, domain=None)
    )
    assert enabled(old).domain is None
