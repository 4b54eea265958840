"""A candidate judged and timed at region level, as a job that any worker can do.

A worker keeps the model and the sandbox of the last model that it was asked for. Verdict, base and
candidate of one evaluation are one job, so all that is compared runs on one worker.
"""

import contextlib
import functools
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from harness.bench_jobs import Job as Calls
from harness.bench_jobs import calls_of
from harness.environment import device_name
from harness.errors import SelfTestError, UserError
from harness.executors.base import Done, Executor, Job, Place
from harness.policy import Policy
from harness.records import Paired, Record, Verdict
from harness.region_bench import Found, RegionBench
from harness.sandbox import Sandbox
from harness.workload import StepInputs, Workload, pick_device

TARGETS = "decode-bs1", "prefill-8x2048"


@dataclass(frozen=True, kw_only=True)
class Evaluation(Record):
    """What is asked: model, preset and device as `Workload.load` takes them; a change by its name,
    or the `text` of a change file and the file's name."""

    model: str
    preset: str
    device: str
    seed: int  # of weights and inputs
    change: str
    text: str | None = None
    backend: str | None = None  # None: the first for the device
    case_seed: int = 0  # of the verdict's cases
    targets: tuple[str, ...] = TARGETS  # the first of these steps that calls the region is timed
    timed: bool = True  # if it passed
    allows: tuple[str, ...] = ()  # beyond the default policy
    required: bool = False  # UserError where a protection of the sandbox is missing
    model_sha256: str | None = None  # of a model file, which must be the same for every worker

    @property
    def key(self) -> str:
        """What a worker prepares for it."""
        told = self.model, self.preset, self.device, str(self.seed), *self.targets
        return " ".join((*told, *self.allows, "required" if self.required else ""))


@dataclass(frozen=True, kw_only=True)
class Evaluated(Record):
    """What came of it. Either `verdict` or `failure`, why there is none. `untimed` says why a
    candidate that passed has no `time`."""

    change: str
    region: str | None
    backend: str | None
    verdict: Verdict | None
    time: Paired | None  # of one call of the region, without the change and with it
    call: str | None  # which
    untimed: str | None
    failure: str | None
    worker: str | None  # the worker that did it, its device, its host
    losses: tuple[str, ...]  # how workers ended at it before
    seconds: float

    @property
    def passed(self) -> bool:
        return self.verdict is not None and self.verdict.passed


@contextlib.contextmanager
def evaluator(device: str, name: str) -> Iterator["Evaluator"]:
    """What a worker starts on a `device` ("cpu" or "cuda"); UserError if that is another one than
    what is called `name`: times of both would not compare."""
    here = device_name(pick_device(device))
    if here != name:
        raise UserError(
            f"the worker on {platform.node()} has a {here}, this run a {name}; their times would "
            "not compare: use workers with the same device"
        )
    with contextlib.closing(Evaluator()) as worker:
        yield worker


class Benches(Protocol):
    """What a worker of evaluations has."""

    def bench(self, asked: Evaluation) -> RegionBench: ...


@dataclass
class Evaluator:
    """One worker: the bench of the model that it was asked for last."""

    benches: dict[str, RegionBench] = field(default_factory=dict)

    def bench(self, asked: Evaluation) -> RegionBench:
        if asked.key not in self.benches:
            self.close()
            self.benches[asked.key] = make_bench(asked)
        return self.benches[asked.key]

    def close(self) -> None:
        while self.benches:
            self.benches.popitem()[1].sandbox.close()


def make_bench(asked: Evaluation) -> RegionBench:
    """The model built and its sandbox opened; UserError for what the user got wrong."""
    workload = Workload.load(asked.model, asked.preset, asked.device, asked.seed)
    workload.policy = Policy.allowing(asked.allows)
    if asked.model_sha256 != sha256_of(asked.model):
        raise UserError(
            f"{asked.model} on {platform.node()} is another model file than this run's; copy the "
            "run's to where its workers are"
        )
    sandbox = Sandbox(workload.model, workload.device, model=workload.name, required=asked.required)
    with contextlib.ExitStack() as undo:
        undo.callback(sandbox.close)
        sandbox.open(None).close()
        undo.pop_all()

    @functools.cache
    def inputs(target: str) -> StepInputs:
        return workload.inputs(workload.target(target), seed=asked.seed)

    @functools.cache
    def calls(region: str) -> list[Calls]:
        return calls_of(workload.model, region, map(inputs, asked.targets))

    return RegionBench(workload, sandbox, calls)


def sha256_of(model: str) -> str | None:
    """Of a model's file; None for a model known by its name."""
    return sha256(Path(model).read_bytes()).hexdigest() if model.endswith(".py") else None


def evaluate(asked: Evaluation, worker: Benches) -> tuple[Found, float]:
    """The job: what was found, and the seconds that it took beyond the model's preparation."""
    bench = worker.bench(asked)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="evaluation-") as folder:
        change = asked.change
        if asked.text is not None:
            path = Path(folder) / Path(asked.change).name
            path.write_text(asked.text)
            change = str(path)
        judge = bench.evaluate if asked.timed else bench.judge
        found = judge(change, asked.backend, asked.case_seed)
    return found, time.monotonic() - started


def many(
    executor: Executor,
    evaluations: Sequence[Evaluation],
    tell: Callable[[str], None] = lambda text: None,
) -> list[Evaluated]:
    """All of them, in the order asked; `tell` hears in words when one is done. A candidate that
    ends its worker three times, or breaks it, has a `failure`; UserError and SelfTestError for what
    keeps any from being judged."""
    jobs = [job_of(asked) for asked in evaluations]
    done: dict[Job, Done] = {}
    for one in executor.run(jobs):
        done[one.job] = one
        tell(f"{len(done)} of {len(jobs)} candidates judged at region level")
    return [evaluated(asked, done[job]) for asked, job in zip(evaluations, jobs, strict=True)]


def job_of(asked: Evaluation) -> Job:
    return Job(f"judges {asked.change}", asked.key, functools.partial(evaluate, asked))


def evaluated(asked: Evaluation, done: Done) -> Evaluated:
    """The record of a job that was done, or of what became of it."""
    about = Evaluated(
        change=asked.change,
        region=None,
        backend=asked.backend,
        verdict=None,
        time=None,
        call=None,
        untimed=None,
        failure=None,
        worker=None if done.worker is None else describe(done.worker),
        losses=done.losses,
        seconds=0.0,
    )
    if done.error is not None:
        if isinstance(done.error, (UserError, SelfTestError)) and done.worker is not None:
            raise done.error
        *_, last = str(done.error).strip().splitlines()
        return replace(about, failure=last)
    result, seconds = done.result
    return replace(
        about,
        region=result.region,
        backend=result.backend,
        verdict=result.verdict,
        time=result.time,
        call=result.call,
        untimed=result.untimed,
        seconds=seconds,
    )


def describe(place: Place) -> str:
    return f"{place.name} ({place.device}, {place.host})"
