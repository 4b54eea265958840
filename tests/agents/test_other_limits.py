"""What keeps a kept change from being timed at another target: budget, memory, its own failure."""

from pathlib import Path
from typing import Any

import pytest

from agents import measure, other_targets
from agents.budget import Budget
from agents.faults import Renew
from harness.step import Step
from harness.workload import Workload
from reports.other_targets import LEFT, PAIRS
from reports.run import Run
from tests.agents import kept_run
from tests.agents.kept_run import OTHERS, found, kinds, session_on, toy

FIRST, SECOND = kept_run.INDICES


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    kept_run.quick(monkeypatch)


HUGE = """
import torch
from tests.agents import toy_model
from tests.agents.toy_model import build, configs

def cache(config, batch, capacity, device):
    if batch == 128:
        return [(torch.empty(2**60, dtype=torch.int8, device="meta"),)]
    return toy_model.cache(config, batch, capacity, device)
"""


def test_the_budget_ends_it_between_two_and_the_rest_says_so(tmp_path: Path) -> None:
    ledger = kept_run.kept(tmp_path)
    spent = Budget(0.5, clock=lambda: 30.0 * min(1, kinds(ledger)[PAIRS]))
    spent.started_s = 0.0
    other_targets.time_changes(session_on(ledger, spent))
    assert set(found(ledger)) == {(FIRST, "decode-bs8")}
    assert ledger.last(LEFT) == {"why": "the budget of 0.5 minutes was used up"}
    rows = Run.load(ledger.directory).others.rows(SECOND)
    assert [row.target for row in rows] == list(OTHERS)
    assert {row.absent for row in rows} == {"the budget of 0.5 minutes was used up"}
    first, *rest = Run.load(ledger.directory).others.rows(FIRST)
    assert first.pairs is not None and [row.pairs for row in rest] == [None, None]


@pytest.mark.parametrize("step_s, timed", [(0.02, 6), (0.2, 0)])
def test_what_would_not_fit_into_the_budget_is_not_begun(
    step_s: float, timed: int, tmp_path: Path
) -> None:
    """Ten seconds are left, by a clock that stands still."""
    ledger = kept_run.kept(tmp_path)
    times = {"median_us": 1e6 * step_s, "interval_us": [1.0, 1.0], "samples": 1}
    ledger.append("final", {"other_targets": {f"{t}, reference": times for t in OTHERS}})
    budget = Budget(10 / 60, clock=lambda: 0.0)
    other_targets.time_changes(session_on(ledger, budget))
    assert len(found(ledger)) == timed
    assert (ledger.last(LEFT) is None) == (timed == 6)


def test_a_cache_that_does_not_fit_is_the_reason_and_the_others_are_timed(tmp_path: Path) -> None:
    model = tmp_path / "huge.py"
    model.write_text(HUGE)
    ledger = kept_run.kept(tmp_path, str(model))
    workload = Workload.load(str(model), "toy", "cpu")
    other_targets.time_changes(session_on(ledger, workload=workload))
    known = found(ledger)
    for index in kept_run.INDICES:
        absent = known[index, "decode-bs128"].absent
        assert absent is not None and absent.startswith("its KV cache needs 1073741824.0 GiB, ")
    assert known[FIRST, "decode-bs8"].pairs and known[FIRST, "decode-bs256"].pairs


class Counting(measure.Measure):
    """Knows which steps were made, and how many of them were open at once."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.made: list[Step] = []
        self.most = 0

    def other_step(self, *given: Any) -> Step:
        self.made.append(super().other_step(*given))
        self.most = max(self.most, self.open)
        return self.made[-1]

    @property
    def open(self) -> int:
        return sum(step.output is not None for step in self.made)


def test_two_steps_are_ready_at_once_and_none_stays(tmp_path: Path) -> None:
    """On a card each holds a graph; one that is the next one's base is not made again."""
    session = session_on(kept_run.kept(tmp_path))
    session.measure = counting = Counting(toy(), "decode-bs1", session.budget)
    other_targets.time_changes(session)
    assert (counting.most, counting.open) == (2, 0)
    assert len(counting.made) == 3 + 2 + 2  # the second is timed at one target alone


def breaks(folder: Path, error: str) -> None:
    """From now on the first change raises `error` in a batch of 8."""
    file = folder / f"{kept_run.FIRST['name']}.py"
    text = file.read_text().replace("time.sleep(0.008)", f"raise {error}")
    file.write_text("import torch\n" + text.replace("shape[0] > 1", "shape[0] == 8"))


BREAKS = {
    "out-of-memory": (
        'torch.OutOfMemoryError("CUDA out of memory.\\nTried to")',
        "CUDA out of memory.",
    ),
    "of-its-own": ('ValueError("no such size")', "ValueError: no such size"),
}


@pytest.mark.parametrize("error, says", BREAKS.values(), ids=BREAKS.keys())
def test_a_change_that_breaks_at_one_target_leaves_the_others_alone(
    error: str, says: str, tmp_path: Path
) -> None:
    """As memory may be short for one batch alone."""
    ledger = kept_run.kept(tmp_path)
    breaks(tmp_path, error)
    other_targets.time_changes(session_on(ledger))
    known = found(ledger)
    assert known[FIRST, "decode-bs8"].absent == says
    assert known[SECOND, "decode-bs8"].absent == says  # which stands on it
    assert known[FIRST, "decode-bs128"].pairs and known[FIRST, "decode-bs256"].pairs


def test_a_card_that_is_lost_is_left_to_a_new_process(tmp_path: Path) -> None:
    ledger = kept_run.kept(tmp_path)
    breaks(tmp_path, 'RuntimeError("CUDA error: an illegal memory access")')
    with pytest.raises(Renew, match="slow_beside.py at decode-bs8 broke the card"):
        other_targets.time_changes(session_on(ledger))
    (one,) = found(ledger).values()
    assert one.absent == "RuntimeError: CUDA error: an illegal memory access"
    assert (one.index, one.target) == (FIRST, "decode-bs8")
