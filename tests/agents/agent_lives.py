"""The program of `agent_run.goes_on`. As `python -m agents.run` does, it begins anew in a checkout
of the base commit, before PyTorch is imported."""

import sys

from agents import base, run
from harness import cli


def main() -> int:
    base.enter(run.words(None))
    from tests.agents import agent_run

    return agent_run.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(cli.run(main))
