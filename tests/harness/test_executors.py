"""Executors: jobs on workers of which one ends, the others' results, and what is recorded."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UserError
from harness.executors import local
from harness.executors.apart import Apart
from harness.executors.base import Done, Job
from harness.executors.here import Here
from harness.executors.local import CPU, Local
from harness.executors.ray import address_of
from tests.layout import ROOT

LONG_S = 60.0


def start() -> contextlib.AbstractContextManager[int]:
    return contextlib.nullcontext(os.getpid())


def square(number: int, _state: int) -> int:
    return number**2


def who(_state: int) -> int:
    return os.getpid()


def card(_state: int) -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def divide(_state: int) -> float:
    return 1 / 0


def refuse(_state: int) -> None:
    raise UserError("no such thing")


def marked(folder: Path, _state: int) -> int:
    """Leave a mark; the first to do so then waits to be killed."""
    first = not any(folder.iterdir())
    (folder / str(os.getpid())).touch()
    if first:
        time.sleep(LONG_S)
    return os.getpid()


def die(folder: Path, _state: int) -> None:
    (folder / str(os.getpid())).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def job(run: Callable[[Any], Any], doing: str = "counts", key: str = "") -> Job:
    return Job(doing, key, run)


def by_doing(done: list[Done]) -> dict[str, Done]:
    return {d.job.doing: d for d in done}


def local_two(begin: Any) -> Local:
    return Local(begin, [CPU] * 2)


def apart(begin: Any) -> Apart:
    return Apart(functools.partial(local_two, begin), "the crew")


@pytest.mark.parametrize("make", [Here, local_two, apart], ids=["here", "local", "apart"])
def test_every_job_is_done_and_its_error_is_its_own(make: Any) -> None:
    with contextlib.closing(make(start)) as executor:
        jobs = [job(functools.partial(square, n), f"squares {n}") for n in range(6)]
        jobs[3:3] = [job(divide, "divides"), job(refuse, "refuses")]
        found = by_doing(list(executor.run(jobs)))
        again = [d.result for d in executor.run([job(functools.partial(square, 9))])]
    assert {d: found[d].result for d in found if "squares" in d} == {
        f"squares {n}": n**2 for n in range(6)
    }
    with pytest.raises(UserError, match="^no such thing$"):
        found["refuses"].value()
    with pytest.raises((ZeroDivisionError, RuntimeError), match="division by zero"):
        found["divides"].value()
    assert all(not d.losses and d.worker is not None for d in found.values())
    assert again == [81]


def test_a_killed_workers_job_runs_elsewhere_and_nothing_else_is_lost(tmp_path: Path) -> None:
    with contextlib.closing(Local(start, [CPU] * 2)) as executor:
        jobs = [job(functools.partial(square, n), f"squares {n}") for n in range(8)]
        running = executor.run([job(functools.partial(marked, tmp_path), "waits"), *jobs])
        done = [next(running) for _ in range(4)]
        while not any(tmp_path.iterdir()):
            time.sleep(0.01)
        (victim,) = (int(mark.name) for mark in tmp_path.iterdir())
        os.kill(victim, signal.SIGKILL)
        done += running
        names = [place.name for place in executor.workers]
    found = by_doing(done)
    assert len(done) == 9
    assert [found[f"squares {n}"].value() for n in range(8)] == [n**2 for n in range(8)]
    waits = found.pop("waits")
    assert waits.value() != victim
    (loss,) = waits.losses
    lost, _, how = loss.partition(" was ")
    assert how == "killed by SIGKILL while it waits"
    assert waits.worker is not None and waits.worker.name != lost
    assert lost not in names and len(names) == 2  # another took its place
    assert all(d.losses == () for d in found.values())


@pytest.mark.parametrize("make", ["local_two", "apart"])
def test_a_worker_ends_with_its_parent_in_the_middle_of_a_job(tmp_path: Path, make: str) -> None:
    program = (
        "import functools, pathlib, tests.harness.test_executors as t\n"
        f"run = functools.partial(t.marked, pathlib.Path({str(tmp_path)!r}))\n"
        f"list(t.{make}(t.start).run([t.job(run)]))"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as parent:
        until = time.monotonic() + LONG_S
        while not (marks := list(tmp_path.iterdir())) and time.monotonic() < until:
            time.sleep(0.01)
        (worker,) = (int(mark.name) for mark in marks)
        assert is_alive(worker)
        parent.kill()
    until = time.monotonic() + LONG_S / 2
    while is_alive(worker) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_alive(worker)


def is_alive(process: int) -> bool:
    """And no zombie, which its new parent need not have noticed yet."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def test_a_job_that_ends_its_worker_is_given_up_after_three(tmp_path: Path) -> None:
    with contextlib.closing(Local(start, [CPU])) as executor:
        jobs = [job(functools.partial(die, tmp_path), "dies"), job(functools.partial(square, 3))]
        found = by_doing(list(executor.run(jobs)))
    assert len(list(tmp_path.iterdir())) == 3
    assert len(found["dies"].losses) == 3 and found["dies"].worker is None
    with pytest.raises(UserError, match="worker 3 was killed by SIGKILL while it dies"):
        found["dies"].value()
    assert found["counts"].value() == 9


