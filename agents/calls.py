"""The calls that a run's timed steps make of a region."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from harness.bench_jobs import Job, last_cache_bytes, record_jobs
from optimized.change import nodes, region_of

if TYPE_CHECKING:
    from agents.session import Session


def calls_of(session: "Session", region: str) -> list[Job]:
    """One job for each kind of call, in the target's step, or else in the other one; ValueError if
    there are none."""
    model = session.reference
    if not nodes(model, region):
        known = sorted({region_of(m) for name, m in model.named_modules() if name})
        raise ValueError(f"there is no region {region!r}; there are {', '.join(known)}")
    cache = last_cache_bytes(session.workload.device)
    for kind in dict.fromkeys((session.measure.kind, "decode", "prefill")):
        found = record_jobs(model, [region], session.measure.inputs(kind), cache)
        if found:
            return found
    raise ValueError(f"no step calls {region} with plain arguments")


def caller(session: "Session") -> Callable[[str], list[Job]]:
    """`calls_of` for one run."""
    return partial(calls_of, session)
