"""The main command: `python -m agents.run --target decode-bs1`."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness import cli

try:
    from agents import base, lock, other_targets, search, start, storage, workers
    from agents.claude import options, secrets
    from agents.mcp_link import MCP
    from agents.pulse import Pulse
    from harness.arguments import count, positive, require_folder, seed
    from harness.change_file import require_change
    from harness.errors import ExitCode, UserError
    from harness.ledger import Ledger
    from harness.policy import Policy, add_options, allowed
except ModuleNotFoundError as missing:
    cli.end_without(missing, __name__)

DEFAULT_MINUTES = {"cpu": 4.7, "cuda": 60.0}
BEGUN_WITH = "target", "model", "preset", "device", "proposer", "seed"  # a run, for good
WAITING = "waiting for the run's earlier process"
ENDING_S = 600.0  # for a run whose coding agent has left to come to its end


def parser() -> argparse.ArgumentParser:
    p = cli.Parser(
        prog="python -m agents.run",
        description="Profile a model, propose fusions, check each against the reference, "
        "measure it, and keep what holds.",
    )
    add_run(p)
    p.add_argument(
        "--proposer", default="auto", help="auto, catalog, inductor, claude or replay:FILE"
    )
    p.add_argument("--budget-minutes", type=positive, help="stop when so much time is used up")
    p.add_argument(
        "--change",
        type=Path,
        metavar="FILE",
        action="append",
        default=[],
        help="try this change file first, after a sandboxed verdict; may be given again",
    )
    p.add_argument(
        "--stall-minutes",
        type=positive,
        help="end a change that shows no progress for so long; default a quarter of the budget, "
        "at least 4",
    )
    add_options(p)
    options.add(p)
    search.add(p)
    other_targets.add(p)
    workers.add(p)
    storage.add(p)
    p.add_argument("--dry-run", action="store_true", help="say what would be run, and stop")
    p.add_argument("--json", action="store_true", help="print summary.json on stdout")
    return p


def add_run(p: argparse.ArgumentParser) -> None:
    """What a run takes, whoever writes its changes."""
    p.add_argument("--target", help="what to make faster: decode-bs1, prefill-8x2048, ...")
    p.add_argument(
        "--model", default="beam", help="a known model, or the path of a model file (.py)"
    )
    p.add_argument("--preset", default="auto", help="a size of the model; auto picks by the device")
    p.add_argument("--device", default="auto", help="auto, cpu or cuda")
    p.add_argument("--seed", type=seed, default=0, help="seed of weights and step inputs")
    p.add_argument(
        "--plan",
        metavar="FILE|RUN|auto|none",
        help="changes to begin with; auto, the default: those in optimized/plans/ for this model "
        "and device",
    )
    p.add_argument("--max-changes", type=count, help="stop after so many judged changes")
    p.add_argument("--run-dir", type=Path, help="where to write; default runs/<date>-<target>")
    p.add_argument("--resume", type=Path, metavar="DIR", help="go on with a run that stopped")
    p.add_argument(
        "--other-card",
        action="store_true",
        help="with --resume: go on although the GPU is another one of the same kind",
    )
    p.add_argument(
        "--require-sandbox",
        action="store_true",
        help="run no change here before a sandboxed verdict; refuse if a protection is missing",
    )


def main(argv: list[str] | None = None) -> int:
    """Run in this process, which nothing watches."""
    arguments = words(argv)
    return live(arguments, arguments.resume, 0.0, Pulse())


def supervised(argv: list[str] | None = None) -> int:
    """Run in a process of its own: the run goes on when a candidate ends it."""
    arguments = words(argv)
    if arguments.dry_run:
        return live(arguments, arguments.resume, 0.0, Pulse())
    from agents.supervised import Supervisor

    if options.writes_code(arguments):
        secrets.take()  # before the run's processes are forked
    begin = partial(live, arguments)
    return Supervisor(begin, arguments.resume, arguments.stall_minutes).run()


def command() -> int:
    """The program, by its own command line."""
    base.enter(words(None))
    return supervised()


def words(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked as far as it can be without PyTorch."""
    arguments = parser().parse_args(argv)
    check(arguments)
    if arguments.resume is not None:
        recall(arguments, readable(arguments.resume), given(parser(), argv))
    elif arguments.target is None:
        raise UserError("--target is missing; name what to make faster, such as decode-bs1")
    return arguments


def live(a: argparse.Namespace, directory: Path | None, used_s: float, pulse: Pulse) -> int:
    """Work on a new run, or on the one in `directory`, of whose budget `used_s` are gone.
    UserError if another process works on it."""
    ledger = None
    try:
        if directory is not None:
            ledger = Ledger.open(directory)
            recall(a, ledger)
            if not a.dry_run:
                patience_s = ENDING_S if a.proposer == MCP else lock.PATIENCE_S
                lock.take(ledger, patience_s, lambda: pulse.tell(stage=WAITING))
        return work(a, ledger, used_s, pulse)
    finally:
        lock.let_go()


