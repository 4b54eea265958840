"""The process of a run whose changes come over MCP, started by `agents.mcp_server`: as
`agents.run`, it goes on in a new process when a candidate ends it. Torch-free."""

import sys
from collections.abc import Sequence
from functools import partial

from agents import base, mcp, run
from agents.supervised import Supervisor
from harness import cli


def main(argv: Sequence[str] | None = None) -> int:
    a = mcp.words(argv)
    base.enter(a)
    return Supervisor(partial(run.live, a), a.resume, a.stall_minutes).run()


if __name__ == "__main__":
    sys.exit(cli.run(main))
