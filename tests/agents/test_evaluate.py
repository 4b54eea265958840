"""A run's workers: what they are asked, what the gate says on them, flags, what is recalled."""

import argparse
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from agents import run, workers
from agents.evaluate import ask
from agents.sandboxed import LOST, Gate
from harness.environment import cpu_name
from harness.errors import UserError
from harness.evaluation import evaluator
from harness.executors.local import CPU, Local, Process
from harness.ledger import Ledger
from harness.records import SCHEMA
from harness.workload import Workload
from reports.render import facts
from reports.run import Run
from tests.agents.test_sandboxed import HARNESS, RUN
from tests.layout import ROOT

TOY = HARNESS / "toy_model.py"
CHEATS = HARNESS / "cheats"


def words(*given: str) -> argparse.Namespace:
    return run.words(["--target", "decode-bs1", *given])


def test_a_files_text_goes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HARNESS)
    workload = Workload.load("toy_model.py", "toy", "cpu", seed=4)
    asked = ask(workload, str(CHEATS / "exits.py"), "torch", case_seed=7)
    assert asked.text == (CHEATS / "exits.py").read_text()
    assert (asked.preset, asked.device, asked.seed, asked.case_seed) == ("toy", "cpu", 4, 7)
    assert asked.model == str(TOY) and len(asked.model_sha256 or "") == 64  # from any folder
    known = ask(Workload.load("beam", "mini", "cpu"), "swiglu", case_seed=0)
    assert (known.text, known.model, known.model_sha256) == (None, "beam", None)


BAD = {
    "no-workers": (("--workers", "0"), "--workers: '0' is not a whole number of at least 1"),
    "address-alone": (("--ray-address", "h:1"), "--ray-address needs --executor ray; give both"),
    "no-address": (("--executor", "ray"), "give --ray-address HOST:PORT, or set RAY_ADDRESS"),
    "nobody-there": (
        ("--executor", "ray", "--ray-address", "127.0.0.1:1"),
        "nobody listens at 127.0.0.1:1",
    ),
}


@pytest.mark.parametrize(("given", "says"), BAD.values(), ids=BAD.keys())
def test_bad_flags_are_one_line(
    given: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match=says):
        words(*given)


def test_flags_are_checked_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from agents import run\n"
        "a = run.words(['--target', 'decode-bs1', *sys.argv[1:]])\n"
        "print(a.workers, a.storage)\n"
    )
    given = ["--workers", "2", "--storage", f"sqlite:///{tmp_path}/studies.db"]
    command = [sys.executable, "-c", code, *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == f"2 {given[3]}\n", done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_continued_run_has_workers_as_before_or_as_is_said_now() -> None:
    a = words("--workers", "3")
    assert workers.recorded(a) == {"workers": 3}
    resumed = run.parser().parse_args(["--resume", "x"])
    workers.recall(resumed, {"workers": 3})
    assert (resumed.executor, resumed.workers) == (None, 3)
    other = run.parser().parse_args(["--resume", "x", "--executor", "local", "--workers", "2"])
    workers.recall(other, {"executor": "ray", "ray_address": "127.0.0.1:1"})
    assert (other.executor, other.workers, other.ray_address) == ("local", 2, None)
    wrong = run.parser().parse_args(["--resume", "x", "--ray-address", "127.0.0.1:1"])
    with pytest.raises(UserError, match="--ray-address needs --executor ray"):
        workers.recall(wrong, {})


def test_workers_are_beside_the_run_if_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")

    def devices(kind: str, *given: str) -> list[str]:
        return workers.devices(words(*given), kind)

    assert devices("cpu") == devices("cpu", "--workers", "1") == []
    assert devices("cpu", "--executor", "local") == devices("cuda") == []
    assert devices("cpu", "--workers", "2") == ["cpu", "cpu"]
    assert devices("cuda", "--executor", "local") == ["4", "5", "6"]
    assert devices("cuda", "--workers", "2") == ["5", "6"]
    with pytest.raises(UserError, match="4 workers need 4 cards, 3 are visible here"):
        devices("cuda", "--workers", "4")


@pytest.mark.long
def test_the_gate_judges_on_workers_and_a_lost_one_is_told(tmp_path: Path) -> None:
    workload = Workload.load(str(TOY), "toy", "cpu")
    ledger = Ledger.create(tmp_path / "run")
    ledger.append("run", {**RUN, "schema": SCHEMA})
    ledger.append(workers.EVENT, {"executor": "local", "workers": ["worker 1 (cpu, here)"]})
    said: list[str] = []
    start = functools.partial(evaluator, "cpu", cpu_name())
    with closing(Local(start, [CPU])) as executor:
        gate = Gate(
            workload.model, workload, ledger, said.append, required=False, executor=executor
        )
        with closing(gate):
            asked = [(str(CHEATS / f"{name}.py"), None, 3) for name in ("exits", "honest_one_pass")]
            kill_at(executor, "honest_one_pass")
            (exits, _), (honest, seconds) = gate.verdicts(asked)
            alone = gate.verdict(*asked[0])
    assert exits.reason == "ended with exit status 0 before it answered" == alone.reason
    assert honest.passed and honest.seed == 3 and seconds > 0
    lost = ledger.last(LOST)
    assert lost is not None and lost["change"] == asked[1][0]
    (how,) = lost["losses"]
    assert "was killed by SIGKILL while it judges" in how
    assert said[-1] == f"a worker was lost, another did its work: {how}"
    told = dict(facts(Run.load(ledger.directory)))["Candidates' regions judged by"]
    assert told == f"worker 1 (cpu, here); lost at honest_one_pass.py: {how}"


def kill_at(executor: Local, name: str) -> None:
    """Kill the worker that is at it, after a moment."""

    def work() -> None:
        while not (at := [w for w in executor.team if w.at and name in w.at.job.doing]):
            time.sleep(0.01)
        time.sleep(0.3)
        (worker,) = at
        assert isinstance(worker, Process) and worker.process.pid is not None
        os.kill(worker.process.pid, signal.SIGKILL)

    threading.Thread(target=work, daemon=True).start()
