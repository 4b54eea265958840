"""A round on the toy model: judged and timed at region level, put in order, nothing done twice."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from agents import search
from agents.budget import Budget
from agents.claude.desk import Desk
from agents.claude.options import MODEL, Options
from agents.claude.spend import Spent
from agents.loop import Loop
from agents.progress import Progress
from agents.proposers.claude import SPENT, Claude
from agents.rounds import Rounds
from agents.session import Session
from harness.environment import device_name
from harness.evaluation import evaluator
from harness.executors.here import Here
from harness.records import Status
from harness.workload import Workload
from optimized.catalog import load_change
from optimized.change import apply_change, share
from tests.agents import killers
from tests.agents.test_claude_run import BREAKS, HONEST, text
from tests.agents.test_search import attempt

SLOW = """
        import time
        time.sleep(0.0005)
        return honest(node, x)
"""
ALSO = """
        return honest(node, x * 1.0)
"""
BODIES = {"slow": SLOW, "breaks": BREAKS, "fast": HONEST, "also": ALSO}


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    monkeypatch.setattr("harness.outside.SLOPE_S", 0.02)  # a change is slower by 500 us a call
    ledger = killers.begun(tmp_path / "run")
    budget = Budget(10.0)
    workload = Workload.load(killers.TOY, "toy", "cpu")
    session = Session(workload, ledger, "decode-bs1", budget, Progress(budget))
    loop = Loop(session, "auto", None)
    yield loop
    if loop.gate is not None:
        loop.gate.close()


def submitted(folder: Path) -> list[tuple[str, str]]:
    for name, body in BODIES.items():
        (folder / f"{name}.py").write_text(text(name, body))
    return [(str(folder / f"{name}.py"), f"{name} it is") for name in BODIES]


def test_the_fastest_goes_on_and_what_fails_slows_its_region_or_is_beaten_does_not(
    loop: Loop, tmp_path: Path
) -> None:
    rounds = Rounds(Desk(loop.session, loop.open_gate))
    files = submitted(tmp_path)
    made = {Path(s.proposal.change).stem: s for s in rounds.suggestions(files, loop.context())}
    assert set(list(made)[:2]) == {"breaks", "slow"}
    assert [made[name].settled for name in BODIES] == [True, True, False, False]
    known = {name: s.beforehand for name, s in made.items()}
    assert known["slow"] is not None and known["slow"].verdict.passed
    assert (known["slow"].refused or "").startswith("its region gets slower with it: one call of ")
    assert known["breaks"] is not None
    assert (known["breaks"].verdict.reason or "").startswith("rounds to BF16 at ")
    assert made["fast"].foreign and made["fast"].proposal.hypothesis == "fast it is"
    assert len({e.verdict.seed for e in search.evaluated(loop.ledger).values()}) == 4

    before = loop.ledger.path.read_bytes()
    again = Rounds(Desk(loop.session, loop.open_gate)).suggestions(files, loop.context())
    assert [s.proposal.change for s in again] == [s.proposal.change for s in made.values()]
    assert loop.ledger.path.read_bytes() == before  # nothing was judged again

    refused = loop.attempt(made["breaks"])
    assert (refused.status, refused.latency) == (Status.REJECTED, None)
    assert refused.reason.startswith("region verdict: rounds to BF16 at ")
    refused = loop.attempt(made["slow"])
    assert refused.status is Status.REJECTED and refused.region_verdict is not None
    assert refused.reason.startswith("its region gets slower") and refused.region_verdict.passed

    best = list(made.values())[2].proposal.change
    gains = {e.file: e.time.gain_us for e in search.evaluated(loop.ledger).values() if e.time}
    assert gains[best] == max(gains.values())
    loop.ledger.append("attempt", attempt(best, Status.KEPT))
    model = share(loop.session.reference)
    apply_change(model, load_change(best), "torch")
    (left,) = rounds.suggestions(files, replace(loop.context(), model=model))
    assert left.beforehand is not None and left.settled
    assert (left.beforehand.refused or "").startswith(
        f"{Path(best).name} of the same round was kept in its place: one call of scaled_norm gains "
    )


def test_a_plateau_ends_the_search_before_anything_more_is_proposed(loop: Loop) -> None:
    for number in range(3):
        assert loop.ending() is None
        search.begin(loop.ledger, [f"{number}.py"])
        loop.ledger.append("attempt", attempt(f"{number}.py", Status.REJECTED))
    stop = loop.search()
    assert stop is not None and stop.reason == "plateau"
    assert loop.ledger.last("proposals") is None


def test_what_one_answer_submitted_shares_its_cost_and_is_charged_once(loop: Loop) -> None:
    options = Options(model=MODEL, effort=None, budget_usd=1.0, budget_tokens=None)
    claude = Claude(Desk(loop.session, loop.open_gate), options)
    for _ in range(2):  # as in a continued run
        claude.charge(["a.py", "b.py"], Spent(input=201, output=100))
    claude.charge(["c.py"], Spent(input=301, output=150))
    claude.charge([None], Spent(input=301, output=150))
    claude.charge([None], Spent(input=311, output=151))
    found = [e.data for e in loop.ledger.events() if e.kind == SPENT]
    assert [(d["file"], d["spent"]["input"], d["spent"]["output"]) for d in found] == [
        ("a.py", 101, 50), ("b.py", 100, 50), ("c.py", 100, 50), (None, 10, 1)
    ]  # fmt: skip
    assert found[-1]["total"]["input"] == 311
    assert found[1]["usd"] == pytest.approx((100 * 4 + 50 * 20) / 1e6)


@pytest.mark.long
def test_on_an_executor_the_worker_is_recorded(loop: Loop, tmp_path: Path) -> None:
    name = device_name(loop.workload.device)
    executor = loop.session.executor = Here(partial(evaluator, "cpu", name))
    try:
        rounds = Rounds(Desk(loop.session, loop.open_gate))
        made = rounds.suggestions(submitted(tmp_path)[1:3], loop.context())
    finally:
        executor.close()
    assert [s.settled for s in made] == [True, False]
    found = list(search.evaluated(loop.ledger).values())
    assert [(e.verdict.passed, e.time is not None) for e in found] == [(False, False), (True, True)]
    assert all((e.worker or "").startswith("this process (cpu, ") for e in found)
    assert found[1].call is not None and found[1].region == "scaled_norm"
