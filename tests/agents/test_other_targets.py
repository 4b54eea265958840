"""Each kept change at the targets that it was not decided on: what is measured, and nothing twice,
whenever the run is killed."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agents import measure, other_targets, run
from agents.budget import Budget
from agents.other_pairs import BEGUN, EFFECT, guarded_calls, stacks
from harness import cli
from harness.ledger import Ledger
from harness.workload import TARGETS
from reports.other_targets import LEFT, PAIRS, STEPS
from tests.agents import kept_run
from tests.agents.kept_run import OTHERS, found, kinds, session_on, toy
from tests.layout import ROOT

FIRST, SECOND = kept_run.INDICES


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    kept_run.quick(monkeypatch)


def test_each_is_timed_against_the_model_before_it(tmp_path: Path) -> None:
    ledger = kept_run.kept(tmp_path)
    other_targets.time_changes(session_on(ledger))
    steps = (ledger.last(STEPS) or {})["steps"]
    assert steps == {name: toy().target(name).describe() for name in OTHERS}
    assert steps["decode-bs8"] == "decode 8 x 1 token(s), context 250"
    known = found(ledger)
    assert list(known) == [(i, t) for t in OTHERS for i in (FIRST, SECOND)]
    for target in OTHERS:
        slower = known[FIRST, target].pairs
        assert slower is not None and slower.base_us < kept_run.SLOWED_US < slower.candidate_us
        assert slower.gain_us < -kept_run.SLOWED_US / 2
        assert (known[FIRST, target].calls, known[FIRST, target].declined) == (3, 0)
    second = known[SECOND, "decode-bs8"].pairs
    assert second is not None and not second.is_slower
    assert second.base_us > kept_run.SLOWED_US  # it stands on the first
    assert second.pairs >= 5 and second.mde_us > 0 and second.base_interval_us is not None
    effects = [e.data for e in ledger.events() if e.kind == EFFECT]
    assert [e["target"] for e in effects] == list(OTHERS)
    for effect in effects:
        pairs = known[FIRST, effect["target"]].pairs
        assert pairs is not None and pairs.mde_us >= effect["us"] > 0
    assert LEFT not in kinds(ledger)
    events = kinds(ledger)
    other_targets.time_changes(session_on(ledger))
    assert kinds(ledger) == events  # nothing is due any more


def test_where_a_guard_leaves_every_call_to_the_reference_nothing_is_timed(tmp_path: Path) -> None:
    ledger = kept_run.kept(tmp_path)
    session = session_on(ledger)
    other_targets.time_changes(session)
    for target in ("decode-bs128", "decode-bs256"):
        one = found(ledger)[SECOND, target]
        assert (one.pairs, one.calls, one.declined) == (None, 2, 2)
        assert one.absent == "its guard leaves all 2 calls to the reference"
    model, names = stacks(session, session.history.kept)[2]
    inputs = session.measure.other_inputs("decode-bs8")
    assert guarded_calls(model, names, inputs) == (2, 0)
    model.get_submodule(names[0]).declines = lambda *args: "this one alone"
    assert guarded_calls(model, names, inputs) == (2, 1)


class Killed(BaseException):
    pass


class Deadly(Ledger):
    """Ends its process, so to say, once so many events are written."""

    def __init__(self, directory: Path, most: int) -> None:
        super().__init__(directory)
        self.most = most

    def append(self, kind: str, record: Any) -> None:
        super().append(kind, record)
        self.most -= 1
        if self.most <= 0:
            raise Killed


def lives(directory: Path, most: int) -> int:
    """How many processes it takes, each killed after `most` events."""
    for number in range(1, 40):
        try:
            other_targets.time_changes(session_on(Deadly(directory, most)))
        except Killed:
            continue
        return number
    raise AssertionError("no end")


@pytest.mark.parametrize("most", [2, 3])
def test_killed_after_any_event_it_goes_on_and_repeats_nothing(most: int, tmp_path: Path) -> None:
    ledger = kept_run.kept(tmp_path)
    assert lives(ledger.directory, most) > 3
    written = kinds(ledger)
    assert {k: written[k] for k in (STEPS, PAIRS, EFFECT)} == {STEPS: 1, PAIRS: 6, EFFECT: 3}
    assert set(found(ledger)) == {(i, t) for t in OTHERS for i in (FIRST, SECOND)}
    timed = [key for key, one in found(ledger).items() if one.pairs is not None]
    assert len(timed) == 4


def test_what_ends_the_process_again_and_again_is_left_out(tmp_path: Path) -> None:
    ledger = kept_run.kept(tmp_path)
    for _ in range(4):  # the first dies at the list of targets
        with pytest.raises(Killed):
            other_targets.time_changes(session_on(Deadly(ledger.directory, 1)))
    assert kinds(ledger)[BEGUN] == 3 and kinds(ledger)[PAIRS] == 0
    other_targets.time_changes(session_on(ledger))
    dead = found(ledger)[FIRST, "decode-bs8"]
    assert (dead.pairs, dead.absent) == (None, "the run died 3 times while it was timed")
    assert found(ledger)[SECOND, "decode-bs8"].pairs is not None
    assert kinds(ledger)[PAIRS] == 6


def test_a_finished_run_gets_them_later_and_stays_as_it_ended(tmp_path: Path) -> None:
    ledger = kept_run.kept(tmp_path)
    words = ["--resume", str(ledger.directory), "--budget-minutes", "5"]
    assert run.main([*words, "--max-changes", "2", "--other-targets", "none"]) == 0
    (page,) = ledger.directory.glob("prs/03-*/PR.md")
    out = "not measured: left out by --other-targets none"
    assert page.read_text().count(out) == 3 and "it is slower" not in page.read_text()
    ended = ledger.last("stopped")
    before = kinds(ledger)
    assert run.main([*words, "--other-targets", "only"]) == 0
    after = kinds(ledger)
    new = {kind for kind in after if after[kind] != before[kind]}
    assert new == {"resumed", "anchor", BEGUN, EFFECT, PAIRS, "stopped"}
    assert after[PAIRS] == 6 and ledger.last("stopped") == ended
    text = page.read_text()
    assert out not in text and "not measured" not in text
    timed = [found(ledger)[FIRST, target].pairs for target in OTHERS]
    lost = sum(pairs is not None and pairs.is_slower for pairs in timed)  # as the clock has it
    assert text.count("> **At another target it is slower: decode ") == lost
    assert text.count("| **slower:** decode ") == lost


@pytest.mark.long
def test_killed_while_a_change_is_timed_it_goes_on_in_a_new_process(tmp_path: Path) -> None:
    ledger = kept_run.kept(tmp_path)
    words = "--other-targets", "only", "--budget-minutes", "1"
    command = [sys.executable, "-m", "agents.run", "--resume", str(ledger.directory), *words]
    own = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for wanted in (1, 3):
        process = subprocess.Popen(command, env=own, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 120
        while kinds(ledger)[BEGUN] <= wanted:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.kill()
        process.communicate()
    before = found(ledger)
    assert 0 < len(before) < 6
    subprocess.run(command, env=own, check=True, capture_output=True)
    written = kinds(ledger)
    assert {k: written[k] for k in (STEPS, PAIRS, EFFECT, "final")} == {
        STEPS: 1, PAIRS: 6, EFFECT: 3, "final": 1
    }  # fmt: skip
    assert len(found(ledger)) == 6 and found(ledger).items() >= before.items()


SWIGLU = str(ROOT / "optimized" / "swiglu.py")
BAD = {
    "of-no-run": (("--target", "decode-bs1"), "--other-targets only is of a run that kept"),
    "with-a-change": (("--resume", ".", "--change", SWIGLU), "only tries no change; leave"),
}


@pytest.mark.parametrize("words, says", BAD.values(), ids=BAD.keys())
def test_what_cannot_be_meant_is_one_line(words, says, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(lambda: run.main(["--other-targets", "only", *words])) == 2
    told = capfd.readouterr()
    assert says in told.err and told.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_other_targets_are_all_but_the_two_of_the_run(tmp_path) -> None:
    budget = Budget(1.0)
    for target, left in (("decode-bs8", "decode-bs1"), ("prefill-8x2048", "decode-bs8")):
        others = measure.Measure(toy(), target, budget).others
        assert left in others and target not in others
        assert len(others) == len(TARGETS) - 2


def test_a_prefill_gets_more_time_where_it_is_the_target() -> None:
    hour = Budget(60.0)
    beside = measure.Measure(toy(), "decode-bs1", hour)
    target = measure.Measure(toy(), "prefill-8x2048", hour)
    assert target.seconds("prefill") == pytest.approx(2.5 * beside.seconds("prefill"))
    assert beside.seconds("decode") == target.seconds("decode") > 0
