"""`python -m harness bench --peers`: our kernels beside public ones, in one run."""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import cli
from harness.bench_peers import COMPILED, IMPOSSIBLE, TORCH, PeerBench, PeerRow
from harness.bench_verdicts import PeerVerdict, verdicts
from harness.call_floors import ON_CPU
from harness.certificate import ROOT
from harness.command_bench import progress, write
from harness.environment import environment
from harness.errors import ExitCode, UserError
from harness.workload import Workload
from optimized.peers.peer import peers as known_peers
from optimized.plan import Plan
from optimized.plan_text import AUTO, place

ROWS = {"cuda": (1, 8, 128, 16384), "cpu": (1, 8)}
NAME = "peers.json"
GENERAL = TORCH, COMPILED  # ways to run any region; no library's kernels


def peers(a: argparse.Namespace) -> int:
    """Exit code 1 if one of our kernels is slower than a library's for the same job, or a time is
    below what bytes and operations take."""
    deadline = time.monotonic() + 60 * a.budget_minutes
    require_known(a.against)
    workload = Workload.load(a.model, a.preset, a.device, a.seed)
    kind = workload.device.type
    here = environment(workload.device)
    plan = load_plan(a.plan, workload.name, here.device_name)
    try:
        bench = PeerBench(
            workload,
            deadline=deadline,
            plan=plan,
            cold_l2=a.cold_l2,
            pair_s=a.seconds,
            against=a.against,
            note=progress,
        )
    except ValueError as error:
        if plan is None:
            raise
        raise UserError(f"{a.plan}: {error}") from error
    progress(f"{workload.name} {workload.preset} on {here.device_name}")
    rows: list[PeerRow] = []
    judged: list[PeerVerdict] = []

    def output() -> dict[str, Any]:
        return {
            "model": workload.name,
            "preset": workload.preset,
            "environment": here.to_json(),
            "read_gb_per_s": bench.ceilings.read_gb_per_s,
            "cold_l2": a.cold_l2,
            "absent": {name: why for name, why in bench.absent.items() if why is not None},
            "rows": [{**row.to_json(), "outcome": row.outcome} for row in rows],
            "verdicts": [verdict.to_json() for verdict in judged],
        }

    try:
        for row in bench.rows(a.rows or ROWS[kind]):
            if rows and row.rows != rows[-1].rows:
                write(a.out, NAME, output())
            rows.append(row)
        for verdict in verdicts(bench, progress):
            judged.append(verdict)
    finally:
        if rows:  # what was timed is kept whatever comes
            write(a.out, NAME, output())
    if a.json:
        print(json.dumps(output(), indent=2))
    else:
        show(bench, rows, judged)
    slower = [r for r in rows if r.outcome == "slower" and r.peer not in GENERAL]
    impossible = [r for r in rows if r.absent is not None and r.absent.startswith(IMPOSSIBLE)]
    return ExitCode.FOUND if slower or impossible else ExitCode.DONE


def require_known(against: Sequence[str]) -> None:
    """UserError for a name with which none of the peers' begins."""
    known = [*GENERAL, *dict.fromkeys(peer.name for peer in known_peers())]
    for name in against:
        if not any(peer.startswith(name) for peer in known):
            raise UserError(
                f"--against: no peer's name begins with {name!r}; known: {', '.join(known)}"
            )


def show(bench: PeerBench, rows: list[PeerRow], judged: list[PeerVerdict]) -> None:
    words = {(v.region, v.peer): v.words().partition(":")[0] for v in judged}
    cli.print_table(
        "us of one call; ratio = peer / ours, above 1 ours is faster",
        ("job", "ours", "peer", "rows", "ours us", "peer us", "ratio [95%]", "detectable")
        + ("MB", "of read bandwidth", "ours is", "peer under our contract"),
        [
            (
                row.job,
                row.change,
                row.peer,
                row.rows,
                us(row.ours_us),
                us(row.peer_us),
                ratio(row),
                "-" if row.mde is None else f"{row.mde:.1%}",
                "-" if row.bytes is None else f"{row.bytes / 1e6:.3g}",
                "-" if row.read_share is None else f"{row.read_share:.0%}",
                row.outcome,
                words.get((row.region, row.peer), "-"),
            )
            for row in rows
            if row.absent is None
        ],
        left=3,
    )
    for name, why in bench.absent.items():
        if why is not None:
            print(f"absent: {name}: {why}")
    for row in rows:
        if row.absent is not None and bench.absent.get(row.peer) is None:
            print(f"not timed: {row.peer}, {row.job}, {row.rows} rows: {row.absent}")
    for row in {(r.job, r.rows): r for r in rows if r.note}.values():
        print(f"note: {row.job}, {row.rows} rows: {row.note}")
    if bench.device.type == "cpu":
        print(f"floors: none; {ON_CPU}")
    for verdict in judged:
        if not verdict.passed:
            print(f"{verdict.peer} under the contract of {verdict.contract}: {verdict.words()}")
    library = [r for r in rows if r.ratio is not None and r.peer not in GENERAL]
    slower = [r for r in library if r.outcome == "slower"]
    if library:
        print(f"slower than a library's kernel at {len(slower)} of {len(library)} points")
    else:
        print("no library's kernel was timed")


def ratio(row: PeerRow) -> str:
    if row.ratio is None or row.ratio_interval is None:
        return "-"
    low, high = row.ratio_interval
    return f"{row.ratio:.3f} [{low:.3f}, {high:.3f}]"


def us(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def load_plan(given: str | None, model: str, device: str) -> Plan | None:
    """The plan in a file, or of a run's directory, or, for "auto", the one that the repository
    keeps for `model` on the device of that name."""
    if given is None:
        return None
    path = ROOT / place(model, device) if given == AUTO else Path(given)
    if given == AUTO and not path.exists():
        raise UserError(f"there is no {path.relative_to(ROOT)}; name a plan's file, or a run")
    if path.is_dir():
        folder, path = path, path / "plan.toml"
        if not path.exists():
            raise UserError(
                f"{folder} has no plan.toml, for nothing was kept there; name another run"
            )
    try:
        return Plan.load(path)
    except ValueError as error:
        raise UserError(str(error)) from error
