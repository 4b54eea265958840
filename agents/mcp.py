"""A run for any coding agent: `python -m agents.mcp --target decode-bs1` is an MCP server on stdio.

The agent writes the changes, the run judges, times and keeps them. stdout carries the protocol
alone; what the run says goes to stderr. Torch-free.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from agents import run
from agents.claude import secrets
from agents.mcp_link import MCP
from harness import cli
from harness.arguments import count, positive, seed
from harness.errors import UserError

MINUTES = 120.0  # an agent thinks, too
RUN = sys.executable, "-m", "agents.mcp_run"


def parser() -> argparse.ArgumentParser:
    p = cli.Parser(
        prog="python -m agents.mcp",
        description="Serve one run's tools to a coding agent over MCP (stdio): read, write a "
        "change, verify, bench, profile, submit.",
    )
    p.add_argument("--target", help="what to make faster: decode-bs1, prefill-8x2048, ...")
    p.add_argument(
        "--model", default="beam", help="a known model, or the path of a model file (.py)"
    )
    p.add_argument("--preset", default="auto", help="a size of the model; auto picks by the device")
    p.add_argument("--device", default="auto", help="auto, cpu or cuda")
    p.add_argument("--seed", type=seed, default=0, help="seed of weights and step inputs")
    p.add_argument("--plan", metavar="FILE|RUN|auto|none", help="changes to begin with")
    p.add_argument("--max-changes", type=count, help="end after so many submissions")
    p.add_argument(
        "--budget-minutes",
        type=positive,
        help=f"end when so much time is used up; default {MINUTES:g}",
    )
    p.add_argument("--run-dir", type=Path, help="where to write; default runs/<date>-<target>")
    p.add_argument("--resume", type=Path, metavar="DIR", help="go on with a run that stopped")
    p.add_argument("--other-card", action="store_true", help="with --resume: on another GPU")
    p.add_argument(
        "--require-sandbox", action="store_true", help="refuse if a protection is missing"
    )
    return p


def words(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line as `agents.run` takes it, checked as far as it can be without PyTorch."""
    a = run.parser().parse_args([])
    parser().parse_args(argv, a)
    a.proposer, a.budget_minutes = MCP, a.budget_minutes or MINUTES
    run.check(a)
    if a.resume is not None:
        run.recall(a, run.readable(a.resume))
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
