"""Executors on a real Ray cluster: a killed actor's job runs elsewhere, and refusals are clear."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.evaluation import many
from harness.executors import source
from harness.executors.ray import Ray
from tests.harness.evaluated import START, asked, killed
from tests.harness.ray_cluster import cluster
from tests.harness.test_executors import by_doing, divide, job, marked, refuse, square, start, who
from tests.layout import ROOT

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with cluster(2) as found:
        yield found


def number(_worker: object) -> int:
    time.sleep(0.2)  # so that each worker gets one
    return os.getpid()


def test_a_killed_actors_job_runs_elsewhere_and_nothing_else_is_lost(
    address: str, tmp_path: Path
) -> None:
    with closing(Ray(start, address, "cpu")) as executor:
        jobs = [job(functools.partial(square, n), f"squares {n}") for n in range(8)]
        jobs += [job(divide, "divides"), job(refuse, "refuses")]
        running = executor.run([job(functools.partial(marked, tmp_path), "waits"), *jobs])
        done = [next(running) for _ in range(4)]
        while not any(tmp_path.iterdir()):
            time.sleep(0.01)
        (victim,) = (int(mark.name) for mark in tmp_path.iterdir())
        os.kill(victim, signal.SIGKILL)
        done += running
        places = executor.workers
    found = by_doing(done)
    assert len(done) == 11
    assert [found[f"squares {n}"].value() for n in range(8)] == [n**2 for n in range(8)]
    waits = found.pop("waits")
    assert waits.value() != victim
    (loss,) = waits.losses
    lost, _, how = loss.partition(" ended ")
    assert how == "(Ray: ActorDiedError, SYSTEM_ERROR) while it waits"
    assert waits.worker is not None and waits.worker.name != lost
    assert len(places) == 2 and lost not in [place.name for place in places]
    assert all(d.losses == () for d in found.values())
    with pytest.raises(UserError, match="^no such thing$"):
        found["refuses"].value()
    with pytest.raises(RuntimeError, match="division by zero"):
        found["divides"].value()


def test_the_cluster_is_used_as_far_as_it_is_free(address: str) -> None:
    with closing(Ray(start, address, "cpu", count=1)) as executor:
        assert len(executor.workers) == 1
        pids = [done.value() for done in executor.run([job(who), job(who)])]
        assert len(set(pids)) == 1 and os.getpid() not in pids
    with pytest.raises(UserError, match="has no free GPU; ray status shows"):
        Ray(start, address, "cuda")


def test_a_run_keeps_its_output_and_its_signals(address: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.harness.apart_run", address, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)  # and Ray's own words are not there
    (loss,) = told.pop("losses")
    assert loss.endswith(" ended (Ray: ActorDiedError, SYSTEM_ERROR) while it waits")
    assert loss.partition(" ended ")[0] not in told["workers"] and len(told.pop("workers")) == 2
    assert told.pop("code") == 0 and "SIGTERM" not in done.stderr
    assert told == {"squares": [0, 1, 4, 9], "same": True, "own_handler": True, "imported": False}


def test_other_sources_are_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "PACKAGES", ("reference",))  # here, not in the actors
    with (
        closing(Ray(start, address, "cpu")) as executor,
        pytest.raises(UserError, match="their sources differ; check out the same commit"),
    ):
        list(executor.run([job(who)]))


def test_an_actor_killed_in_the_middle_of_a_candidate_loses_nothing(address: str) -> None:
    wanted = [asked("honest_one_pass"), asked("exits"), asked("honest_in_place", timed=False)]
    with closing(Ray(START, address, "cpu")) as executor:
        executor.await_ready()
        jobs = [job(number) for _ in executor.workers]
        pids = {done.worker: done.value() for done in executor.run(jobs)}

        def find() -> int | None:
            at = (w for w in executor.team if w.at and "one_pass" in w.at.job.doing)
            return next((pids[w.place] for w in at if w.place in pids), None)

        with killed(find):
            honest, exits, in_place = many(executor, wanted)
    (loss,) = honest.losses
    assert loss.endswith("(Ray: ActorDiedError, SYSTEM_ERROR) while it judges honest_one_pass.py")
    assert honest.passed and honest.time is not None
    assert honest.worker is not None and not honest.worker.startswith(loss.split(" ended ")[0])
    assert exits.losses == in_place.losses == ()
    assert in_place.passed and not exits.passed
