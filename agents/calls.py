"""The calls that a run's timed steps make of a region."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from harness import bench_jobs
from harness.bench_jobs import Job

if TYPE_CHECKING:
    from agents.session import Session


def calls_of(session: "Session", region: str) -> list[Job]:
    """One job for each kind of call, in the target's step, or else in the other one; ValueError if
    there are none."""
    kinds = dict.fromkeys((session.measure.kind, "decode", "prefill"))
    return bench_jobs.calls_of(session.reference, region, map(session.measure.inputs, kinds))


def caller(session: "Session") -> Callable[[str], list[Job]]:
    """`calls_of` for one run."""
    return partial(calls_of, session)
