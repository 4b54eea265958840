"""`python -m agents.mcp` with short measurements; as its own argument "run", the run's process."""

import sys
from collections.abc import Sequence

from agents import base, mcp
from harness import cli


def work(words: Sequence[str]) -> int:
    base.enter(mcp.words(words))  # before PyTorch is imported
    from agents import mcp_run, measure
    from agents.proposers.mcp import Mcp  # noqa: F401 - imported before lives begin
    from harness.workload import Workload
    from tests.agents import killers

    measure.SHARES.update(decode=(0.001, 0.2), prefill=(0.001, 0.2))
    Workload.load(killers.TOY, "toy", "cpu", 0)  # each life would import what this does
    return mcp_run.main(words)


def main(words: Sequence[str]) -> int:
    if words[:1] == ["run"]:
        return work(words[1:])
    return mcp.main(words, (sys.executable, __file__, "run"))


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
