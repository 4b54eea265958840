"""A coding agent's side: the SDK's own client, with a server in a process of its own."""

import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

ROOT = Path(__file__).parents[2]


class Agent:
    """A connected client. `heard` are the notes of progress."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.heard: list[str] = []

    async def call(self, name: str, **given: Any) -> tuple[bool, list[str]]:
        """Whether the tool's result is an error, and its texts."""
        result = await self.client.call_tool(name, given, progress_callback=self.hear)
        return result.is_error, [block.text for block in result.content]

    async def hear(self, _progress: float, _total: float | None, message: str | None) -> None:
        self.heard.append(message or "")


def connected(
    work: Callable[[Agent], Awaitable[None]],
    program: str,
    *words: str,
    log: Path,
    mode: str = "legacy",
    root: Path = ROOT,
    **more: str,
) -> None:
    """Let `work` use a server, `python PROGRAM WORDS`, whose stderr goes to `log`; `root` has the
    files that it runs. `mode` is the SDK's: "legacy" the handshake up to 2025-11-25, "auto" what
    came after it."""
    environment = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", **more}
    environment["PATH"] = os.environ["PATH"]
    server = StdioServerParameters(
        command=sys.executable, args=[program, *words], env=environment, cwd=root
    )

    async def connect() -> None:
        with log.open("w") as errors:
            async with Client(stdio_client(server, errors), mode=mode) as client:
                await work(Agent(client))

    anyio.run(connect)
