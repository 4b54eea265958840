"""Kernels of one region beside each other and beside the reference: sources, verdicts, times of one
call in turns, and the work that the call is."""

import inspect
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.bench_jobs import Job, record_jobs
from harness.clock import Clock, quiet
from harness.domains import judge_with_domain
from harness.errors import UserError
from harness.observe import CandidateError
from harness.records import Verdict
from harness.sandbox import Sandbox
from harness.sandboxed import outside_tree
from harness.step import Step, default_mode
from harness.trees import leaves
from harness.worker import first_backend
from harness.workload import Workload
from optimized.catalog import file_of, load_change
from optimized.change import Change, apply_change, share
from optimized.inductor import PREFIX, inductor_change, region_source
from traces.costs import operations

REFERENCE = "reference"
INDUCTOR = "compiled by Inductor from the reference's own forward"
UNJUDGED = "only what passed is timed"
FEWEST, MOST = 20, 2000  # rounds
WARM_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way to compute the region. The reference has no verdict; `absent` says why there are no
    times."""

    name: str
    source: str
    verdict: Verdict | None
    samples_us: np.ndarray | None  # [rounds]; the same round of every side lies in one turn
    absent: str | None

    @property
    def median_us(self) -> float | None:
        return None if self.samples_us is None else float(np.median(self.samples_us))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The sides, the reference first, and the call that was timed: what any kernel must move of it,
    and what the reference computes in it."""

    region: str
    call: str  # module and shapes
    nbytes: int
    flops: int
    sides: tuple[Side, ...]


def compare_kernels(
    workload: Workload, changes: Sequence[str], *, target: str = "decode-bs1", seconds: float = 1.0
) -> Comparison:
    """`changes` of one region, each a name or a change file, as NAME or NAME:BACKEND.

    A file from outside the project is judged in the sandbox, and runs here only once it passed.
    UserError for a change that does not exist, does not run here, or is of another region.
    """
    asked = [_split(text) for text in changes]
    if workload.device.type == "cpu" and any(backend == "triton" for _, backend in asked):
        interpret()
    judged = [_judge(workload, *name_and_backend, target) for name_and_backend in asked]
    regions = sorted({j.region for j in judged})
    if len(regions) != 1:
        raise UserError(f"changes of one region are compared, these are of {', '.join(regions)}")
    chosen = workload.target(target)
    inputs = workload.inputs(chosen, seed=workload.seed)
    jobs = record_jobs(workload.model, regions, inputs, cache=0)
    if not jobs:
        raise UserError(f"{target} does not call {regions[0]}; name another target")
    job = jobs[0]
    reference = workload.model.get_submodule(job.names[0])
    timed = {REFERENCE: reference}
    timed |= {j.name: j.tree.get_submodule(job.names[0]) for j in judged if j.tree is not None}
    samples = times_in_turns(timed, job.calls[0], seconds)
    sides = [
        Side(
            name=REFERENCE,
            source=source_of(type(reference)),
            verdict=None,
            samples_us=samples[REFERENCE],
            absent=None,
        )
    ]
    sides += [
        Side(
            name=j.name,
            source=generated_or_written(j),
            verdict=j.verdict,
            samples_us=samples.get(j.name),
            absent=j.absent,
        )
        for j in judged
    ]
    return Comparison(
        region=regions[0],
        call=f"{job.label}, {job.shapes}",
        nbytes=job.nbytes,
        flops=flops_of(reference, job),
        sides=tuple(sides),
    )


def interpret() -> None:
    """Let Triton's interpreter run kernels; UserError if they were imported to run on a card."""
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel's file is imported
    from optimized.triton_support import INTERPRETED

    if not INTERPRETED:
        raise UserError("Triton kernels are imported already; set TRITON_INTERPRET=1 and restart")


@dataclass(frozen=True, kw_only=True)
class _Judged:
    name: str
    region: str
    source: str  # the change file's text
    verdict: Verdict
    tree: nn.Module | None  # the model with the change, where it may be timed
    absent: str | None


