"""Every cheat is refused, for the reason that it should be; honest twins are accepted."""

import functools
import json
import pickle
from dataclasses import replace

import pytest

from harness.__main__ import main
from harness.cheats import (
    ACCEPTED,
    CAUGHT,
    LIMITS,
    NOT_HERE,
    SURVIVED,
    Arena,
    Fixture,
    Outcome,
    arenas,
    fixtures,
    judge,
)
from tests.harness.judged import toy

EVERY = {fixture.name: fixture for fixture in fixtures()}
# What the reason has to say, one of the alternatives. Those that take long are left to
# `python -m harness cheats`.
REASONS = {
    "caches_by_pointer": "differ",
    "caches_by_value": "remembers results",
    "calls_reference": "dispatches the reference",
    "calls_reference_forward": "dispatches the reference",
    "changes_weights": "SIGSEGV",
    "crashes": "SIGSEGV",
    "edits_harness": "judge.py for writing",
    "exits": "exit status 0",
    "exits_on_import": "exit status 0",
    "fills_disk": "No space left|of disk",  # a file system of its own, or the supervisor
    "finds_reference_output": "searches the process",
    "floods_judge": "a message of",
    "forges_answer": "result that is none",
    "inspects_frames": "looks into the frames",
    "lazy_tensor": "returns a Lazy, not a plain tensor",
    "lower_precision": "differ",
    "loops_for_ever": "gave no answer within",
    "opens_socket": "opens a network socket",
    "partly_written": "out[1]",
    "patches_clock": "replaces time.perf_counter",
    "patches_comparison": "replaces torch.allclose",
    "patches_judge": "replaces harness.",
    "reads_expected_from_disk": "differ",
    "reads_parent_memory": "/mem",
    "reads_parent_with_syscall": "differ",
    "returns_constants": "differ",
    "returns_early": "differ",
    "returns_input_buffer": "differ",
    "returns_zeros": "differ",
    "skips_after_checks": "what was timed is not what an untimed call computes",
    "skips_when_profiled": "differ",
    "skips_when_timed": "looks into the frames",
    "slows_reference": "replaces AddNorm.forward",
    "writes_inputs": "writes to its argument x",
    "writes_outside": "byte(s) outside its arguments",
}
SLOW = {"exhausts_memory", "forks_without_end"}
CARD = {"card_fault", "other_stream", "patches_synchronize", "stale_graph"}
ELSEWHERE = {"forks_survivor"}  # in test_sandbox.py


@pytest.fixture(scope="module")
def arena():
    with Arena(toy(), 0, limits=replace(LIMITS, call_s=4.0)) as found:
        yield found


@pytest.mark.parametrize("name", REASONS)
def test_a_cheat_is_caught(arena, name):
    outcome = arena.outcome(EVERY[name])
    assert outcome.outcome == CAUGHT
    assert any(words in outcome.how for words in REASONS[name].split("|"))


@pytest.mark.parametrize("name", ["honest_one_pass", "honest_in_place", "honest_threads"])
def test_an_honest_change_is_accepted(arena, name):
    outcome = arena.outcome(EVERY[name])
    assert (outcome.outcome, outcome.how) == (ACCEPTED, "")


@pytest.mark.parametrize("name", sorted(CARD))
def test_what_needs_a_card_says_so(arena, name):
    outcome = arena.outcome(EVERY[name])
    assert outcome.outcome == NOT_HERE
    assert "cuda" in outcome.how


def test_every_fixture_is_tried_somewhere():
    toys = {name for name, fixture in EVERY.items() if fixture.model.endswith("toy_model.py")}
    honest = {name for name in toys if EVERY[name].honest}
    assert toys == {*REASONS} | SLOW | CARD | ELSEWHERE | honest
    assert len(toys - honest) >= 20
    assert {EVERY[n].model for n in EVERY} - {EVERY["exits"].model} == {"beam"}


def test_a_worker_of_its_own_says_the_same(arena):
    """Whatever was judged before; what it gets is data (see test_jobs.py for the processes)."""
    fixture = EVERY["lower_precision"]
    given = functools.partial(arenas, "cpu", 0), functools.partial(judge, fixture)
    start, run = pickle.loads(pickle.dumps(given))
    with start() as worker:
        outcome, protections = pickle.loads(pickle.dumps(run(worker)))
    assert outcome == arena.outcome(fixture)
    assert (outcome.outcome, protections) == (CAUGHT, arena.sandbox.protections)


def test_a_survivor_and_a_false_refusal_are_bad():
    for word, bad in (("caught", False), ("survived", True), ("wrongly rejected", True)):
        assert Outcome(name="n", tries="t", outcome=word, how="").bad is bad


def test_an_honest_file_under_a_cheats_name_survives(arena, tmp_path):
    path = tmp_path / "looks_honest.py"
    path.write_text(EVERY["honest_one_pass"].path.read_text())
    source = EVERY["exits"]
    outcome = arena.outcome(Fixture(path, "is honest", source.model, source.preset))
    assert (outcome.outcome, outcome.bad) == (SURVIVED, True)


def test_an_error_of_its_own_is_no_catch(arena, tmp_path):
    """A cheat that fails before it cheats says nothing of the judge, unless failing is its aim."""
    path = tmp_path / "trips.py"
    text = EVERY["honest_one_pass"].path.read_text()
    path.write_text(
        text.replace("def forward(x, residual):", "def forward(x, residual):\n        x / []")
    )
    source = EVERY["exits"]
    fixture = Fixture(path, "trips", source.model, source.preset)
    outcome = arena.outcome(fixture)
    assert (outcome.outcome, outcome.bad) == ("fails by itself", True)
    assert outcome.how.startswith("raises TypeError: ")
    assert arena.outcome(replace(fixture, raises=("TypeError",))).outcome == CAUGHT


def test_a_docstring_says_which_error_is_the_aim():
    assert EVERY["fills_disk"].raises == ("OSError",)
    assert EVERY["fills_disk"].tries == "Writes to its folder until the disk is full."
    assert EVERY["exits"].raises == ()


def test_a_false_refusal_gives_exit_1(monkeypatch, capsys, tmp_path):
    """A cheat under an honest name must be reported as an honest file that was refused."""
    path = tmp_path / "honest_exit.py"
    path.write_text(EVERY["exits_on_import"].path.read_text())
    source = EVERY["exits"]
    fixture = Fixture(path, "is honest", source.model, source.preset)
    monkeypatch.setattr("harness.command_cheats.fixtures", lambda: [fixture])
    assert main(["cheats", "--json", "--device", "cpu", "--out", str(tmp_path / "kept")]) == 1
    found = json.loads(capsys.readouterr().out)
    kept = json.loads((tmp_path / "kept" / "cheats.json").read_text())
    assert {name: kept[name] for name in found} == found
    assert (kept["environment"]["device"], kept["jobs"]) == ("cpu", 1)
    table = (tmp_path / "kept" / "cheats.txt").read_text()
    assert "\n1 wrongly rejected; " in table
    assert [row["outcome"] for row in found["cheats"]] == ["wrongly rejected"]
    assert found["passed"] is False
    assert {row["name"] for row in found["protections"]} >= {"no network", "time limited"}
