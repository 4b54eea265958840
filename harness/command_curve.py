"""`python -m harness bench --curve context|batch`: step time as context or batch grows."""

import argparse
import json
import time

from harness import cli
from harness.bench_curve import REFERENCE, Point, curve, targets
from harness.bench_plan import hearing, planned
from harness.ceilings import measure_ceilings
from harness.command_bench import progress, write
from harness.environment import environment
from harness.errors import ExitCode
from harness.workload import Workload


def curves(a: argparse.Namespace) -> int:
    """Times the reference, and beside it the plan's changes where a plan is given."""
    deadline = time.monotonic() + 60 * a.budget_minutes
    workload = Workload.load(a.model, a.preset, a.device, a.seed)
    here = environment(workload.device)
    with hearing() as said:
        models = {REFERENCE: workload.model}
        if (tree := planned(a, workload)) is not None:
            models["plan"] = tree
        progress(f"{workload.name} {workload.preset} on {here.device_name}")
        ceilings = measure_ceilings(workload.device)
        chosen = targets(a.curve, toy=workload.toy)
        made = curve(workload, models, chosen, deadline=deadline, ceilings=ceilings, note=progress)
        points = sorted(made, key=lambda p: (p.context, p.batch, list(models).index(p.model)))
    output = {
        "curve": a.curve,
        "model": workload.name,
        "preset": workload.preset,
        "plan": a.plan,
        "beyond_domain": a.beyond_domain,
        "environment": here.to_json(),
        "read_gb_per_s": ceilings.read_gb_per_s,
        "points": [point.to_json() for point in points],
        "notes": said.lines,
    }
    write(a.out, f"curve-{a.curve}.json", output)
    if a.json:
        print(json.dumps(output, indent=2))
    else:
        show(points, said.lines)
    timed = any(point.step is not None for point in points)
    return ExitCode.DONE if timed else ExitCode.OUT_OF_BUDGET


def show(points: list[Point], notes: list[str]) -> None:
    cli.print_table(
        "one decode step; floor: bytes over the measured read bandwidth",
        ("batch", "context", "model", "step us", "interval", "weights us", "KV us", "x floor"),
        [
            (
                p.batch,
                p.context,
                p.model,
                f"{p.step.median_us:.1f}",
                f"[{p.step.interval_us[0]:.1f}, {p.step.interval_us[1]:.1f}]",
                "-" if p.weight_floor_us is None else f"{p.weight_floor_us:.1f}",
                f"{p.kv_floor_us:.1f}",
                "-" if not p.floor_us else f"{p.step.median_us / p.floor_us:.2f}",
            )
            for p in points
            if p.step is not None
        ],
        left=3,
    )
    for p in points:
        if p.absent is not None:
            print(f"absent: batch {p.batch}, context {p.context}, {p.model}: {p.absent}")
    for note in notes:
        print(f"note: {note}")
