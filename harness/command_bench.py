"""`python -m harness bench`, `ceilings` and `aa`."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness import cli
from harness.arguments import require_folder
from harness.baselines import run_baselines
from harness.bench import Step, compare, default_mode, smallest_effect, time_step
from harness.ceilings import measure_ceilings, rows
from harness.environment import environment
from harness.errors import ExitCode, UserError
from harness.floors import Floors
from harness.records import Baseline, Environment, Paired, Timing
from harness.workload import Workload, pick_device

PREFILL = "prefill-8x2048"
DECODE = "decode-bs1"


# What may be benched in the baselines' place, and of which of it each flag says something.
MODES = "peers", "evaluations", "curve", "plan"
SEVERAL = "several targets"
FLAGS = {
    "rows": ("peers",),
    "against": ("peers",),
    "cold_l2": ("peers",),
    "plan": ("peers", "curve", "plan"),
    "beyond_domain": ("curve", "plan"),
    "candidates": ("evaluations",),
    "workers": ("evaluations",),
    "target": ("", "plan", SEVERAL),
    "seconds": ("peers", "plan", SEVERAL),
    "budget_minutes": ("peers", "curve"),
    "minutes": ("",),
}
DEFAULTS = {"workers": [1, 2], "seconds": 0.4, "budget_minutes": 10.0, "minutes": 10.0}


def bench(a: argparse.Namespace) -> int:
    require_folder(a.out)
    mode = next((name for name in MODES if getattr(a, name)), "")
    if not mode and len(a.target or ()) > 1:
        mode = SEVERAL
    require_meaning(a, mode)
    if a.peers:
        from harness.command_peers import peers

        return peers(a)
    if a.evaluations:
        from harness.command_evaluations import evaluations

        return evaluations(a)
    if a.curve:
        from harness.command_curve import curves

        return curves(a)
    a.target = a.target or [DECODE]
    if a.plan or len(a.target) > 1:
        from harness.command_steps import steps

        return steps(a)
    workload = Workload.load(a.model, a.preset, a.device, a.seed)
    chosen = workload.target(a.target[0])
    targets = {"decode": workload.target(DECODE), "prefill": workload.target(PREFILL)}
    targets[chosen.kind] = chosen
    inputs = {kind: workload.inputs(target, seed=a.seed) for kind, target in targets.items()}
    here = environment(workload.device)
    found: list[Baseline] = []
    floors = Floors(workload)
    progress(f"{workload.name} {workload.preset} on {here.device_name}")
    for baseline in run_baselines(
        workload, inputs["decode"], inputs["prefill"], budget_s=60 * a.minutes
    ):
        progress(f"{baseline.name}: {baseline.absent or 'timed'}")
        found.append(baseline)
        for kind, timed in (("decode", baseline.decode), ("prefill", baseline.prefill)):
            if timed is not None:
                what = f"{baseline.name}, {targets[kind].describe()},"
                floors.require(targets[kind], inputs[kind], what, timed.median_us)
    output = {
        "model": workload.name,
        "preset": workload.preset,
        "workload": {kind: target.describe() for kind, target in targets.items()},
        "environment": here.to_json(),
        "baselines": [b.to_json() for b in found],
    }
    write(a.out, "bench.json", output)
    if a.json:
        print(json.dumps(output, indent=2))
        return ExitCode.DONE
    cli.print_table(
        f"{workload.name} {workload.preset}; {machine(here)}",
        ("baseline", *(target.describe() for target in targets.values())),
        [(b.name, timing(b.decode), timing(b.prefill)) for b in found],
    )
    for b in found:
        if b.absent or b.note:
            print(f"{b.name}: {b.absent or b.note}")
    return ExitCode.DONE


def require_meaning(a: argparse.Namespace, mode: str) -> None:
    """UserError for a flag that says nothing to what is benched; fills in what was not given."""
    for flag, wanted in FLAGS.items():
        if getattr(a, flag) and mode not in wanted:
            own = SEVERAL if flag == "target" else flag
            modes = [name for name in wanted if name not in ("", own)]
            needed = " or ".join(name if name == SEVERAL else f"--{name}" for name in modes)
            needed = needed or "the baselines of one target"
            said = flag.replace("_", "-")
            raise UserError(f"--{said} is for {needed}; give that, or leave it out")
    for flag, value in DEFAULTS.items():
        if getattr(a, flag) is None:
            setattr(a, flag, value)


def ceilings(a: argparse.Namespace) -> int:
    device = pick_device(a.device)
    measured = measure_ceilings(device)
    if a.json:
        print(json.dumps(measured.to_json(), indent=2))
    else:
        here = environment(device)
        used = f", threads: {here.cpu_threads} (a toy's runs use 1)" if here.device == "cpu" else ""
        title = f"ceilings of {measured.device_name}{used}, measured"
        cli.print_table(title, ("what", "at most"), rows(measured))
    return ExitCode.DONE


def aa(a: argparse.Namespace) -> int:
    """Exit code 1 if any comparison of the step with itself looked like a gain or a loss."""
    workload = Workload.load(a.model, a.preset, a.device, a.seed)
    target = workload.target(a.target)
    inputs = workload.inputs(target, seed=a.seed)
    mode = default_mode(workload.device) if target.kind == "decode" else "eager"
    with Step(workload.model, inputs, mode) as step:
        alone = time_step(step, budget_s=a.seconds)
        effect = smallest_effect(step, budget_s=a.seconds)
        progress(f"smallest detectable effect {effect:.2f} us of {alone.median_us:.1f} us")
        pairs = list(compared(step, effect, a.comparisons, a.seconds))
    alarms = sum(is_alarm(pair) for pair in pairs)
    if a.json:
        output = {
            "target": target.describe(),
            "step": alone.to_json(),
            "smallest_effect_us": effect,
            "alarms": alarms,
            "comparisons": [pair.to_json() for pair in pairs],
        }
        print(json.dumps(output, indent=2))
    else:
        cli.print_table(
            f"{target.describe()} against itself; smallest effect {effect:.2f} us "
            f"({effect / alone.median_us:.2%} of {alone.median_us:.1f} us)",
            ("comparison", "shown effect, us", "95% interval, us", "detectable, us", "pairs", ""),
            (
                (
                    i,
                    f"{p.gain_us:.2f}",
                    interval(p.gain_interval_us, 2),
                    f"{p.mde_us:.2f}",
                    p.pairs,
                    "alarm" if is_alarm(p) else "",
                )
                for i, p in enumerate(pairs, start=1)
            ),
        )
        print(f"{alarms} false alarms in {len(pairs)} comparisons")
    return ExitCode.FOUND if alarms else ExitCode.DONE


def compared(step: Step, effect: float, count: int, seconds: float) -> Iterable[Paired]:
    """Each comparison has a second build of the step, as a change would."""
    for i in range(count):
        with step.twin() as twin:
            yield compare(step, twin, effect, budget_s=seconds)
        progress(f"comparison {i + 1} of {count}")


def is_alarm(pair: Paired) -> bool:
    """Whether the pair would count as a gain or a loss."""
    low, high = pair.gain_interval_us
    return abs(pair.gain_us) > pair.mde_us and (low > 0 or high < 0)


def write(folder: Path | None, name: str, output: Any) -> None:
    """With `--out`, the figures as JSON in a file of that name."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / f".{name}"
    whole.write_text(json.dumps(output, indent=1) + "\n")
    whole.replace(folder / name)  # what was there stays until then
    progress(f"written to {folder / name}")


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def machine(here: Environment) -> str:
    cores = f", {here.cpu_threads} threads" if here.device == "cpu" else f", driver {here.driver}"
    return f"{here.device_name}{cores}, torch {here.torch}"


def timing(t: Timing | None) -> str:
    return "-" if t is None else f"{t.median_us:.1f} us {interval(t.interval_us)}"


def interval(bounds: tuple[float, float], digits: int = 1) -> str:
    low, high = bounds
    return f"[{low:.{digits}f}, {high:.{digits}f}]"


COMMANDS = {"bench": bench, "ceilings": ceilings, "aa": aa}