def test_a_worker_whose_job_broke_is_not_used_again() -> None:
    with contextlib.closing(Local(start, [CPU])) as executor:
        (first,) = (d.value() for d in executor.run([job(who)]))
        list(executor.run([job(refuse)]))
        (same,) = (d.value() for d in executor.run([job(who)]))
        list(executor.run([job(divide)]))
        (other,) = (d.value() for d in executor.run([job(who)]))
    assert first == same != other


def test_an_executor_that_is_lost_is_one_line(tmp_path: Path) -> None:
    with contextlib.closing(apart(start)) as executor:
        assert [place.name for place in executor.workers] == ["worker 1", "worker 2"]
        running = executor.run([job(functools.partial(marked, tmp_path)), job(who)])
        assert next(running).job.run is who
        while not any(tmp_path.iterdir()):
            time.sleep(0.01)
        process = executor.process.process
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(
            UserError, match="^the crew was lost: .* was killed by SIGKILL; continue"
        ):
            next(running)
    os.kill(int(next(tmp_path.iterdir()).name), signal.SIGKILL)  # which would wait for long


@contextlib.contextmanager
def broken() -> Iterator[int]:
    os._exit(3)
    yield 0


@contextlib.contextmanager
def refused() -> Iterator[int]:
    raise UserError("another commit")
    yield 0


@pytest.mark.parametrize(
    ("begin", "words"),
    [(broken, "worker 3 ended with exit status 3 while it starts"), (refused, "another commit")],
    ids=["ends", "refuses"],
)
def test_workers_that_do_not_start_end_the_executor(begin: Any, words: str) -> None:
    with contextlib.closing(Local(begin, [CPU])) as executor, pytest.raises(UserError, match=words):
        list(executor.run([job(who)]))
    with pytest.raises(UserError, match=words.replace("3 ended", ". ended")):
        apart(begin)


def test_each_worker_sees_its_own_card_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Local(start, ["3", "GPU-ab"])) as executor:
        executor.await_ready()
        found = {d.worker.device: d.value() for d in executor.run([job(card)] * 8) if d.worker}
    assert found == {"3": "3", "GPU-ab": "GPU-ab"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    assert local.devices("cuda", None) == ["5", "6", "7"]
    assert local.devices("cuda", 2) == ["6", "7"]  # the first is this process's own
    assert local.devices("cpu", 2) == ["cpu", "cpu"]
    with pytest.raises(UserError, match="4 workers need 4 cards, 3 are visible"):
        local.devices("cuda", 4)


def test_a_ray_cluster_that_there_is_not_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match="give --ray-address HOST:PORT, or set RAY_ADDRESS"):
        address_of(None)
    with pytest.raises(UserError, match="'somewhere' is no address of a Ray cluster"):
        address_of("somewhere")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UserError, match="nobody listens at 127.0.0.1:1 "):
        address_of(None)
    assert address_of("auto") == "auto"
