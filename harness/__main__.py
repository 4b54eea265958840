"""The judge and the benches by hand: `python -m harness verify|bench|ceilings|...`.

Nothing heavy is imported before the words have been understood.
"""

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from harness import cli
from harness.arguments import count, counts, positive, seed, whole
from harness.policy import add_options

# Where each command's `run(arguments) -> exit code` lives.
MODULES = {
    "verify": "harness.command_verify",
    "bisect": "harness.command_bisect",
    "bench": "harness.command_bench",
    "ceilings": "harness.command_bench",
    "aa": "harness.command_bench",
    "rounding-points": "harness.command_verify",
    "mutants": "harness.command_mutants",
    "cheats": "harness.command_cheats",
    "sandbox": "harness.command_cheats",
    "certify": "harness.command_certify",
}


def parser() -> argparse.ArgumentParser:
    p = cli.Parser(prog="python -m harness", description="The judge and the benches by hand.")
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str,
        help_: str,
        *,
        model: bool = True,
        seeded: tuple[int | None, str] = (0, "seed of weights and inputs"),
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help_, description=help_)
        if model:
            command.add_argument("--model", default="beam", help="a known model, or a model file")
            command.add_argument("--preset", default="auto", help="a size of the model")
            command.add_argument("--seed", type=seed, default=seeded[0], help=seeded[1])
        command.add_argument("--device", default="auto", help="auto, cpu or cuda")
        command.add_argument("--json", action="store_true", help="print JSON instead of tables")
        return command

    verify = add(
        "verify",
        "the verdict on one change: does it round as its contract says?",
        seeded=(None, "the verdict's, to have one again; by default drawn, and printed"),
    )
    verify.add_argument(
        "change", metavar="CHANGE|FILE", help="a change's name, inductor:REGION, or a change file"
    )
    verify.add_argument(
        "--weights-seed", type=seed, default=0, help="seed of weights and timed inputs"
    )
    verify.add_argument("--backend", help="which implementation; default the device's first")
    verify.add_argument("--time", action="store_true", help="time the model with and without it")
    verify.add_argument(
        "--model-level",
        choices=("quick", "full"),
        default="quick",
        help="full: 32 teacher-forced decodes, and the drift with forced routes",
    )
    verify.add_argument(
        "--sandbox", action="store_true", help="run it in a sandbox, as files from outside are"
    )
    verify.add_argument(
        "--require-sandbox", action="store_true", help="refuse if a protection is not to be had"
    )
    add_options(verify)
    bisection = add("bisect", "which kept change breaks a run's model, and where", model=False)
    bisection.add_argument("run", metavar="RUN", help="a run's directory")
    bench = add("bench", "the model eager, in a CUDA graph, compiled, and with a plan's changes")
    bench.add_argument(
        "--target",
        nargs="+",
        metavar="T",
        help="what is timed beside the prefill, default decode-bs1; with --plan, or several: these "
        "alone",
    )
    bench.add_argument("--minutes", type=positive, help="for all baselines, default 10")
    add_bench(bench)
    add("ceilings", "what this device can do at most, measured", model=False)
    add("rounding-points", "every tensor that the model rounds, with operator and source line")
    certify = add("certify", "judge again what a certificate certifies, and compare", model=False)
    certify.add_argument("file", metavar="FILE", help="a certificate.json of a run")
    certify.add_argument("--time", action="store_true", help="time it again, too")
    certify.add_argument("--seconds", type=positive, default=4.0, help="for each comparison")
    cheats = add("cheats", "change files that try to fool the judge: is each refused?", model=False)
    cheats.add_argument("--only", nargs="+", metavar="NAME", help="some of them, by name")
    cheats.add_argument("--seed", type=seed, default=0, help="seed of weights and cases")
    add_survey(cheats)
    sandbox = add("sandbox", "what protects from a candidate on this machine", model=False)
    sandbox.add_argument(
        "--require-sandbox", action="store_true", help="refuse if a protection is not to be had"
    )
    add_mutants(add("mutants", "is every wrong variant of each region refused, and nothing right?"))
    aa = add("aa", "time a step against itself: how small an effect can be told from none?")
    aa.add_argument("--target", default="decode-bs1", help="the step")
    aa.add_argument("--comparisons", type=count, default=20, help="of the step with itself")
    aa.add_argument("--seconds", type=positive, default=2.0, help="for each comparison")
    return p


def add_bench(command: argparse.ArgumentParser) -> None:
    """Other things to bench than the baselines."""
    what = command.add_mutually_exclusive_group()
    what.add_argument("--peers", action="store_true", help="our kernels beside public ones")
    what.add_argument(
        "--evaluations", action="store_true", help="candidates judged a minute, by workers"
    )
    what.add_argument(
        "--curve", choices=("context", "batch"), help="step time against context, or against batch"
    )
    command.add_argument(
        "--workers",
        type=count,
        nargs="+",
        metavar="N",
        help="how many, one number after the other, for --evaluations; default 1 2",
    )
    command.add_argument(
        "--candidates", type=count, metavar="N", help="the first so many, for --evaluations"
    )
    command.add_argument("--rows", type=counts, metavar="N,N", help="tokens of a step, for --peers")
    command.add_argument(
        "--against", nargs="+", default=[], metavar="NAME", help="peers, by how their names begin"
    )
    command.add_argument("--cold-l2", action="store_true", help="single calls after a flush")
    command.add_argument(
        "--plan",
        metavar="FILE|RUN|auto",
        help="changes that are applied, and knobs; auto: what optimized/plans/ has for this device",
    )
    command.add_argument(
        "--beyond-domain", action="store_true", help="the plan's changes also where not tested"
    )
    command.add_argument("--out", type=Path, metavar="DIR", help="write the figures there, as JSON")
    command.add_argument(
        "--seconds",
        type=positive,
        help="for each comparison of --peers, each timing of --plan or of several targets; default "
        "0.4",
    )
    command.add_argument(
        "--budget-minutes", type=positive, help="for --peers and --curve, default 10"
    )


def add_mutants(command: argparse.ArgumentParser) -> None:
    command.add_argument("--region", nargs="+", metavar="R", help="which; default all")
    command.add_argument("--budget-minutes", type=positive, help="stop after so long")
    which = command.add_mutually_exclusive_group()
    which.add_argument("--limit", type=count, help="the first so many mutants of each region")
    which.add_argument("--sample", type=count, help="so many of each region, drawn by the seed")
    command.add_argument(
        "--honest", type=whole, help="verdicts on right changes; default one for each of them"
    )
    add_survey(command)


def add_survey(command: argparse.ArgumentParser) -> None:
    command.add_argument("--jobs", type=count, default=1, metavar="N", help="worker processes")
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="write the tables and the records there, too"
    )


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    arguments.words = sys.argv[1:] if argv is None else argv
    module = importlib.import_module(MODULES[arguments.command])
    run: Callable[[argparse.Namespace], int] = module.COMMANDS[arguments.command]
    return run(arguments)


if __name__ == "__main__":
    sys.exit(cli.run(main))
