"""`python -m harness bisect`."""

import argparse
import json
import os
from pathlib import Path

from harness import cli
from harness.bisect import Bisection, bisect, read_run
from harness.command_bench import progress
from harness.errors import ExitCode
from harness.explain import percent
from harness.ledger import Ledger
from harness.workload import Workload


def run_bisect(a: argparse.Namespace) -> int:
    run = read_run(Ledger.open(Path(a.run)))
    device = run.device if a.device == "auto" else a.device
    workload = Workload.load(run.model, run.preset, device, run.seed)
    if workload.device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a change's file is imported
    found = bisect(workload, run.changes, run.verdict_seed, progress)
    if a.json:
        print(json.dumps({"found": None if found is None else found.to_json()}, indent=2))
    elif found is None:
        print(f"{workload.name} {workload.preset} with all {len(run.changes)} change(s) passes")
    else:
        print_found(found, len(run.changes))
    return ExitCode.DONE if found is None else ExitCode.FOUND


def print_found(found: Bisection, count: int) -> None:
    print(f"change {found.index} of {count} is the first that fails: {found.change} "
          f"({found.backend})")  # fmt: skip
    print(f"the model up to it: {found.model_verdict.reason}")
    print(f"its region alone: {found.region_verdict.reason or 'passed'}")
    if not found.points:
        print("no interior rounding point that it keeps or elides explains it")
        return
    cli.print_table(
        "its rounding points",
        ("point", "operator", "source", "declared", "observed", "elements that show it"),
        (
            (p.point, p.operator, p.source, p.declared, p.observed, percent(p.visible_share))
            for p in found.points
        ),
        left=5,
    )


COMMANDS = {"bisect": run_bisect}
