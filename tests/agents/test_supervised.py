"""A run goes on when a candidate ends the process that it is timed in; nothing is left behind."""

import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agents.life import PROCESSES
from harness.ledger import Ledger
from harness.records import Attempt, Status
from reports.run import Run
from tests.agents import acts, killers

ROOT = Path(__file__).parents[2]
BUDGET = ("--budget-minutes", "10")
# What the keep rule says of a change that is slower: how sure it is depends on the machine.
MEASURED = "decode got slower by ", "decode gained no more than noise: "


def environment(*changes: str) -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "KILLERS": ",".join(changes)}
    return {**os.environ, **own}


def command(directory: Path, *more: str) -> list[str]:
    program = [sys.executable, str(Path(killers.__file__))]
    return [*program, "--resume", str(directory), *BUDGET, *more]


@pytest.fixture
def play() -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts a run of acts; one that still runs after the test is killed."""
    begun: list[subprocess.Popen] = []

    def play(directory: Path, *names: str) -> subprocess.Popen:
        line = [sys.executable, str(Path(acts.__file__)), str(directory), *names]
        run = subprocess.Popen(line, env=environment(), stderr=subprocess.PIPE, text=True)
        begun.append(run)
        return run

    yield play
    for run in begun:
        run.kill()
        run.communicate()


def kinds(directory: Path) -> list[str]:
    return [event.kind for event in Ledger.open(directory).events()]


def attempts(directory: Path) -> dict[str, Attempt]:
    """What became of each change, without the controls."""
    decided = Ledger.open(directory).all("attempt", Attempt)
    return {a.name: a for a in decided if a.control is None}


def below(pid: int) -> set[int]:
    """All processes that `pid` started, with what those started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {pid}
    while more := {p for p, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def running(pids: set[int]) -> set[int]:
    """Those that still run; a dead one that nobody has waited for does not."""
    left = set()
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                left.add(pid)
        except OSError:
            continue
    return left


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    last = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.02)


def last_event(directory: Path, kind: str) -> bool:
    ledger = Ledger(directory)  # which may have no line yet
    return ledger.path.exists() and [e.kind for e in ledger.events()][-1:] == [kind]


