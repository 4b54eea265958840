"""Each kept change at the targets that it was not decided on: what is measured, and what is said of
the rest; and nothing twice, whenever the run is killed."""

import gc
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agents import measure, other_targets, run
from agents.budget import Budget
from agents.other_pairs import BEGUN, EFFECT, guarded_calls, stacks
from agents.progress import Progress
from agents.session import Session
from harness import cli
from harness.ledger import Ledger
from harness.workload import TARGETS, Workload
from reports.other_targets import LEFT, PAIRS, STEPS, OtherPairs
from reports.run import Run
from tests.agents import kept_run, killers
from tests.layout import ROOT

OTHERS = "decode-bs8", "decode-bs128", "decode-bs256"
FIRST, SECOND = kept_run.INDICES
HUGE = """
import torch
from tests.agents import toy_model
from tests.agents.toy_model import build, configs

def cache(config, batch, capacity, device):
    if batch == 128:
        return [(torch.empty(2**60, dtype=torch.int8, device="meta"),)]
    return toy_model.cache(config, batch, capacity, device)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    shares = {"decode": (0.02, 0.02), "prefill": (0.02, 0.02)}
    monkeypatch.setattr(measure, "SHARES", shares)
    gc.freeze()  # each measurement collects garbage first, and a test process has much to look at
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload.load(killers.TOY, "toy", "cpu")


def session_on(ledger: Ledger, workload: Workload, budget: Budget | None = None) -> Session:
    budget = budget or Budget(10.0)
    return Session(workload, ledger, "decode-bs1", budget, Progress(budget))


def found(ledger: Ledger) -> dict[tuple[int, str], OtherPairs]:
    return {(p.index, p.target): p for p in ledger.all(PAIRS, OtherPairs)}


def kinds(ledger: Ledger) -> Counter[str]:
    return Counter(event.kind for event in ledger.events())


def test_each_is_timed_against_the_model_before_it(workload: Workload, tmp_path: Path) -> None:
    ledger = kept_run.kept(tmp_path)
    other_targets.time_changes(session_on(ledger, workload))
    steps = (ledger.last(STEPS) or {})["steps"]
    assert steps == {name: workload.target(name).describe() for name in OTHERS}
    assert steps["decode-bs8"] == "decode 8 x 1 token(s), context 250"
    known = found(ledger)
    assert list(known) == [(i, t) for t in OTHERS for i in (FIRST, SECOND)]
    for target in OTHERS:
        slower = known[FIRST, target].pairs
        assert slower is not None and slower.is_slower
        assert 0.5 < -slower.gain_us / kept_run.SLOWED_US < 2
        assert slower.candidate_us > kept_run.SLOWED_US > slower.base_us
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
    other_targets.time_changes(session_on(ledger, workload))
    assert kinds(ledger) == events  # nothing is due any more


def test_where_a_guard_leaves_every_call_to_the_reference_nothing_is_timed(
    workload: Workload, tmp_path: Path
) -> None:
    ledger = kept_run.kept(tmp_path)
    session = session_on(ledger, workload)
    other_targets.time_changes(session)
    for target in ("decode-bs128", "decode-bs256"):
        one = found(ledger)[SECOND, target]
        assert (one.pairs, one.calls, one.declined) == (None, 2, 2)
        assert one.absent is not None and one.absent.startswith("the reference runs there")
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


def lives(directory: Path, most: int, workload: Workload) -> int:
    """How many processes it takes, each killed after `most` events."""
    for number in range(1, 40):
        try:
            other_targets.time_changes(session_on(Deadly(directory, most), workload))
        except Killed:
            continue
        return number
    raise AssertionError("no end")


@pytest.mark.parametrize("most", [2, 3, 5])
def test_killed_after_any_event_it_goes_on_and_repeats_nothing(
    most: int, workload: Workload, tmp_path: Path
) -> None:
    ledger = kept_run.kept(tmp_path)
    assert lives(ledger.directory, most, workload) > 3
    written = kinds(ledger)
    assert {k: written[k] for k in (STEPS, PAIRS, EFFECT)} == {STEPS: 1, PAIRS: 6, EFFECT: 3}
    assert set(found(ledger)) == {(i, t) for t in OTHERS for i in (FIRST, SECOND)}
    timed = [key for key, one in found(ledger).items() if one.pairs is not None]
    assert len(timed) == 4


def test_what_ends_the_process_again_and_again_is_left_out(
    workload: Workload, tmp_path: Path
) -> None:
    ledger = kept_run.kept(tmp_path)
    for _ in range(4):  # the first dies at the list of targets
        with pytest.raises(Killed):
            other_targets.time_changes(session_on(Deadly(ledger.directory, 1), workload))
    assert kinds(ledger)[BEGUN] == 3 and kinds(ledger)[PAIRS] == 0
    other_targets.time_changes(session_on(ledger, workload))
    dead = found(ledger)[FIRST, "decode-bs8"]
    assert (dead.pairs, dead.absent) == (None, "the run died 3 times while it was timed")
    assert found(ledger)[SECOND, "decode-bs8"].pairs is not None
    assert kinds(ledger)[PAIRS] == 6


def test_the_budget_ends_it_between_two_and_the_rest_says_so(
    workload: Workload, tmp_path: Path
) -> None:
    ledger = kept_run.kept(tmp_path)
    spent = Budget(0.5, clock=lambda: 30.0 * min(1, kinds(ledger)[PAIRS]))
    spent.started_s = 0.0
    other_targets.time_changes(session_on(ledger, workload, spent))
    assert set(found(ledger)) == {(FIRST, "decode-bs8")}
    assert ledger.last(LEFT) == {"why": "the budget of 0.5 minutes was used up"}
    rows = Run.load(ledger.directory).others.rows(SECOND)
    assert [row.target for row in rows] == list(OTHERS)
    assert {row.absent for row in rows} == {"the budget of 0.5 minutes was used up"}
    first, *rest = Run.load(ledger.directory).others.rows(FIRST)
    assert first.slower and [row.pairs for row in rest] == [None, None]


@pytest.mark.parametrize("step_s, timed", [(0.02, 6), (0.2, 0)])
def test_what_would_not_fit_into_the_budget_is_not_begun(
    step_s: float, timed: int, workload: Workload, tmp_path: Path
) -> None:
    """Ten seconds are left, by a clock that stands still."""
    ledger = kept_run.kept(tmp_path)
    times = {"median_us": 1e6 * step_s, "interval_us": [1.0, 1.0], "samples": 1}
    ledger.append("final", {"other_targets": {f"{t}, reference": times for t in OTHERS}})
    budget = Budget(10 / 60, clock=lambda: 0.0)
    other_targets.time_changes(session_on(ledger, workload, budget))
    assert len(found(ledger)) == timed
    assert (ledger.last(LEFT) is None) == (timed == 6)


def test_a_cache_that_does_not_fit_is_the_reason_and_the_others_are_timed(tmp_path: Path) -> None:
    model = tmp_path / "huge.py"
    model.write_text(HUGE)
    ledger = kept_run.kept(tmp_path, str(model))
    other_targets.time_changes(session_on(ledger, Workload.load(str(model), "toy", "cpu")))
    known = found(ledger)
    for index in kept_run.INDICES:
        absent = known[index, "decode-bs128"].absent
        assert absent is not None and absent.startswith("its KV cache needs 1073741824.0 GiB, ")
    assert known[FIRST, "decode-bs8"].pairs and known[FIRST, "decode-bs256"].pairs


BREAKS: dict[str, tuple[Callable[[], Exception], str]] = {
    "out-of-memory": (
        lambda: torch.OutOfMemoryError("CUDA out of memory.\nTried"),
        "CUDA out of memory.",
    ),
    "of-its-own": (lambda: ValueError("no such size"), "ValueError: no such size"),
}


@pytest.mark.parametrize("error, says", BREAKS.values(), ids=BREAKS.keys())
def test_a_change_that_breaks_at_one_target_leaves_the_others_alone(
    error: Callable[[], Exception], says: str, workload: Workload, tmp_path: Path
) -> None:
    """As memory may be short for one batch alone."""
    ledger = kept_run.kept(tmp_path)
    file, raised = tmp_path / f"{kept_run.FIRST['name']}.py", type(error())
    broken = f"raise {raised.__module__}.{raised.__name__}({error().args[0]!r})"
    text = file.read_text().replace("time.sleep(0.008)", broken)
    text = text.replace("shape[0] > 1", "shape[0] == 8")
    file.write_text(f"import builtins\nimport torch\n{text}")
    other_targets.time_changes(session_on(ledger, workload))
    known = found(ledger)
    assert known[FIRST, "decode-bs8"].absent == says
    assert known[SECOND, "decode-bs8"].absent == says  # which stands on it
    assert known[FIRST, "decode-bs128"].pairs and known[FIRST, "decode-bs256"].pairs


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
    assert out not in text and text.count("> **At another target it is slower: decode ") == 3
    assert text.count("| **slower:** decode ") == 3


@pytest.mark.slow
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


def test_the_other_targets_are_all_but_the_two_of_the_run(workload: Workload, tmp_path) -> None:
    budget = Budget(1.0)
    for target, left in (("decode-bs8", "decode-bs1"), ("prefill-8x2048", "decode-bs8")):
        others = measure.Measure(workload, target, budget).others
        assert left in others and target not in others
        assert len(others) == len(TARGETS) - 2