def check(a: argparse.Namespace) -> None:
    """What can be told from the words alone, before anything heavy is imported."""
    names = [file.name for file in a.change]
    if double := next((n for n in names if names.count(n) > 1), None):
        raise UserError(f"two change files are called {double}; rename one")
    for file in a.change:
        require_change(file)
    options.check(a)
    search.check(a)
    other_targets.check(a)
    workers.check(a)
    if a.resume is None:
        storage.check(a, confined=confined(a))
    if a.other_card and a.resume is None:
        raise UserError("--other-card is of a continued run; give --resume, or leave it out")
    if a.resume is not None and a.run_dir is not None:
        raise UserError("--resume names the run's directory already; leave --run-dir out")
    if a.resume is None and a.run_dir is not None:
        Ledger(a.run_dir).require_new()
        require_folder(a.run_dir, "--run-dir")
    if a.resume is not None and a.plan is not None:
        raise UserError("a continued run stands on what it began with; leave --plan out")


def readable(directory: Path) -> Ledger:
    """The ledger in `directory`; UserError if any of its events is damaged."""
    from reports.run import Run

    Run.load(directory)
    return Ledger.open(directory)


def given(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> dict[str, Any]:
    """What the command line says of what a run is begun with, without defaults."""
    said = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(BEGUN_WITH)))
    return {name: value for name in BEGUN_WITH if (value := getattr(said, name)) is not None}


def recall(
    a: argparse.Namespace, ledger: Ledger, said: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """A continued run goes on with what it was started with; UserError where `said` is another."""
    run = ledger.header()
    for name, value in said.items():
        if value != run[name] and (name, value) not in (("preset", "auto"), ("device", "auto")):
            raise UserError(
                f"{ledger.directory} is a run with --{name} {run[name]}, not {value}; "
                f"leave --{name} out, or start a new run"
            )
    for name in BEGUN_WITH:
        setattr(a, name, run[name])
    known = run.get("options") or {}
    a.budget_minutes = a.budget_minutes or known.get("budget_minutes")
    a.require_sandbox |= bool(known.get("require_sandbox"))
    a.allow_added = [*a.allow_added, *known.get("allows", [])]
    options.recall(a, known)
    search.recall(a, known)
    workers.recall(a, known)
    storage.recall(a, known)
    storage.check(a, confined=confined(a))


def confined(a: argparse.Namespace) -> bool:
    """Whether the run's process gives up the network (`agents.sandboxed.give_up_rights`)."""
    return a.require_sandbox or a.proposer == MCP or options.writes_code(a)


def work(a: argparse.Namespace, ledger: Ledger | None, used_s: float, pulse: Pulse) -> int:
    from agents.budget import Budget
    from agents.given import take
    from agents.loop import Loop
    from agents.measure import DEFAULTS
    from agents.progress import Progress
    from agents.proposers.auto import require_known
    from agents.session import Session
    from agents.stack import AUTO, plan_for
    from harness.workload import Workload
    from reports.terminal import print_run
    from reports.write import write_reports

    require_known(a.proposer)
    only = a.other_targets == other_targets.ONLY
    limits = None if only else options.of(a)  # which needs a key
    workload = Workload.load(a.model, a.preset, a.device, a.seed)
    workload.policy = Policy.allowing(allowed(a))
    workload.target(a.target)
    start.require_compiler()
    minutes = a.budget_minutes or DEFAULT_MINUTES[workload.device.type]
    summary = start.describe(workload, a, minutes)
    if a.dry_run:
        print(summary)
        return ExitCode.DONE
    storage.require_reachable(a)
    workers.devices(a, workload.device.type)  # refuses more than there are cards
    workload.require_memory(*{workload.target(t) for t in (a.target, *DEFAULTS.values())})
    workload.require_callable()
    new, standing = ledger is None, ""
    if ledger is None:
        begun = plan_for(a.plan or AUTO, workload)
        ledger = start.opened(a, workload, begun)
        standing = "" if begun is None else begun.describe()
    cli.set_cache_environment(ledger.directory / "cache")
    pulse.tell(directory=str(ledger.directory), budget=minutes)
    given = take(a.change, ledger)
    budget = Budget(minutes, used_s)
    progress = Progress(budget, pulse=pulse)
    progress.done(f"run directory: {ledger.directory}" + ("" if new else " (continued)"))
    progress.done(summary)
    if standing:
        progress.done(standing)
    executor = None
    try:
        executor = workers.opened(a, workload, ledger, progress)
        session = Session(
            workload,
            ledger,
            a.target,
            budget,
            progress,
            other_card=a.other_card,
            executor=executor,
            studies=storage.Studies.of(ledger, a.storage),
        )
        loop = Loop(
            session,
            a.proposer,
            a.max_changes,
            given,
            require_sandbox=a.require_sandbox,
            options=limits,
            limits=search.limits(a),
            others=a.other_targets,
        )
        reason = loop.run()
    except KeyboardInterrupt:
        ledger.append("stopped", {"reason": "interrupted"})
        progress.close()
        write_reports(ledger.directory)
        progress.done(f"interrupted; continue with --resume {ledger.directory}", "yellow")
        return ExitCode.INTERRUPTED
    finally:
        if executor is not None:
            executor.close()
        progress.close()
    paths = write_reports(ledger.directory)
    if a.json:
        print((ledger.directory / "summary.json").read_text())
    else:
        print_run(ledger.directory)
        for path in paths:
            print(path)
    closing = ledger.last("model_verdict")
    if closing is not None and not closing["passed"]:
        return ExitCode.FOUND
    judged = any(e.kind == "attempt" and not e.data["control"] for e in ledger.events())
    return ExitCode.OUT_OF_BUDGET if reason == "budget" and not judged else ExitCode.DONE


if __name__ == "__main__":
    sys.exit(cli.run(command))
