"""Launch knobs, tuned with Optuna on the calls that the model really makes."""

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from agents.storage import Studies
from harness.bench import time_call
from optimized.change import Change, Implementation, KnobValue, nodes, replace_forward, shape_key

MAX_TRIALS = 24


def tune(
    model: nn.Module,
    change: Change,
    backend: str,
    run_step: Callable[[], object],
    *,
    studies: Studies,
    seconds: float,
) -> dict[str, dict[str, KnobValue]]:
    """The fastest valid knobs for the shape of the region's calls in `run_step`.

    Returns {} where there is nothing to tune, or where the heuristic's choice won. Trials are kept
    in `studies`, so that a resumed run goes on with them; UserError where they cannot be.
    """
    implementation = change.implementation(backend)
    if implementation.knobs is None or implementation.shape is None:
        return {}
    node, args = first_call(model, nodes(model, change.region), run_step)
    shape = implementation.shape(node, *args)
    candidates = implementation.knobs.candidates(shape)
    default = implementation.knobs.heuristic(shape)
    best = _search(change, implementation, node, args, candidates, default, studies, seconds)
    return {} if best is None else {shape_key(shape): best}


def first_call(
    model: nn.Module, names: Sequence[str], run_step: Callable[[], object]
) -> tuple[nn.Module, tuple[Any, ...]]:
    """The first of the modules `names` that `run_step` calls, and its positional arguments.

    Some are never called: a packed projection reads its siblings' weights past them.
    """
    calls: list[tuple[nn.Module, tuple[Any, ...]]] = []

    def note(node: nn.Module, args: tuple[Any, ...]) -> None:
        if not calls:
            calls.append((node, args))

    with contextlib.ExitStack() as stack:
        for name in names:
            handle = model.get_submodule(name).register_forward_pre_hook(note)
            stack.callback(handle.remove)
        with torch.no_grad():
            run_step()
    if not calls:
        raise ValueError("the region is not called in this step")
    return calls[0]


def _search(
    change: Change,
    implementation: Implementation,
    node: nn.Module,
    args: tuple[Any, ...],
    candidates: Mapping[str, Any],
    default: Any,
    studies: Studies,
    seconds: float,
) -> dict[str, KnobValue] | None:
    import optuna

    knobs_type = implementation.knobs
    assert knobs_type is not None and implementation.shape is not None
    shape = implementation.shape(node, *args)

    def time_us(values: Mapping[str, Any]) -> float:
        knobs = {shape_key(shape): knobs_type(**values)}
        candidate = replace_forward(node, change, implementation, knobs)
        return time_call(candidate, *args)

    def objective(trial: "optuna.Trial") -> float:
        values = {k: trial.suggest_categorical(k, list(v)) for k, v in candidates.items()}
        if not knobs_type(**values).is_valid(shape):
            raise optuna.TrialPruned
        return time_us(values)

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with studies.reached():
        study = optuna.create_study(
            study_name=f"{studies.mark}{change.name}:{implementation.backend}:{shape_key(shape)}",
            storage=studies.open(),
            sampler=optuna.samplers.TPESampler(seed=0),
            load_if_exists=True,
        )
        first = {name: getattr(default, name) for name in candidates}
        if not study.trials:
            study.enqueue_trial(first)
        space = sum(1 for _ in itertools.product(*candidates.values()))
        trials = min(MAX_TRIALS, space) - len(study.trials)
        if trials > 0:
            study.optimize(objective, n_trials=trials, timeout=seconds)
        finished = [t for t in study.trials if t.value is not None]
    if not finished:
        return None
    best = min(finished, key=lambda t: t.value or 0.0).params
    return None if best == first else best
