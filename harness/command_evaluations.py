"""`python -m harness bench --evaluations`: candidates a minute, by the number of workers."""

import argparse
import functools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from harness import cli
from harness.command_bench import progress, write
from harness.environment import device_name, environment
from harness.errors import ExitCode, UserError
from harness.evaluation import Benches, Evaluated, Evaluation, evaluator, many, sha256_of
from harness.executors.base import Job
from harness.executors.local import Local, cards_here, devices
from harness.records import Record
from harness.workload import Workload
from optimized.catalog import for_model

PREPARES = "prepares the model"


@dataclass(frozen=True, kw_only=True)
class Throughput(Record):
    """The same candidates on so many workers, each with its model prepared beforehand."""

    workers: int
    candidates: int
    passed: int
    seconds: float
    lost: int  # workers that ended at a candidate, which another then judged

    @property
    def per_minute(self) -> float:
        return 60 * self.candidates / self.seconds


def evaluations(a: argparse.Namespace) -> int:
    """Exit code 1 if a verdict depends on the number of workers."""
    workload = Workload.load(a.model, a.preset, a.device, a.seed)
    kind = workload.device.type
    asked = candidates(workload, a.candidates)
    counts = possible(kind, a.workers)
    here = environment(workload.device)
    load = os.getloadavg()[0]
    progress(f"{workload.name} {workload.preset} on {here.device_name}: {len(asked)} candidates")
    start = functools.partial(evaluator, kind, device_name(workload.device))
    measured: list[Throughput] = []
    verdicts: list[list[bool]] = []
    for count in counts:
        with_executor = Local(start, devices(kind, count))
        try:
            found, seconds = timed(with_executor, asked)
        finally:
            with_executor.close()
        verdicts.append([e.passed for e in found])
        measured.append(summed(count, found, seconds))
        progress(f"{count} worker(s): {seconds:.1f} s, {measured[-1].per_minute:.1f} a minute")
    same = all(row == verdicts[0] for row in verdicts)
    said = sentences(kind, measured, a.workers, same, load)
    output = {
        "model": workload.name,
        "preset": workload.preset,
        "environment": here.to_json(),
        "candidates": [f"{e.change} ({e.backend})" for e in asked],
        "throughput": [{**m.to_json(), "per_minute": m.per_minute} for m in measured],
        "same_verdicts": same,
        "notes": said,
    }
    write(a.out, "evaluations.json", output)
    if a.json:
        print(json.dumps(output, indent=2))
    else:
        cli.print_table(
            f"candidates judged and timed at region level; {workload.name} {workload.preset} on "
            f"{here.device_name}",
            ("workers", "candidates", "passed", "seconds", "a minute", "workers lost"),
            [
                (
                    m.workers,
                    m.candidates,
                    m.passed,
                    f"{m.seconds:.1f}",
                    f"{m.per_minute:.2f}",
                    m.lost,
                )
                for m in measured
            ],
        )
        print("\n".join(said))
    return ExitCode.DONE if same else ExitCode.FOUND


def candidates(workload: Workload, limit: int | None) -> list[Evaluation]:
    """Every catalogued change that the device can run on the model; UserError if there is none."""
    workload.model = workload.file.build(workload.config, "meta", workload.seed)  # names only
    kind = workload.device.type
    found = [
        Evaluation(
            model=workload.name,
            preset=workload.preset,
            device=kind,
            seed=workload.seed,
            change=change.name,
            backend=implementation.backend,
            model_sha256=sha256_of(workload.name),
        )
        for change, implementation in for_model(workload.model, kind)
    ]
    if not found:
        raise UserError(
            f"no catalogued change fits {workload.name} on {kind}; choose another model"
        )
    return found[:limit]


def possible(kind: str, counts: Sequence[int]) -> list[int]:
    """The numbers of workers that this machine has devices for; UserError if it has none."""
    if kind == "cpu":
        return list(counts)
    cards = len(cards_here())
    found = [count for count in counts if count <= cards]
    if not found:
        raise UserError(f"--workers {min(counts)} needs as many cards, {cards} are visible here")
    return found


def timed(executor: Local, asked: Sequence[Evaluation]) -> tuple[list[Evaluated], float]:
    """All evaluated, and the seconds that it took from when every worker had its model."""
    executor.await_ready()
    prepare = functools.partial(prepared, asked[0])
    for done in executor.run([Job(PREPARES, asked[0].key, prepare) for _ in executor.workers]):
        done.value()
    started = time.monotonic()
    return many(executor, asked, progress), time.monotonic() - started


def prepared(asked: Evaluation, worker: Benches) -> None:
    worker.bench(asked)


def summed(count: int, found: Sequence[Evaluated], seconds: float) -> Throughput:
    return Throughput(
        workers=count,
        candidates=len(found),
        passed=sum(e.passed for e in found),
        seconds=seconds,
        lost=sum(len(e.losses) for e in found),
    )


def sentences(
    kind: str, measured: Sequence[Throughput], wanted: Sequence[int], same: bool, load: float
) -> list[str]:
    """What keeps more workers from judging more, then the ratio of the last to the first. `load` is
    the machine's before any of them started."""
    first, last = measured[0], measured[-1]
    said = []
    if not same:
        said.append("verdicts differ between the runs: one of them is wrong")
    if (left := [n for n in wanted if n not in {m.workers for m in measured}]) and kind != "cpu":
        cards = len(cards_here())
        said.append(
            f"not run with {', '.join(map(str, left))} workers: each needs a card of its own, and "
            f"this machine shows {cards}"
        )
    cores = len(os.sched_getaffinity(0))
    most = max(m.workers for m in measured)
    if cores < most:
        said.append(f"too few cores: {most} workers shared {cores}")
    elif cores < most + int(load + 0.5):  # in whole cores
        said.append(
            f"too few free cores: {most} workers shared {cores} with other work (load {load:.1f} "
            "before they started)"
        )
    if last is not first:
        said.append(
            f"{last.workers} workers judge {last.per_minute / first.per_minute:.2f} times as many "
            f"candidates a minute as {first.workers}"
        )
    return said
