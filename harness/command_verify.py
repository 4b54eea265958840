"""`python -m harness verify` and `rounding-points`."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from harness import cli, memcheck, seeds, worker
from harness.audit import AMONG, Auditor, audit, drawn
from harness.bench import (
    ImpossibleTimeError,
    Step,
    both_clocks,
    compare,
    default_mode,
    empty_us,
    smallest_effect,
)
from harness.change_file import require_change
from harness.command_bench import DECODE, PREFILL, progress
from harness.domains import judge_with_domain
from harness.errors import ExitCode, UserError
from harness.floors import Floors
from harness.judge import judge_model, self_test
from harness.points import points_for_model, points_table
from harness.policy import Policy, allowed
from harness.protections import Protection, describe
from harness.records import (
    Audit,
    AuditedCall,
    Clocks,
    Latency,
    Paired,
    Verdict,
)
from harness.sandboxed import judge_sandboxed, outside_tree
from harness.spent import Seconds, collecting, rows, spent
from harness.verify_tables import print_latency, print_verdict
from harness.workload import StepInputs, Workload
from optimized.catalog import load_change
from optimized.change import Change, apply_change, limit, share
from optimized.inductor import PREFIX, inductor_change

TOY_FLOORS = "none for whole steps of a toy, whose weights may stay in a cache"
ENFORCED = "no step took less than its bytes and operations need"


def verify(a: argparse.Namespace) -> int:
    with collecting() as seconds:
        return verify_and_report(a, seconds)


def verify_and_report(a: argparse.Namespace, seconds: Seconds) -> int:
    if a.change.endswith(".py") and Path(a.change).is_file():
        require_change(Path(a.change))
    a.seed = seeds.draw() if a.seed is None else a.seed
    workload = Workload.load(a.model, a.preset, a.device, a.weights_seed)
    workload.policy = Policy.allowing(allowed(a))
    if a.backend == "triton" and workload.device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the change's file is imported
    if a.sandbox or a.require_sandbox or outside_tree(a.change):
        return verify_sandboxed(a, workload, seconds)
    change = find(a.change)
    backend = a.backend or first_backend(change, workload.device.type)
    candidate = share(workload.model)
    try:
        replaced = apply_change(candidate, change, backend)
    except ValueError as error:
        raise UserError(str(error)) from error
    progress(f"{workload.name} {workload.preset}: the judge's self-test")
    self_test(workload.model, workload, a.seed)
    progress(f"{change.name} ({backend}) replaces {len(replaced)} nodes; judging the region")
    targets = (DECODE, PREFILL) if a.time else ()
    verdicts = [
        judge_with_domain(
            workload.model, candidate, change, backend, workload, a.seed, targets=targets
        )
    ]
    if verdicts[0].domain is not None:  # it passed
        limit(candidate, change, verdicts[0].domain)
        progress("judging the model, layer by layer")
        full = a.model_level == "full"
        verdicts.append(judge_model(workload.model, candidate, workload, a.seed, full=full))
        if verdicts[-1].passed and memcheck.applies(workload.device):
            progress("checking its kernels for memory errors and races")
            asked = memcheck.Asked(
                change=a.change, region=change.region, backend=backend, seed=a.seed
            )
            checked = memcheck.check(workload, asked)
            verdicts[-1] = checked.joined(verdicts[-1])
    passed = all(verdict.passed for verdict in verdicts)
    latency, audited = None, None
    if a.time and passed:
        try:
            latency, audited = timed(workload, candidate)
        except ImpossibleTimeError as error:
            return cli.fail(f"{change.name} ({backend}): {error}", ExitCode.FOUND)
    return report(
        a, change.name, backend, verdicts, latency, seconds, audited=audited, toy=workload.toy
    )


def verify_sandboxed(a: argparse.Namespace, workload: Workload, seconds: Seconds) -> int:
    """The same for a change whose code must not run in this process; timed from outside."""
    judged = judge_sandboxed(
        workload,
        a.change,
        a.backend,
        a.seed,
        required=a.require_sandbox,
        targets=(DECODE, PREFILL) if a.time else (),
        full=a.model_level == "full",
        say=progress,
    )
    return report(
        a,
        judged.name,
        judged.backend,
        judged.verdicts,
        judged.latency,
        seconds,
        protections=judged.protections,
        audited=judged.audit,
        toy=workload.toy,
    )


def report(
    a: argparse.Namespace,
    name: str,
    backend: str | None,
    verdicts: Sequence[Verdict],
    latency: Latency | None,
    seconds: Seconds,
    protections: Sequence[Protection] = (),
    audited: Audit | None = None,
    *,
    toy: bool = False,
) -> int:
    passed = all(verdict.passed for verdict in verdicts)
    passed = passed and (audited is None or audited.reason is None)
    if a.json:
        output = {
            "change": name,
            "backend": backend,
            "passed": passed,
            "verdicts": [verdict.to_json() for verdict in verdicts],
            "latency": None if latency is None else latency.to_json(),
            "audit": None if audited is None else audited.to_json(),
            "floors": TOY_FLOORS if toy else ENFORCED,
            "seconds": {part: round(value, 3) for part, value in rows(seconds)},
            "protections": [protection.to_json() for protection in protections],
        }
        print(json.dumps(output, indent=2))
    else:
        for verdict in verdicts:
            print_verdict(f"{name} ({backend})", verdict)
        if protections:
            print(describe(protections))
        if a.time:
            parts = ((part, f"{value:.1f}") for part, value in rows(seconds))
            cli.print_table("what that took", ("part", "seconds"), parts)
        if latency is not None:
            print_latency(latency)
            print(f"floors: {TOY_FLOORS if toy else ENFORCED}")
            if audited is not None:
                print(f"audit: {audited.reason or 'what was timed is what was judged'}")
                seeds = ", ".join(f"{c.step}, {c.when}: {c.seed}" for c in audited.calls)
                print(f"inputs drawn for it, by seed: {seeds}")
        elif a.time:
            print("not timed: only what passed is")
    return ExitCode.DONE if passed else ExitCode.FOUND


def rounding_points(a: argparse.Namespace) -> int:
    workload = Workload.load(a.model, a.preset, a.device, a.seed)
    points = points_for_model(workload)
    columns, rows = points_table(points)
    if a.json:
        named = [dict(zip(columns, row, strict=True)) for row in rows]
        print(json.dumps(named, indent=2))
    else:
        title = f"{workload.name} {workload.preset}: {len(points)} rounding points"
        cli.print_table(title, columns, rows, left=len(columns) - 1)
    return ExitCode.DONE


def find(name: str) -> Change:
    if name.startswith(PREFIX):
        return inductor_change(name.removeprefix(PREFIX))
    try:
        return load_change(name)
    except ValueError as error:
        raise UserError(str(error)) from error


def first_backend(change: Change, device_type: str) -> str:
    try:
        return worker.first_backend(change, device_type)
    except ValueError as error:
        raise UserError(str(error)) from error


@spent("timing")
def timed(workload: Workload, candidate: nn.Module) -> tuple[Latency, Audit]:
    """The model with the change against the model without it, both kinds of step, and whether what
    was timed is what was judged. ImpossibleTimeError where work must have been skipped."""
    floors, calls, clocks = Floors(workload), list[AuditedCall](), list[Clocks]()

    def paired(name: str) -> Paired:
        target = workload.target(name)
        progress(f"timing {target.describe()}")
        inputs = workload.inputs(target, seed=workload.seed)

        def fresh(seed: int) -> StepInputs:
            return drawn(workload, target, seed)

        mode = default_mode(workload.device) if target.kind == "decode" else "eager"
        with Step(workload.model, inputs, mode) as base, Step(candidate, inputs, mode) as changed:
            trusted = workload.model
            auditor = Auditor(changed, candidate, fresh, target.kind, AMONG, trusted=trusted)
            pair = compare(base, changed, smallest_effect(base), auditor=auditor)
            calls.append(auditor.check())
            calls.append(audit(changed, candidate, fresh, name=target.kind, trusted=trusted))
            if target.kind == "decode":
                clocks.append(both_clocks(changed, gap_us=empty_us(workload.device)))
            floors.require(target, inputs, target.describe(), pair.candidate_us)
        return pair

    latency = Latency(decode=paired(DECODE), prefill=paired(PREFILL))
    return latency, Audit(calls=tuple(calls), clocks=clocks[0])


COMMANDS = {"verify": verify, "rounding-points": rounding_points}
