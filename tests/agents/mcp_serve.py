"""`python -m agents.mcp` with another program as the run's: `python mcp_serve.py RUN WORDS...`."""

import sys

from agents import mcp
from harness import cli

if __name__ == "__main__":
    words = sys.argv[2:]
    sys.exit(cli.run(lambda: mcp.main(words, (sys.executable, sys.argv[1]))))
