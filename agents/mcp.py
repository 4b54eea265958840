"""A run for any coding agent: `python -m agents.mcp --target decode-bs1` is an MCP server on stdio.

The agent writes the changes, the run judges, times and keeps them. stdout carries the protocol
alone; what the run says goes to stderr. Torch-free.
"""

import argparse
import sys
from collections.abc import Sequence

from harness import cli

try:
    from agents import run
    from agents.claude import secrets
    from agents.mcp_link import MCP
    from harness.arguments import positive
    from harness.errors import UserError
except ModuleNotFoundError as missing:
    cli.end_without(missing, __name__)

MINUTES = 120.0  # an agent thinks, too
RUN = sys.executable, "-m", "agents.mcp_run"


def parser() -> argparse.ArgumentParser:
    p = cli.Parser(
        prog="python -m agents.mcp",
        description="Serve one run's tools to a coding agent over MCP (stdio): read, write a "
        "change, verify, bench, profile, submit.",
    )
    run.add_run(p)
    p.add_argument(
        "--budget-minutes",
        type=positive,
        help=f"end when so much time is used up; default {MINUTES:g}",
    )
    return p


def words(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line as `agents.run` takes it, checked as far as it can be without PyTorch."""
    a = run.parser().parse_args([])
    parser().parse_args(argv, a)
    a.proposer, a.budget_minutes = MCP, a.budget_minutes or MINUTES
    run.check(a)
    if a.resume is not None:
        run.recall(a, run.readable(a.resume), run.given(parser(), argv))
        if a.proposer != MCP:
            raise UserError(
                f"{a.resume} is a run of --proposer {a.proposer}; continue it with "
                f"python -m agents.run --resume {a.resume}, or start a new one"
            )
    elif a.target is None:
        raise UserError("--target is missing; name what to make faster, such as decode-bs1")
    return a


def main(argv: Sequence[str] | None = None, program: Sequence[str] = RUN) -> int:
    """Serve until the client leaves; `program` is the run's, and gets the same arguments."""
    argv = sys.argv[1:] if argv is None else argv
    words(argv)
    try:
        from agents.mcp_server import serve
    except ModuleNotFoundError as error:
        raise UserError(
            f"no package {error.name}, which the MCP server needs; install the extra mcp: "
            "pip install -c constraints.txt -e '.[mcp]'"
        ) from error
    secrets.take()  # the run and what is tried in it see none, here neither
    secrets.hand_over()
    serve([*program, *argv])


if __name__ == "__main__":
    sys.exit(cli.run(main))
