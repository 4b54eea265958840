"""Candidates at region level on any executor: the records, their order, what is refused."""

import contextlib
import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.environment import cpu_name
from harness.errors import UserError
from harness.evaluation import (
    Evaluated,
    Evaluation,
    Evaluator,
    evaluate,
    evaluator,
    make_bench,
    many,
)
from harness.executors.base import Job
from harness.executors.here import Here
from harness.executors.local import CPU, Local
from tests.harness.evaluated import START, asked, killed


def fail(evaluation: Evaluation, _worker: Evaluator) -> None:
    raise ZeroDivisionError(evaluation.change)


def test_records_come_back_in_the_order_asked_with_what_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = asked("honest_threads")
    monkeypatch.setattr(
        "harness.evaluation.job_of",
        lambda e: Job("judges", e.key, functools.partial(fail if e is broken else evaluate, e)),
    )
    monkeypatch.setattr("harness.outside.SLOPE_S", 0.02)  # nothing below depends on it
    wanted = [
        broken,
        asked("honest_one_pass"),
        replace(asked("exits"), change="nowhere", text=None),
        asked("exits"),
        asked("honest_in_place", timed=False),
    ]
    told: list[str] = []
    with contextlib.closing(Here(START)) as executor:
        found = many(executor, wanted, told.append)
    assert told[1:] == [f"{n} of 5 candidates judged at region level" for n in (2, 3, 4, 5)]
    assert [e.change for e in found] == [e.change for e in wanted]
    failed, honest, unknown, exits, untimed = found
    assert failed.verdict is None and not failed.passed  # an error of ours ends no other
    assert failed.failure == "honest_threads.py"
    assert honest.passed and honest.verdict is not None and honest.verdict.cases > 10
    assert honest.verdict.seed == 3 and (honest.region, honest.backend) == ("add_norm", "torch")
    assert honest.time is not None and honest.time.base_us > 5 and honest.time.pairs == 5
    assert honest.call == "blocks.*.first, 1x1x64, 1x1x64, 64, 64, one call"
    assert honest.worker is not None and honest.worker.startswith("this process (cpu, ")
    assert unknown.verdict is not None and not unknown.passed and unknown.region is None
    assert (unknown.verdict.reason or "").startswith("unknown change 'nowhere'; known: ")
    assert exits.verdict is not None and exits.time is None
    assert exits.verdict.reason == "ended with exit status 0 before it answered"
    assert untimed.passed and untimed.time is None and untimed.call is None
    assert honest.seconds > untimed.seconds > 0
    assert all(e.failure is None for e in found[1:]) and all(e.losses == () for e in found)
    assert Evaluated.from_json(json.loads(json.dumps(honest.to_json()))) == honest


def test_another_device_or_model_file_is_refused() -> None:
    with (
        pytest.raises(UserError, match="their times would not compare: use workers with the same"),
        evaluator("cpu", f"not {cpu_name()}"),
    ):
        pass
    with pytest.raises(UserError, match="is another model file than this run's"):
        make_bench(replace(asked("exits"), model_sha256="0" * 64))


@pytest.mark.long
def test_a_worker_killed_in_the_middle_of_a_candidate_loses_nothing(tmp_path: Path) -> None:
    wanted = [asked("honest_one_pass"), asked("exits"), asked("honest_in_place", timed=False)]
    with contextlib.closing(Local(START, [CPU] * 2)) as executor:

        def find() -> int | None:
            at = (w for w in executor.team if w.at and "one_pass" in w.at.job.doing)
            worker = next(at, None)
            return None if worker is None else getattr(worker, "process").pid  # noqa: B009

        with killed(find) as seen:
            found = many(executor, wanted)
    honest, exits, in_place = found
    assert seen
    (loss,) = honest.losses
    assert loss.endswith("was killed by SIGKILL while it judges honest_one_pass.py")
    assert honest.worker is not None and not honest.worker.startswith(loss.split(" was ")[0])
    assert honest.passed and honest.time is not None
    assert exits.losses == in_place.losses == ()
    assert in_place.passed and not exits.passed