def _split(text: str) -> tuple[str, str | None]:
    """NAME and BACKEND of NAME[:BACKEND]; Inductor's own names hold a colon."""
    if text.startswith(PREFIX):
        return text, None
    name, _, backend = text.partition(":")
    return name, backend or None


def _judge(workload: Workload, name: str, backend: str | None, target: str) -> _Judged:
    device = workload.device.type
    if outside_tree(name):
        judged = _judge_outside(workload, name, backend, target)
        if not judged.verdict.passed:
            return judged
    try:
        change = _load(name)
        backend = backend or first_backend(change, device)
        tree = share(workload.model)
        apply_change(tree, change, backend)
        source = INDUCTOR if name.startswith(PREFIX) else file_of(name).read_text()
    except ValueError as error:
        raise UserError(str(error)) from error
    if outside_tree(name):
        verdict = judged.verdict
    else:
        verdict = judge_with_domain(
            workload.model, tree, change, backend, workload, workload.seed, targets=(target,)
        )
    absent = None if verdict.passed else UNJUDGED
    if backend == "triton" and device == "cpu":
        absent = "Triton's interpreter runs it on a CPU: right in its numbers, no kernel's time"
    return _Judged(
        name=f"{change.name} ({backend})",
        region=change.region,
        source=source,
        verdict=verdict,
        tree=None if absent else tree,
        absent=absent,
    )


def _judge_outside(workload: Workload, file: str, backend: str | None, target: str) -> _Judged:
    """A change file in the sandbox; nothing of it runs here."""
    with Sandbox(workload.model, workload.device, model=workload.name) as sandbox:
        try:
            candidate = sandbox.open(file, backend)
        except CandidateError as error:
            raise UserError(f"{file} does not start: {error}") from error
        try:
            change, chosen = candidate.change, candidate.backend
            assert change is not None and chosen is not None
            verdict = judge_with_domain(
                workload.model, candidate.model, change, chosen, workload, workload.seed,
                targets=(target,),
            )  # fmt: skip
            verdict = candidate.judged(verdict)
        finally:
            candidate.close()
        return _Judged(
            name=f"{change.name} ({chosen})",
            region=change.region,
            source=Path(file).read_text(),
            verdict=candidate.judged(verdict),
            tree=None,
            absent=UNJUDGED,
        )


def _load(name: str) -> Change:
    if name.startswith(PREFIX):
        return inductor_change(name.removeprefix(PREFIX))
    return load_change(name)


def times_in_turns(
    modules: dict[str, nn.Module], args: tuple[Any, ...], seconds: float
) -> dict[str, np.ndarray]:
    """us by name, [rounds]: every round runs each module once on `args`, in another order."""
    mode = default_mode(next(t for _, t in leaves(args)).device)
    steps = {name: Step(module, args, mode) for name, module in modules.items()}
    names = list(steps)
    taken: dict[str, list[float]] = {name: [] for name in names}
    try:
        clock = Clock(steps[names[0]].device)
        clock.warm_up(list(steps.values()), limit_s=WARM_S)
        deadline = time.perf_counter() + seconds
        with quiet():
            for done in range(MOST):
                if done >= FEWEST and time.perf_counter() > deadline:
                    break
                names = names[1:] + names[:1]
                for name, us in zip(names, clock.take([steps[n] for n in names]), strict=True):
                    taken[name].append(us)
    finally:
        for step in steps.values():
            step.close()
    return {name: np.array(us) for name, us in taken.items()}


def generated_or_written(judged: _Judged) -> str:
    """What runs: the code that Inductor made of the region, else the change file."""
    made = None if judged.tree is None else region_source(judged.tree, judged.region)
    return made or judged.source


def source_of(kind: type) -> str:
    """The source of a module's class; a word on why it cannot be had."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return f"{kind.__name__}: its source cannot be found"


def flops_of(node: nn.Module, job: Job) -> int:
    """What the reference computes in the job's first call, as `traces.costs` counts it."""
    with torch.no_grad(), _Operations() as counted:
        node.forward(*job.calls[0])
    return counted.flops


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.flops += operations(func, args, kwargs or {}, result)[0]
        return result
