"""How a run starts: what it needs, what it says of itself, the first event of its ledger."""

import argparse
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from agents import lock, search, storage, workers
from agents.claude import options
from agents.mcp_link import MCP
from harness.errors import UserError
from harness.ledger import Ledger
from harness.policy import allowed
from harness.records import SCHEMA

if TYPE_CHECKING:
    from agents.stack import Begun
    from harness.workload import Workload


def require_compiler() -> None:
    """Inductor compiles its CPU kernels, and Triton its launchers, with the machine's compiler."""
    named = os.environ.get("CXX")
    if named and not shutil.which(named):
        raise UserError(f"CXX is {named!r}, no program on PATH; name a C++ compiler, or unset it")
    if not named and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise UserError(
            "no C++ compiler: neither CXX nor g++, clang++ or c++ on PATH; install one "
            "(g++ in your system's packages), or set CXX"
        )


def describe(workload: "Workload", a: argparse.Namespace, minutes: float) -> str:
    """One line: the model, where it runs, its weights, the target, the proposer, the budget."""
    chosen = workload.target(a.target)
    scale = "a toy, so its sizes are cut down; " if workload.toy else ""
    scale += f"{workload.note}; " if workload.note else ""
    return (
        f"{workload.name} {workload.preset} on {workload.device.type}: "
        f"{workload.weight_bytes / 2**30:.3g} GiB of weights; {scale}"
        f"{chosen.name}: {chosen.describe()}; proposer {a.proposer}; {minutes:g} min"
    )


def opened(a: argparse.Namespace, workload: "Workload", begun: "Begun | None") -> Ledger:
    """The ledger of a new run, its first event written and its lock taken. UserError if the
    directory holds a run."""
    from agents.measure import DEFAULTS

    default = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{a.target}"
    ledger = Ledger.create(a.run_dir or default)
    lock.take(ledger)
    ledger.require_new()  # another process may have been faster
    chosen = workload.target(a.target)
    targets = {kind: workload.target(name) for kind, name in DEFAULTS.items()}
    targets[chosen.kind] = chosen
    words = storage.without(sys.argv[1:], a.storage)
    program = MCP if a.proposer == MCP else "run"
    ledger.append(
        "run",
        {
            "schema": SCHEMA,
            "target": a.target,
            "model": a.model,
            "preset": workload.preset,
            **({"note": workload.note} if workload.note else {}),
            "device": workload.device.type,
            "proposer": a.proposer,
            "seed": a.seed,
            "options": {
                "max_changes": a.max_changes,
                "budget_minutes": a.budget_minutes,
                **({"plan": begun.name} if begun else {}),
                **({"require_sandbox": True} if a.require_sandbox else {}),
                **({"allows": allowed(a)} if allowed(a) else {}),
                **search.recorded(a),
                **workers.recorded(a),
                **storage.recorded(a),
                **options.recorded(a),
            },
            **({"stands_on": begun.lines()} if begun else {}),
            "workload": {kind: target.describe() for kind, target in targets.items()},
            "command": " ".join([f"python -m agents.{program}", *words]),
        },
    )
    return ledger
