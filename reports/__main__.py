"""`python -m reports html|md RUN`: a run's report again, from its ledger alone."""

import argparse
import sys
from pathlib import Path

from harness import cli
from harness.errors import ExitCode
from reports import markdown, page
from reports.files import write_text
from reports.run import Run

WRITERS = {"html": (page.NAME, page.page), "md": (markdown.NAME, markdown.markdown)}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m reports", description="Write the report of a run from its ledger."
    )
    commands = p.add_subparsers(dest="command", required=True)
    for command, (name, _) in WRITERS.items():
        sub = commands.add_parser(command, help=f"write {name}")
        sub.add_argument("run", type=Path, metavar="RUN", help="a run directory of agents.run")
        sub.add_argument(
            "-o",
            "--output",
            type=Path,
            metavar="FILE",
            help=f"default: {name} in the run directory",
        )
    return p


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    name, write = WRITERS[arguments.command]
    run = Run.load(arguments.run)
    print(write_text(arguments.output or arguments.run / name, write(run)))
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(cli.run(main))
