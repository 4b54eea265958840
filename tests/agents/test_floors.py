"""A run's floor is that of the step that it found, whatever its candidates are traced to read."""

from pathlib import Path

import pytest

from agents.budget import Budget
from agents.progress import Progress
from agents.session import Session
from harness import workload as sizes
from harness.floors import least_work
from harness.ledger import Ledger
from harness.records import Ceilings
from harness.workload import Workload

TOY = str(Path(__file__).with_name("toy_model.py"))
CEILINGS = Ceilings(
    device_name="made up",
    read_gb_per_s=1.0,
    copy_gb_per_s=1.0,
    bf16_tflop_per_s=1.0,
    fp32_tflop_per_s=1.0,
    launch_us=1.0,
)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    budget = Budget(0.5)
    ledger = Ledger.create(tmp_path / "run")
    ledger.append("ceilings", CEILINGS)
    workload = Workload.load(TOY, "toy", "cpu")
    return Session(workload, ledger, "decode-bs1", budget, Progress(budget))


def test_the_floor_is_the_first_traces(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    vars(session)["prefill_floor_us"] = 7.0  # a cached property; a large model's takes minutes
    monkeypatch.setattr(sizes, "TOY_PARAMETERS", 0)
    assert session.floors_us()["decode"] is None
    for when, nbytes in (("before", 6_000_000), ("after", 5_000_000)):
        session.ledger.append("kernels", {"when": when, "compulsory_bytes": nbytes})
    assert session.floors_us() == {"decode": 6000.0, "prefill": 7.0}


def test_a_toys_weights_may_stay_in_a_cache(session: Session) -> None:
    session.ledger.append("kernels", {"when": "before", "compulsory_bytes": 6_000_000})
    assert session.floors_us() == {"decode": None, "prefill": None}


def test_a_decode_that_is_not_traced_reads_its_weights_and_its_cache(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    vars(session)["prefill_floor_us"] = 7.0
    monkeypatch.setattr(sizes, "TOY_PARAMETERS", 0)
    session.measure.target = "prefill-8x2048"
    session.ledger.append("kernels", {"when": "before", "compulsory_bytes": 6_000_000})
    target = session.measure.targets["decode"]
    weights, _ = least_work(session.reference, session.measure.inputs("decode").args)
    both = weights + session.workload.cache_bytes(target)
    found = session.floors_us()["decode"]
    assert found == pytest.approx(both / session.ceilings.read_gb_per_s / 1e3)
    assert both > weights > 0
