"""Optuna over the launch knobs of one call: valid ones only, several compiled at a time."""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from agents.storage import Studies
from harness.threads import side_by_side
from optimized.change import KnobValue
from optimized.gemv_engines import CannotServe

if TYPE_CHECKING:
    import optuna

Values = dict[str, KnobValue]
MAX_TRIALS = 24  # timed ones
DRAWN = 11  # of them at random, before Optuna's sampler has anything to go by
MAX_DRAWN = 2_000  # most of which may be invalid
MAX_ASKED = 5 * MAX_TRIALS  # of Optuna, likewise
BATCH = 8  # compiled at once
# What knobs raise that this device cannot launch, or a library cannot serve.
UNFIT = CompilationError, OutOfResources, PTXASError, CannotServe


@dataclass(frozen=True, kw_only=True)
class Space:
    """What may be chosen; the `heuristic`'s knobs are timed first."""

    candidates: Mapping[str, Sequence[KnobValue]]
    heuristic: Values
    is_valid: Callable[[Values], bool]

    def few(self) -> list[Values] | None:
        """All that are valid, if there are few enough to time them all; those that differ from the
        heuristic in the fewest knobs come first, such as an engine to which no other knob speaks:
        time may not suffice for all."""
        every = (dict(zip(self.candidates, v, strict=True)) for v in self._products())
        found = list(itertools.islice(filter(self.is_valid, every), MAX_TRIALS + 1))
        if len(found) > MAX_TRIALS:
            return None
        return sorted(found, key=lambda v: sum(v[n] != x for n, x in self.heuristic.items()))

    def switches(self) -> list[str]:
        """The knobs that are on or off."""
        return [n for n, v in self.candidates.items() if [*map(type, v)] == [bool, bool]]

    def drawn(self, count: int) -> list[Values]:
        """`count` valid ones at random, or fewer, the same each time; the sampler learns from them.
        Among the first is each word, an engine's name, that the heuristic does not say: of one
        with few valid knobs none might be drawn. Half of what is drawn for words are first choices,
        which an engine takes where a knob says nothing to it; all words have up to half the places.
        Drawn here, since every trial that Optuna is asked for is written to its storage."""
        random = Random(0)
        found: list[Values] = []
        words = self._words()
        rounds = max(1, count // 2 // max(1, len(words)))
        for fixed in [*words * rounds, *[{}] * count]:
            for _ in range(MAX_DRAWN):
                drawn = {name: random.choice(list(v)) for name, v in self.candidates.items()}
                if fixed:
                    drawn |= {n: v[0] for n, v in self.candidates.items() if random.random() < 0.5}
                values = {**drawn, **fixed}
                if values not in [*found, self.heuristic] and self.is_valid(values):
                    found.append(values)
                    break
        return found[:count]

    def _words(self) -> list[Values]:
        return [
            {name: value}
            for name, values in self.candidates.items()
            for value in values
            if isinstance(value, str) and value != self.heuristic[name]
        ]

    def _products(self) -> Iterator[tuple[KnobValue, ...]]:
        return itertools.product(*self.candidates.values())


def search(
    name: str,
    space: Space,
    run: Callable[[Values], object],
    time_us: Callable[[Values], float],
    *,
    studies: Studies,
    seconds: float,
) -> list[tuple[float, Values]]:
    """(us, knobs) of what was timed in the study `name`, fastest first.

    `run(values)` makes the call once, so that its kernels are compiled: in threads, up to `BATCH`
    at a time. Knobs that the device cannot launch fail their trial. Ends after `MAX_TRIALS`, or
    with the batch in which `seconds` are over. Trials are kept in `studies`, and count when a run
    goes on; UserError where they cannot be kept.
    """
    import optuna
    from optuna.trial import TrialState

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    deadline = time.monotonic() + seconds
    with studies.reached():
        study = optuna.create_study(
            study_name=name,
            storage=studies.open(),
            sampler=optuna.samplers.TPESampler(n_startup_trials=DRAWN, seed=0, constant_liar=True),
            load_if_exists=True,
        )
        decided = [t.params for t in study.trials if t.state.is_finished()]
        few = space.few()
        others = space.drawn(DRAWN) if few is None else [v for v in few if v != space.heuristic]
        for values in [space.heuristic, *others]:
            if values not in decided:
                study.enqueue_trial(values)
        wanted = MAX_TRIALS if few is None else 1 + len(others)
        while batch := _batch(study, space, wanted):
            _compile(run, [trial.params for trial in batch])
            for trial in batch:
                try:
                    study.tell(trial, time_us(trial.params))
                except UNFIT:
                    study.tell(trial, state=TrialState.FAIL)
            if time.monotonic() > deadline:
                break
        timed = [(t.value, t.params) for t in study.trials if t.value is not None]
    return sorted(timed, key=lambda pair: pair[0])


def _batch(study: "optuna.Study", space: Space, wanted: int) -> list["optuna.Trial"]:
    """The next trials: valid, and other than all that came before; none once `wanted` are done."""
    from optuna.distributions import BaseDistribution, CategoricalDistribution
    from optuna.trial import TrialState

    choices: dict[str, BaseDistribution] = {
        name: CategoricalDistribution(tuple(v)) for name, v in space.candidates.items()
    }
    past = study.get_trials(deepcopy=False)
    asked = sum(t.state is not TrialState.WAITING for t in past)
    seen = [t.params for t in past if t.state in (TrialState.COMPLETE, TrialState.FAIL)]
    batch: list[optuna.Trial] = []
    while len(batch) < min(BATCH, wanted - len(seen)) and asked < MAX_ASKED:
        trial = study.ask(choices)
        asked += 1
        known = trial.params in [*seen, *(other.params for other in batch)]
        if known or not space.is_valid(trial.params):
            study.tell(trial, state=TrialState.PRUNED)
        else:
            batch.append(trial)
    return batch


def _compile(run: Callable[[Values], object], batch: Sequence[Values]) -> None:
    def compiled(values: Values) -> None:
        try:
            run(values)
        except UNFIT:
            return  # fails again, and counts, where it is timed

    side_by_side(compiled, batch, os.cpu_count() or 1)
