"""Where a step's time goes: bytes, launch gaps, dependency and the rest, each microsecond once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.records import Ceilings, KernelRow, StepBudget
from reports import text
from reports.figures import launches, time_us
from reports.run import Kernels, Run


def step_budget(kernels: Kernels) -> StepBudget | None:
    """Where a profiled step's time goes; None without floors.

    Ledgers that lack it hold sums by source line, whose kernels are taken to follow each other.
    """
    if kernels.budget is not None or not kernels.rows:
        return kernels.budget
    if all(row.floor_us is None for row in kernels.rows):
        return None
    known = [(row.time_us, row.floor_us) for row in kernels.rows if row.floor_us is not None]
    unknown = sum(row.time_us for row in kernels.rows if row.floor_us is None)
    gaps = sum(row.gap_us or 0.0 for row in kernels.rows)
    return StepBudget(
        step_us=time_us(kernels.rows) + gaps,
        bound_us=sum(min(us, floor) for us, floor in known),
        gap_us=gaps,
        rest_us=sum(max(0.0, us - floor) for us, floor in known),
        unknown_us=unknown,
        hidden_us=0.0,
        kernels=launches(kernels.rows),
    )


def dependency_us(kernels: Kernels, ceilings: Ceilings | None) -> float:
    """The part of a step's rest that kernels take because each waits for the one before."""
    budget = step_budget(kernels)
    return 0.0 if budget is None else min(budget.rest_us, waiting_us(kernels.rows, ceilings))


def waiting_us(rows: Sequence[KernelRow], ceilings: Ceilings | None) -> float:
    """The time beyond their floors that as many kernels which do nothing would take in turn.

    A chain of such kernels takes `launch_us` each, measured. A kernel's share of that is what of it
    is not seen as a gap, and at most what it takes beyond its floor. 0 without ceilings.
    """
    return 0.0 if ceilings is None else sum(_waits_us(row, ceilings.launch_us) for row in rows)


def _waits_us(row: KernelRow, launch_us: float) -> float:
    if row.floor_us is None:
        return 0.0
    gap = row.gap_us or 0.0
    busy = row.time_us if row.exposed_us is None else row.exposed_us - gap
    return max(0.0, min(busy - row.floor_us, row.calls * launch_us - gap))


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a step, before and after; None where the step was not traced."""

    name: str
    words: str  # what it is
    colour: str | None  # in the picture; None: not a part of the bars
    before_us: float | None
    after_us: float | None


WHOLE = "together: the profiled step"


def parts(run: Run) -> list[Part]:
    """The parts of a step of the target that are not nothing, the whole step included."""
    word = "kernel" if run.header.device == "cuda" else "operator call"
    least = text.time(run.ceilings.launch_us, 3) if run.ceilings else text.NONE

    def wait(kernels: Kernels) -> float:
        return dependency_us(kernels, run.ceilings)

    def rest(kernels: Kernels, budget: StepBudget) -> float:
        return budget.rest_us - wait(kernels)

    named: tuple[tuple[str, str, str | None, Callable[[Kernels, StepBudget], float]], ...] = (
        ("bandwidth", "moving bytes and computing, at this machine's measured ceilings", "kept",
         lambda k, b: b.bound_us),
        ("launch gaps", "nothing ran", "rejected", lambda k, b: b.gap_us),
        ("dependency", f"each {word} starts when the one before is done: {least} at the least, "
         "less its gap", "muted", lambda k, b: wait(k)),
        ("rest", "work beyond what bytes and operations need", "faint", rest),
        ("not known", f"{word}s whose bytes are not known", "failed", lambda k, b: b.unknown_us),
        (WHOLE, "", None, lambda k, b: b.step_us),
        ("besides", f"hidden behind other {word}s", None, lambda k, b: b.hidden_us),
    )  # fmt: skip
    budgets = {when: step_budget(kernels) for when, kernels in run.kernels.items()}

    def side(when: str, of: Callable[[Kernels, StepBudget], float]) -> float | None:
        budget = budgets.get(when)
        return None if budget is None else round(of(run.kernels[when], budget), 3)

    found = [
        Part(name=name, words=words, colour=colour, before_us=side("before", of),
             after_us=side("after", of))
        for name, words, colour, of in named
    ]  # fmt: skip
    return [part for part in found if part.before_us or part.after_us]
