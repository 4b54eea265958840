"""Launch knobs, tuned on the calls that the model really makes.

Every shape of the region's calls is tuned by itself, with a cold L2. What is fastest alone need not
be so among its neighbours, which overlap with it: the fastest few are set beside the heuristic's
choice in the whole step, and the step decides. So it does on each knob that is on or off, most of
which say what a kernel does for its neighbours. Not so of calls that are hardly any of the step:
what they gain is below what a step in short can tell. Of a region's calls the rarest are not tuned.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from agents.knob_search import UNFIT, Space, Values, search
from agents.storage import Studies
from harness.bench import time_call
from optimized.change import Change, Implementation, nodes, replace_forward, shape_key

Knobs = dict[str, Values]  # by shape
SMALL = 0.02  # of the step: calls of a shape that take less together are decided alone
RARE = 0.03  # of the region's calls, in time: a shape that is less of them is not tuned
TRIED = 3  # of a shape's fastest, in the whole step
TRIAL_S = 0.1  # one timing


@dataclass(frozen=True)
class Call:
    """A call of a region, and how many of this shape a step makes."""

    node: nn.Module  # the reference's
    args: tuple[Any, ...]
    shape: Mapping[str, int]
    count: int


def tune(
    model: nn.Module,
    change: Change,
    backend: str,
    run_step: Callable[[], object],
    *,
    studies: Studies,
    seconds: float,
    step_us: Callable[[Knobs], float] | None = None,
) -> Knobs:
    """The best knobs by shape where they are not the heuristic's, of the calls in `run_step`, which
    runs `model`, to which `change` is applied already.

    `step_us` is the time of the whole step with such knobs; without it the fastest calls count. The
    `seconds` are shared out among the shapes by their time in the step, and the steps take as many
    again. Trials are kept in `studies`, so that a resumed run goes on with them; UserError where
    they cannot be.
    """
    implementation = change.implementation(backend)
    if implementation.knobs is None or implementation.shape is None:
        return {}
    tuned = [
        _Tuned(change, implementation, call)
        for call in calls(model, change, implementation, run_step)
    ]
    weights = [t.time_us(t.space.heuristic) * t.call.count for t in tuned]
    found: dict[str, list[Values]] = {}
    for i in sorted(range(len(tuned)), key=lambda i: -weights[i]):
        one = tuned[i]
        if weights[i] < RARE * sum(weights):
            found[one.key] = []
            continue
        name = f"{studies.mark}{change.name}:{backend}:{one.key}"
        share_s = seconds * weights[i] / sum(weights)
        timed = search(name, one.space, one.run, one.time_us, studies=studies, seconds=share_s)
        found[one.key] = [values for _, values in timed[:TRIED]]
    heuristics = {one.key: one.space.heuristic for one in tuned}
    if step_us is None:
        chosen = {key: fastest[0] for key, fastest in found.items() if fastest}
    else:
        totals_us = {one.key: weight for one, weight in zip(tuned, weights, strict=True)}
        spaces = {one.key: one.space for one in tuned if found[one.key]}
        chosen = in_step(found, heuristics, totals_us, step_us, spaces=spaces, seconds=seconds)
    return {key: values for key, values in chosen.items() if values != heuristics[key]}


def in_step(
    found: Mapping[str, Sequence[Values]],
    heuristics: Knobs,
    totals_us: Mapping[str, float],
    step_us: Callable[[Knobs], float],
    *,
    spaces: Mapping[str, Space] | None = None,
    seconds: float = float("inf"),
) -> Knobs:
    """The knobs of each shape with which the whole step is fastest: from the heuristic's, one shape
    after the other, in the order of `found`; then with each knob of `spaces` that is on or off the
    other way; the fastest alone of shapes whose calls in a step, of `totals_us` with the
    heuristic's, are few. `seconds` suffice for one trial of each shape at least."""
    best: Knobs = dict(heuristics)
    trials = {key: [v for v in fastest if v != best[key]] for key, fastest in found.items()}
    switches = {key: space.switches() for key, space in (spaces or {}).items()}
    if not any(trials.values()) and not any(switches.values()):
        return best
    least_us = step_us(best)
    deadline = time.monotonic() + seconds
    small = [key for key in found if totals_us[key] < SMALL * least_us]
    best |= {key: found[key][0] for key in small if found[key]}
    large = [key for key in found if key not in small]
    each: list[tuple[str, Values | str]] = [(key, v) for key in large for v in trials[key]]
    each += [(key, name) for key in large for name in switches.get(key, [])]
    for key, trial in each:
        is_fastest = trial in trials[key][:1]
        if not is_fastest and time.monotonic() > deadline:
            continue
        values = {**best[key], trial: not best[key][trial]} if isinstance(trial, str) else trial
        if spaces is not None and not spaces[key].is_valid(values):
            continue
        tried = {**best, key: values}
        try:
            time_us = step_us(tried)
        except UNFIT:
            continue
        if time_us < least_us:
            best, least_us = tried, time_us
    return best


class _Tuned:
    """The call of one shape, to be made with any knobs."""

    def __init__(self, change: Change, implementation: Implementation, call: Call) -> None:
        assert implementation.knobs is not None
        self.change, self.implementation, self.call = change, implementation, call
        self.key, self.knobs = shape_key(call.shape), implementation.knobs
        candidates = self.knobs.candidates(call.shape)
        default = self.knobs.heuristic(call.shape)
        self.space = Space(
            candidates=candidates,
            heuristic={name: getattr(default, name) for name in candidates},
            is_valid=lambda values: self.knobs(**values).is_valid(call.shape),
        )

    def candidate(self, values: Values) -> nn.Module:
        knobs = {self.key: self.knobs(**values)}
        return replace_forward(self.call.node, self.change, self.implementation, knobs)

    def run(self, values: Values) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a thread of its own begins without a context of the card
        with torch.no_grad():
            self.candidate(values)(*self.call.args)

    def time_us(self, values: Values) -> float:
        return time_call(self.candidate(values), *self.call.args, budget_s=TRIAL_S)


def calls(
    model: nn.Module,
    change: Change,
    implementation: Implementation,
    run_step: Callable[[], object],
) -> list[Call]:
    """The calls of the nodes that `change` replaced in `model`, the first of each shape, as
    `run_step` makes them; those that its guard leaves to the reference are no shapes of it."""
    assert implementation.shape is not None
    first: dict[str, tuple[nn.Module, tuple[Any, ...], Mapping[str, int]]] = {}
    counts: dict[str, int] = {}

    def note(replaced: Any, args: tuple[Any, ...]) -> None:
        if replaced.declines is not None and replaced.declines(*args) is not None:
            return
        shape = implementation.shape(replaced.replaces(), *args)  # pyright: ignore[reportOptionalCall]
        key = shape_key(shape)
        first.setdefault(key, (replaced.replaces(), args, shape))
        counts[key] = counts.get(key, 0) + 1

    with contextlib.ExitStack() as stack:
        for name in nodes(model, change.region):
            node = model.get_submodule(name)
            if getattr(node, "applied", None) == change.name:
                stack.callback(node.register_forward_pre_hook(note).remove)
        with torch.no_grad():
            run_step()
    return [Call(*first[key], counts[key]) for key in first]
