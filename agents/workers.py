"""The workers of a run: flags, the ledger's record of them, and the executor that they make.

Without them candidates are judged in the run's own process, one after the other. Torch-free up to
`opened`.
"""

import argparse
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from agents.progress import Progress
from harness.arguments import count
from harness.errors import UserError
from harness.executors import local, ray
from harness.executors.base import Executor
from harness.executors.local import Local
from harness.ledger import Ledger

if TYPE_CHECKING:
    from harness.workload import Workload

LOCAL, RAY = "local", "ray"
EVENT = "workers"  # the ledger's
FLAGS = "executor", "workers", "ray_address"


def add(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("workers that judge candidates at region level")
    group.add_argument(
        "--executor",
        choices=(LOCAL, RAY),
        help="where they are: on this machine, the default, or on a Ray cluster",
    )
    group.add_argument(
        "--workers",
        type=count,
        metavar="N",
        help="how many; default none beside the run itself, with --executor local one for each "
        "card, with ray one for each free GPU, or CPU slot if the run is on a CPU",
    )
    group.add_argument(
        "--ray-address", metavar="HOST:PORT", help=f"the cluster's; default {ray.ADDRESS}, or auto"
    )


def check(a: argparse.Namespace) -> None:
    """UserError for what cannot work."""
    if a.executor == RAY:
        ray.imported()
        ray.address_of(a.ray_address)
    elif a.executor is not None or a.resume is None:
        require_ray(a)


def recorded(a: argparse.Namespace) -> dict[str, Any]:
    """For the ledger: what was asked for."""
    return {name: getattr(a, name) for name in FLAGS if getattr(a, name) is not None}


def recall(a: argparse.Namespace, options: dict[str, Any]) -> None:
    """A continued run has workers as before, or as is said now."""
    if a.executor is None:
        a.executor = options.get("executor")
        for name in ("workers", "ray_address"):
            if getattr(a, name) is None:
                setattr(a, name, options.get(name))
    require_ray(a)
    check(a)


def require_ray(a: argparse.Namespace) -> None:
    """UserError for a cluster's address without `--executor ray`."""
    if a.ray_address is not None and a.executor != RAY:
        raise UserError("--ray-address needs --executor ray; give both, or leave it out")


def devices(a: argparse.Namespace, kind: str) -> list[str]:
    """Of this machine's workers, none of which are beside the run's own process if one would do."""
    if a.executor is None and a.workers is None:
        return []
    found = local.devices(kind, a.workers)
    return found if len(found) > 1 else []


def opened(
    a: argparse.Namespace, workload: "Workload", ledger: Ledger, progress: Progress
) -> Executor | None:
    """The workers, ready, said and recorded; None without any. UserError where they cannot be had.

    Call it before the process gives up its rights, and before anything is timed.
    """
    kind = workload.device.type
    here = devices(a, kind) if a.executor != RAY else []
    if a.executor != RAY and not here:
        return None
    from harness.environment import device_name
    from harness.evaluation import describe, evaluator

    progress.stage("starting workers")
    start = partial(evaluator, kind, device_name(workload.device))
    executor: Executor
    if a.executor == RAY:
        executor = ray.apart(start, ray.address_of(a.ray_address), kind, a.workers)
    else:
        executor = Local(start, here)
    with ExitStack() as undo:
        undo.callback(executor.close)
        executor.await_ready()
        undo.pop_all()
    names = [describe(place) for place in executor.workers]
    ledger.append(EVENT, {"executor": a.executor or LOCAL, "workers": names})
    progress.done(f"{len(names)} worker(s), {a.executor or LOCAL}: {', '.join(names)}")
    return executor
