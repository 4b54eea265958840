"""A run that is killed goes on where it was: kill -9 after every third event that it writes, at
random moments inside its stages, then Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from harness.ledger import Ledger
from harness.records import Attempt
from tests.agents import killers

ROOT = Path(__file__).parents[2]
TOY = str(Path(__file__).with_name("toy_model.py"))
NEW_EVENTS_PER_LIFE = 3
# What a continued run writes before it goes on does not count as progress.
REPEATED = {"resumed", "anchor"}

# Runs the command, and kills the process once the ledger got so many new events.
KILLER = f"""
import os, signal, sys
from agents import run
from harness.ledger import Ledger
append, seen = Ledger.append, []
def counting(self, kind, record):
    append(self, kind, record)
    if kind not in {REPEATED}:
        seen.append(kind)
    if len(seen) == {NEW_EVENTS_PER_LIFE}:
        os.kill(os.getpid(), signal.SIGKILL)
Ledger.append = counting
sys.exit(run.main(sys.argv[1:]))
"""

WORDS = ("--target", "decode-bs1", "--model", TOY, "--device", "cpu", "--max-changes", "1")
BUDGET = ("--budget-minutes", "1")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def kinds(directory: Path) -> list[str]:
    return [event.kind for event in Ledger.open(directory).events()]


@pytest.mark.long
@pytest.mark.timeout(900)  # some lives, each of which imports PyTorch anew
def test_killed_after_every_few_events_it_ends_as_if_nothing_had_happened(tmp_path):
    directory = tmp_path / "run"
    command = [sys.executable, "-c", KILLER, *WORDS, *BUDGET, "--run-dir", str(directory)]
    lives = 0
    while True:
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        lives += 1
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        if done.returncode == 0:
            break
        assert lives < 20, kinds(directory)
        resume = ("--max-changes", "1", *BUDGET, "--resume", str(directory))
        command = [sys.executable, "-c", KILLER, *resume]

    written = Counter(kinds(directory))
    assert lives > 5
    assert written["resumed"] == lives - 1
    once = ("run", "environment", "self_test", "ceilings", "effect", "opportunities", "final")
    assert {kind: written[kind] for kind in once} == dict.fromkeys(once, 1)
    assert written["baseline"] == 3
    attempts = Ledger.open(directory).all("attempt", Attempt)
    assert [a.index for a in attempts] == [1, 2, 3]
    assert [a.control for a in attempts] == ["identity", "slowed", None]
    source = attempts[2].generated_source
    assert source is not None and "import torch" in (directory / source).read_text()
    assert kinds(directory)[-1] == "stopped"
    assert (directory / "summary.json").is_file() and (directory / "report.html").is_file()


# What a run has measured, and who judges its changes: each once, however often it was killed.
ONCE = "run", "environment", "self_test", "effect", "ceilings", "opportunities", "final"
DUE = {"opportunities", "attempt"}  # what the lives come to write, and more


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_at_random_moments_it_ends_as_if_nothing_had_happened(tmp_path):
    """Up to eight lives, wherever they are: in traces, verdicts, timings, the closing parts."""
    names = [f"slow {number}" for number in range(4)]
    ledger = killers.begun(tmp_path / "run")
    lines = ledger.path.read_text().splitlines(keepends=True)
    ledger.path.write_text("".join(x for x in lines if json.loads(x)["kind"] not in DUE))
    words = ("5", "8", str(ledger.directory), "--max-changes", "4", "--budget-minutes", "10")
    command = [sys.executable, "-m", "tests.agents.killed_run", *words]
    own = {**environment(), "KILLERS": ",".join(names)}
    done = subprocess.run(command, env=own, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr

    written = Counter(kinds(ledger.directory))
    assert done.stdout.count(f": {-signal.SIGKILL}, ") > 4
    assert {kind: written[kind] for kind in ONCE} == dict.fromkeys(ONCE, 1)
    attempts = Ledger.open(ledger.directory).all("attempt", Attempt)
    assert [a.index for a in attempts] == list(range(1, len(attempts) + 1))
    assert [(a.name, a.status) for a in attempts if a.control is None] == [
        (name, "rejected") for name in names
    ]
    assert [a.control for a in attempts if a.control] == ["identity", "slowed"]
    assert kinds(ledger.directory)[-1] == "stopped"
    summary = json.loads((ledger.directory / "summary.json").read_text())
    assert [c["name"] for c in summary["changes"]] == names


def test_ctrl_c_ends_cleanly_and_can_be_continued(tmp_path):
    directory = tmp_path / "run"
    command = [sys.executable, "-m", "agents.run", *WORDS, *BUDGET, "--run-dir", str(directory)]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    ledger = directory / Ledger.NAME
    deadline = time.monotonic() + 90
    while not (ledger.exists() and '"baseline"' in ledger.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert f"continue with --resume {directory}" in errors.replace("\n", "")
    assert "Traceback" not in errors
    assert kinds(directory)[-1] == "stopped"
    assert (directory / "report.md").is_file()
