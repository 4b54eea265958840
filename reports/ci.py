"""`python -m reports ci`: the current run against a baseline, for a job that must not get worse.

The baseline is a file that `--update-baseline` wrote, a folder that has one for each device,
another run's directory, or a commit, which is built in a worktree and measured in turns with the
current tree.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from harness.arguments import count, positive, require_file
from harness.certificate import ROOT
from harness.errors import ExitCode, UserError
from harness.git import Git
from harness.ledger import Ledger
from harness.records import SCHEMA, Environment, Paired
from optimized.plan_text import slug
from reports import ci_page, rigs, trend
from reports.files import write_text
from reports.regression import (
    Finding,
    Outcome,
    Snapshot,
    bits,
    compare,
    environment,
    interleaved,
    measured,
)
from reports.run import KINDS, Run


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a check found; `pairs` hold the times by kind, where they were taken in turns."""

    baseline: str
    current: Snapshot
    findings: list[Finding]
    pairs: dict[str, Paired]
    seconds: float

    @property
    def regressions(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.regression]


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--baseline", required=True, metavar="FILE|FOLDER|RUN|COMMIT")
    p.add_argument("--current", required=True, type=Path, metavar="RUN")
    p.add_argument(
        "--update-baseline", action="store_true", help="write the current state to FILE; exit 0"
    )
    p.add_argument("--history", type=Path, metavar="FILE", help="append to it, and draw FILE.svg")
    p.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML")
    p.add_argument("-o", "--output", type=Path, metavar="FILE", help="Markdown; default stdout")
    p.add_argument(
        "--across-environments", action="store_true", help="compare although the machine changed"
    )
    p.add_argument("--rounds", type=count, default=18, help="of new processes, for a commit")
    p.add_argument("--seconds", type=positive, default=2.0, help="a round and kind, for a commit")


def run(a: argparse.Namespace) -> int:
    """Exit code 1 on a regression."""
    for flag, file in (("--history", a.history), ("--junit", a.junit), ("-o", a.output)):
        require_file(file, flag)  # before anything that takes long
    started = time.monotonic()
    current = Run.load(a.current)
    file, base = recorded(a.baseline, current)
    if a.update_baseline and file is None:
        raise UserError(f"--update-baseline writes a file; --baseline {a.baseline} is none")
    if file is not None or base is not None:
        current, why = fingerprinted(current)
        here = Snapshot.of(current)
        pairs: dict[str, Paired] = {}
        if base is None:
            words = f"there is no baseline {file}" + (", it is made now" * a.update_baseline)
            findings = [Finding(name="bits", outcome=Outcome.UNKNOWN, words=words)]
        else:
            findings = against(base, here, across=a.across_environments, why=why)
    else:
        findings, pairs, here = in_turns(a.baseline, current, a.rounds, a.seconds)
    report = Report(
        baseline=a.baseline,
        current=here,
        findings=findings,
        pairs=pairs,
        seconds=time.monotonic() - started,
    )
    if a.update_baseline and file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(here.to_json(), indent=1) + "\n")
    if a.history is not None:
        trend.append(a.history, report.current, report.findings, report.pairs)
    if a.junit is not None:
        write_text(a.junit, ci_page.junit(report))
    for finding in ci_page.unseen(report):
        print(f"warning: {finding.name} not compared: {finding.words}", file=sys.stderr)
    page = ci_page.markdown(report)
    if a.output is not None:
        print(write_text(a.output, page))
    else:
        print(page, end="")
    return ExitCode.FOUND if report.regressions and not a.update_baseline else ExitCode.DONE


def recorded(baseline: str, current: Run) -> tuple[Path | None, Snapshot | None]:
    """The baseline's file, if it is one, and what it or the run recorded; nothing for a commit."""
    path = Path(baseline)
    if (path / Ledger.NAME).is_file():
        return None, Snapshot.of(Run.load(path))
    if path.is_dir():
        if current.environment is None:
            raise UserError(f"{current.directory} does not say its device; name a file in {path}")
        path = path / f"{slug(current.environment.device_name)}.json"
    if path.suffix != ".json":
        return None, None
    if not path.is_file():
        return path, None
    try:
        data = json.loads(path.read_text())
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema {data.get('schema')}, this version reads schema {SCHEMA}")
        return path, Snapshot.from_json(data)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is no baseline ({error}); write one with --update-baseline"
        ) from error


def fingerprinted(run: Run, root: Path = ROOT) -> tuple[Run, str | None]:
    """The run with its fingerprint, taken now and kept in its ledger if it is of this very commit;
    or why there is none."""
    if run.points:
        return run, None
    made = run.environment.git_commit if run.environment else None
    try:
        here = Git.open(root).commit("HEAD")
        if made is None or made.partition("+")[0] != here:
            return run, f"the run is of commit {made}, this tree of {here}"
        with rigs.started([root], [rigs.order_for(run, root)]) as (rig,):
            taken = rig.ask(points=True)
    except UserError as error:
        return run, str(error)
    Ledger.open(run.directory).append("fingerprint", taken)
    return Run.load(run.directory), None


def against(
    base: Snapshot, here: Snapshot, *, across: bool, why: str | None = None
) -> list[Finding]:
    """Findings on recorded states; UserError if they are not of the same work."""
    if base.workload != here.workload:
        raise UserError(
            f"the baseline is of {base.workload}, the current run of {here.workload}; "
            "compare the same model, preset, target and seed"
        )
    found = compare(base, here, across=across)
    if why is None or found[0].outcome is not Outcome.UNKNOWN or not base.points:
        return found
    return [replace(found[0], words=f"no fingerprint of the current run: {why}"), *found[1:]]


def in_turns(
    commit: str, current: Run, rounds: int, seconds: float, root: Path = ROOT
) -> tuple[list[Finding], dict[str, Paired], Snapshot]:
    """Build `commit` beside the tree that this is, take the fingerprints of both, and time them."""
    order = rigs.order_for(current, root)
    recorded = Snapshot.of(current)
    with rigs.worktree(commit, root) as tree:
        with rigs.started([tree, root], [order, order]) as both:
            there, here = (
                replace(recorded, points=taken["points"], unstable=tuple(taken["unstable"]))
                for taken in (rig.ask(points=True) for rig in both)
            )
            machine = Environment.from_json(both[1].first["environment"])
        times = rigs.in_turns(tree, root, order, rounds=rounds, seconds=seconds)
    pairs, found = {}, []
    for kind in KINDS:
        pairs[kind] = interleaved(times.pairs[kind], times.twins[kind])
        found.append(measured(kind, pairs[kind], rounds))
    same, _ = environment(machine, machine)
    return [bits(there, here), *found, same], pairs, replace(here, environment=machine)
