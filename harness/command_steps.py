"""`python -m harness bench --plan PLAN --target T ...`: a plan beside the reference's baselines."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from torch import nn

from harness import cli
from harness.bench_curve import free
from harness.bench_plan import Said, hearing, planned
from harness.bench_steps import StepFigures, figures
from harness.ceilings import measure_ceilings
from harness.command_bench import interval, machine, progress, write
from harness.environment import environment
from harness.errors import ExitCode
from harness.records import Environment
from harness.workload import Target, Workload


def steps(a: argparse.Namespace) -> int:
    """Exit code 1 if the plan is surely slower than torch.compile anywhere."""
    workload = Workload.load(a.model, a.preset, a.device, a.seed)
    targets = [workload.target(name) for name in a.target]
    here = environment(workload.device)
    with hearing() as said:
        tree = planned(a, workload)
        progress(f"{workload.name} {workload.preset} on {here.device_name}")
        output, found = measured(a, workload, targets, tree, here, said)
    if a.json:
        print(json.dumps(output, indent=2))
    else:
        print(f"{workload.name} {workload.preset}; {machine(here)}")
        for one in found:
            show(one)
        for line in said.lines:
            print(f"note: {line}")
    slower = any(one.pair is not None and one.pair.is_slower for one in found)
    return ExitCode.FOUND if slower else ExitCode.DONE


def measured(
    a: argparse.Namespace,
    workload: Workload,
    targets: Sequence[Target],
    tree: nn.Module | None,
    here: Environment,
    said: Said,
) -> tuple[dict[str, Any], list[StepFigures]]:
    """All targets, with what is written after each: the next may not fit."""
    ceilings = None if workload.toy else measure_ceilings(workload.device)
    found: list[StepFigures] = []
    output: dict[str, Any] = {}
    for target in targets:
        free(workload.device)  # of the last one's cache
        found.append(
            figures(workload, target, tree, seconds=a.seconds, ceilings=ceilings, note=progress)
        )
        output = {
            "model": workload.name,
            "preset": workload.preset,
            "plan": a.plan,
            "environment": here.to_json(),
            "read_gb_per_s": None if ceilings is None else ceilings.read_gb_per_s,
            "steps": [one.to_json() for one in found],
            "notes": said.lines,
        }
        write(a.out, "steps.json", output)
    return output, found


def show(one: StepFigures) -> None:
    floor = one.floor_us
    title = one.described
    if floor is not None:
        cache = "" if one.kv_floor_us is None else f", of which cache {one.kv_floor_us:.1f} us"
        title += f"; floor {floor:.1f} us{cache}"
    cli.print_table(
        title,
        ("step", "us", "interval", "x floor"),
        [
            (
                way.name,
                f"{way.step.median_us:.1f}",
                interval(way.step.interval_us),
                "-" if floor is None else f"{way.step.median_us / floor:.2f}",
            )
            for way in one.ways
            if way.step is not None
        ],
    )
    for way in one.ways:
        if way.absent or way.note:
            print(f"{way.name}: {way.absent or way.note}")
    if one.pair is not None:
        print(f"plan against compile, in turns: {against(one)}")


def against(one: StepFigures) -> str:
    pair = one.pair
    assert pair is not None
    word = "faster" if pair.is_faster else "slower" if pair.is_slower else "no different"
    return (
        f"{word}, {pair.base_us / pair.candidate_us:.3f}x; {pair.gain_us:.1f} us "
        f"{interval(pair.gain_interval_us)} (smallest detectable effect {pair.mde_us:.1f} us)"
    )
