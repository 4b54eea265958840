"""Candidates judged and timed at region level, on whatever runs them: `many(executor, asked)`.

`executor` is any of `harness.executors`: this process, this machine's devices, a Ray cluster. The
records come back in the order asked; each says which worker did it and which were lost at it.
"""

from pathlib import Path

from harness.evaluation import (
    TARGETS,
    Evaluated,
    Evaluation,
    evaluate,
    evaluator,
    many,
    sha256_of,
)
from harness.executors.base import Executor
from harness.workload import Workload

__all__ = ["Evaluated", "Evaluation", "Executor", "ask", "evaluate", "evaluator", "many"]


def ask(
    workload: Workload,
    change: str,
    backend: str | None = None,
    *,
    case_seed: int,
    targets: tuple[str, ...] = TARGETS,
    timed: bool = True,
    required: bool = False,
) -> Evaluation:
    """The evaluation of `change`, by name or file, for `workload`. A file's text goes along, so a
    worker need not see the file; OSError if it cannot be read."""
    foreign, model = change.endswith(".py"), workload.name
    return Evaluation(
        model=str(Path(model).resolve()) if model.endswith(".py") else model,
        preset=workload.preset,
        device=workload.device.type,
        seed=workload.seed,
        change=change,
        text=Path(change).read_text() if foreign else None,
        backend=backend,
        case_seed=case_seed,
        targets=targets,
        model_sha256=sha256_of(workload.name),
        timed=timed,
        allows=workload.policy.allows,
        required=required,
    )
