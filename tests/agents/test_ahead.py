"""Change files of a run with workers: proposed together, judged at once, each verdict used once."""

import contextlib
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from agents.ahead import Ahead
from agents.budget import Budget
from agents.given import Given
from agents.progress import Progress
from agents.proposers.base import Context
from agents.proposers.catalog import Catalog
from agents.sandboxed import Gate
from agents.session import Session
from harness.executors.base import Place
from harness.executors.here import Here
from harness.ledger import Ledger
from harness.workload import Workload
from tests.agents.test_sandboxed import HARNESS, RUN
from tests.harness.evaluated import START

FILES = [str(HARNESS / "cheats" / f"{name}.py") for name in ("exits", "slows_reference", "spies")]


def test_what_waits_is_judged_as_many_at_once_as_there_are_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = itertools.count(40)
    monkeypatch.setattr("agents.ahead.seeds.draw", lambda: next(drawn))
    workload = Workload.load(str(HARNESS / "toy_model.py"), "toy", "cpu")
    ledger = Ledger.create(tmp_path / "run")
    ledger.append("run", RUN)
    looked: list[str] = []
    context = Context(
        model=workload.model, device_type="cpu", opportunities=(), tried=frozenset(), effect_us=0.0
    )
    given = Given(FILES, Catalog(), lambda file: looked.append(file))
    assert [s.proposal.change for s in given.propose(context)] == FILES
    suggestions = given.propose(context)
    assert looked == FILES  # each once
    with contextlib.closing(Here(START)) as executor:
        executor.workers = executor.workers + (Place(name="another", device="cpu", host="here"),)
        progress = Progress(Budget(60.0))
        session = Session(workload, ledger, "decode-bs1", Budget(60.0), progress, executor=executor)
        gate = Gate(workload.model, workload, ledger, print, required=False, executor=executor)
        with contextlib.closing(gate):
            ahead = Ahead(session, lambda: gate, all_gated=False)
            first, second, third = ahead.of(suggestions)
            own = [replace(s, foreign=False) for s in suggestions]
            assert ahead.of(own) == own  # known code is not asked for
            alone = Ahead(
                Session(workload, ledger, "decode-bs1", Budget(60.0), progress), lambda: gate, True
            )
            assert alone.of(own) == own  # nor anything without workers
    assert first.beforehand is not None and second.beforehand is not None
    assert first.beforehand.verdict.reason == "ended with exit status 0 before it answered"
    assert second.beforehand.verdict.reason == "replaces AddNorm.forward"
    assert [first.beforehand.verdict.seed, second.beforehand.verdict.seed] == [40, 41]
    assert third.beforehand is None
