"""What a ledger tells a continued run."""

from agents.history import History
from harness.ledger import Ledger
from harness.records import Attempt, Baseline, Status, Timing


def attempt(index: int, name: str, status: Status, control: str | None = None) -> Attempt:
    return Attempt(
        index=index,
        name=name,
        region="r",
        backend="torch",
        status=status,
        reason="because",
        predicted_us=None,
        bound_us=None,
        knobs={},
        region_verdict=None,
        model_verdict=None,
        latency=None,
        control=control,
        parent=None,
        seconds=1.0,
    )


def test_history_is_what_the_ledger_holds(tmp_path):
    ledger = Ledger.create(tmp_path / "run")
    ledger.append("run", {"schema": 1})
    history = History(ledger)
    assert history.attempts == []
    ledger.append("effect", {"decode_us": 3.0, "prefill_us": 5.0})
    ledger.append("started", {"index": 1, "name": "a", "backend": "torch"})
    ledger.append("attempt", attempt(1, "a", Status.REJECTED))
    ledger.append("attempt", attempt(2, "control:identity", Status.REJECTED, control="identity"))
    ledger.append("started", {"index": 3, "name": "b", "backend": "torch"})
    ledger.append("started", {"index": 3, "name": "b", "backend": "torch"})
    assert history.effect_us() == {"decode": 3.0, "prefill": 5.0}
    assert history.controls == {"identity"}
    assert history.changes_judged == 1
    assert (history.deaths("a", "torch"), history.deaths("b", "torch")) == (0, 2)
    assert history.deaths("b", "triton") == 0
    assert history.since_last_attempt() == {"started"}
    ledger.append("stopped", {"reason": "done"})
    assert history.since_last_attempt() == {"started", "stopped"}


def test_a_step_takes_what_was_measured_last_or_the_unchanged_model_as_candidates_run(tmp_path):
    def timing(us: float) -> Timing:
        return Timing(median_us=us, interval_us=(us - 1, us + 1), samples=9)

    ledger = Ledger.create(tmp_path / "run")
    ledger.append("run", {"schema": 1})
    history = History(ledger)
    assert history.step_us("decode", "cpu") is None
    for name, us in (("eager", 90.0), ("graph", 40.0)):
        times = {"decode": timing(us), "prefill": timing(10 * us)}
        ledger.append("baseline", Baseline(name=name, absent=None, **times))
    assert (history.step_us("decode", "cpu"), history.step_us("decode", "cuda")) == (90.0, 40.0)
    assert history.step_us("prefill", "cuda") == 900.0  # which runs eagerly
    ledger.append("measured", {"decode": timing(30.0).to_json(), "prefill": timing(8.0).to_json()})
    assert history.step_us("decode", "cuda") == 30.0 and history.step_us("prefill", "cpu") == 8.0