@pytest.mark.slow
def test_whatever_ends_the_process_while_a_change_is_timed_the_run_goes_on(tmp_path: Path) -> None:
    directory = killers.begun(tmp_path / "run").directory
    order = ("hangs", "segfaults", "slow", "breaks_the_card", "forks", "leaves")
    done = subprocess.run(
        command(directory, "--stall-minutes", "0.1"),
        env=environment(*order),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = attempts(directory)
    assert tuple(found) == order  # each tried once
    assert [a.index for a in found.values()] == [3, 4, 5, 6, 7, 8]
    crowded = found["forks"].reason
    says = {
        "hangs": "the run's process made no progress for 0.1 minutes, at: timing",
        "segfaults": "the run's process was killed by SIGSEGV, at: timing",
        "breaks_the_card": "RuntimeError: CUDA error: an illegal memory access was encountered "
        "(tests/agents/killers.py:N)",
        "leaves": "SystemExit: 0 (tests/agents/killers.py:N)",
        "forks": crowded,
    }
    assert crowded.startswith("the run's process had ")
    assert crowded.endswith(f" processes, {PROCESSES} are allowed, at: timing")
    failed = {name: a.reason for name, a in found.items() if a.status is Status.FAILED}
    assert {name: re.sub(r":\d+\)$", ":N)", why) for name, why in failed.items()} == says
    assert found["slow"].status is Status.REJECTED
    assert found["slow"].reason.startswith(MEASURED)
    died = [e.data for e in Ledger.open(directory).events() if e.kind == "died"]
    assert [d["name"] for d in died] == ["hangs", "segfaults", "breaks_the_card", "forks"]
    assert {d["stage"] for d in died} == {"timing"}
    assert kinds(directory)[-1] == "stopped" and kinds(directory).count("resumed") == 5
    assert (directory / "report.html").is_file()


def test_a_change_that_ended_the_process_is_decided_and_the_budget_is_one(
    play, tmp_path: Path
) -> None:
    lives = "in_change", "in_change_keeper", "in_change_decided", "in_change_interrupts", "0"
    run = play(tmp_path / "run", *lives)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 0, errors
    found = attempts(tmp_path / "run")
    assert {name: a.status for name, a in found.items()} == {
        "change-1": Status.FAILED,
        "change-2": Status.FAILED,
        "change-3": Status.REJECTED,
        "change-102": Status.FAILED,
        "change-4": Status.FAILED,
    }
    exits = "the run's process ended with exit status 0 before its work was done, at: in_change"
    assert found["change-1"].reason == exits
    keeper = "the run's process was killed with its keeper, at: in_change_keeper"
    assert found["change-2"].reason == keeper
    used = [e.data["used_s"] for e in Ledger.open(tmp_path / "run").events() if e.kind == "life"]
    assert used[0] == 0.0 and used == sorted(set(used))
    assert errors.count("going on in a new process") == 4


ENDS = {
    "three-in-a-row": (
        ("in_change", "in_change", "in_change", "0"),
        "3 times in a row without a change kept or rejected",
    ),
    "not-in-a-row": (
        ("in_change", "in_change", "in_change_decided", "outside"),
        "at: outside, while no change was tried",
    ),
    "outside-a-change": (("outside", "0"), "at: outside, while no change was tried"),
    "in-a-control": (("in_control", "0"), "at: in_control, while no change was tried"),
    "our-own-mistake": (("raises", "0"), "ended with ZeroDivisionError: our own mistake, at: rai"),
}


@pytest.mark.parametrize("names, says", ENDS.values(), ids=ENDS.keys())
def test_a_run_ends_where_another_process_would_not_help(names, says, play, tmp_path) -> None:
    run = play(tmp_path / "run", *names)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 2
    line = errors.splitlines()[-1]
    assert line.startswith("error: the run's process ") and says in line
    assert line.endswith(f"continue with --resume {tmp_path / 'run'}")
    assert ("Traceback" in errors) == ("raises" in names)
    (*_, died) = [e.data for e in Ledger.open(tmp_path / "run").events() if e.kind == "died"]
    assert ("name" in died) == (died["stage"] in ("in_change", "in_control"))
    assert kinds(tmp_path / "run").count("life") == len(names) - (names[-1] == "0")
    assert (tmp_path / "run" / "report.md").is_file()


@pytest.mark.parametrize("act, code", [("0", 0), ("1", 1), ("3", 3), ("crashes_at_its_end", 0)])
def test_the_exit_code_of_a_run_that_came_to_its_end_is_passed_on(
    act, code, play, tmp_path
) -> None:
    run = play(tmp_path / "run", act)
    assert (run.wait(60), kinds(tmp_path / "run")) == (code, ["run", "life", "stopped"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_a_run_that_was_killed_or_interrupted_twice(
    number, play, tmp_path
) -> None:
    """Its process hears no signal, and an orphan of it sits in a session of its own."""
    directory = tmp_path / "run"
    run = play(directory, "in_change_deaf")
    wait_until(lambda: last_event(directory, "sleeps"))
    pids = below(run.pid)
    assert len(pids) == 3
    run.send_signal(number)
    if number != signal.SIGKILL:
        time.sleep(1.3)
        assert running(pids) == pids and run.poll() is None  # it is given time
        run.send_signal(number)
    _, errors = run.communicate(timeout=60)
    wait_until(lambda: not running(pids))
    if number == signal.SIGKILL:
        again = play(directory, "in_change_deaf", "0")
        again.communicate(timeout=60)
        begun = ["run", "life", "started", "sleeps"]
        assert (again.returncode, kinds(directory)) == (0, [*begun, "life", "stopped"])
        return
    assert run.returncode == 130
    assert errors.splitlines()[-1].endswith(f"interrupted; continue with --resume {directory}")
    assert kinds(directory)[-1] == "stopped" and "attempt" not in kinds(directory)


def test_an_interrupt_sent_to_every_process_of_a_run_ends_it_cleanly(play, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    run = play(directory, "in_change_polite", "0")
    wait_until(lambda: last_event(directory, "sleeps"))
    for pid in (*below(run.pid), run.pid):
        os.kill(pid, signal.SIGTERM)
    _, errors = run.communicate(timeout=60)
    assert (run.returncode, errors) == (130, "")
    assert kinds(directory) == ["run", "life", "started", "sleeps", "stopped"]


def test_a_stopped_run_stops_its_process_and_goes_on_with_it(play, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    run = play(directory, "in_change_deaf")
    wait_until(lambda: last_event(directory, "sleeps"))
    (worker,) = {p for p in below(run.pid) if os.getpgid(p) != p and os.getsid(p) != p}

    def state(pid: int) -> str:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    run.send_signal(signal.SIGTSTP)
    wait_until(lambda: (state(run.pid), state(worker)) == ("T", "T"))
    run.send_signal(signal.SIGCONT)
    wait_until(lambda: (state(run.pid), state(worker)) == ("S", "S"))
    run.kill()
    run.wait()
    wait_until(lambda: not running({worker}))


CHANGE_FILE = """
import gc, os, socket, time, torch
from optimized.change import Change, Contract, Implementation

def build(node, knobs):
    def forward(x):
        {body}
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        wide = torch.tanh(wide) + wide * torch.sigmoid(wide)
        return (wide * node.weight.float()).to(x.dtype)
    return forward

CHANGE = Change(
    name="given-{name}",
    region="scaled_norm",
    summary="{name}",
    contract=Contract(numerics="exact"),
    implementations=(Implementation(backend="torch", devices=("cpu",), build=build),),
)
"""
BODIES = {
    "exits_at_once": "os._exit(7)",
    "is_slow": "gc.isenabled() or time.sleep(0.001)",
    "writes_outside": "gc.isenabled() or open({outside!r}, 'w')",
    "opens_socket": "gc.isenabled() or socket.socket()",
}
SANDBOX = "--require-sandbox"


@pytest.fixture
def outside() -> Iterator[Path]:
    """A folder that anybody may write to, and that is not the one for temporary files."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.mark.slow
def test_change_files_are_tried_in_order_after_a_sandboxed_verdict(tmp_path, outside) -> None:
    directory = killers.begun(tmp_path / "run").directory
    files = [tmp_path / f"{name}.py" for name in BODIES]
    for file in files:
        body = BODIES[file.stem].format(outside=str(outside / "written"))
        file.write_text(CHANGE_FILE.format(name=file.stem, body=body))
    given = [word for file in files for word in ("--change", str(file))]
    line = command(directory, *given, SANDBOX)
    done = subprocess.run(line, env=environment(), capture_output=True, text=True)
    if done.returncode == 2 and f"{SANDBOX}: this machine" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    found = attempts(directory)
    copies = [str(directory / "changes" / file.name) for file in files]
    assert list(found) == copies
    at_once, slow, writes, opens = found.values()
    assert at_once.status is Status.REJECTED
    assert "ended with exit status 7 before it answered" in at_once.reason
    assert (slow.region, slow.backend) == ("scaled_norm", "torch")
    assert slow.status is Status.REJECTED and slow.reason.startswith(MEASURED)
    events = list(Ledger.open(directory).events())
    assert [e.data["files"] for e in events if e.kind == "given"] == [copies]
    proposed = [e.data["proposals"] for e in events if e.kind == "proposals"]
    assert proposed[1][0]["hypothesis"] == "is_slow"

    own = {row.name: row for row in Run.load(directory).own_process}
    names = "no writes outside its folders", "no network"
    assert list(own) == [*names, "reads only what it needs", "no access to other processes"]
    says = (writes, errno.EACCES), (opens, errno.EPERM)
    for row, (attempt, said) in zip((own[name] for name in names), says, strict=True):
        if row.in_force:
            assert attempt.status is Status.FAILED
            assert f"[Errno {said}] {os.strerror(said)}" in attempt.reason
    assert list(outside.iterdir()) == [] or not own["no writes outside its folders"].in_force
