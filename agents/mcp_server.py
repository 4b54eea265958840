"""The MCP server of one run: the tools of `agents.claude.tools`, done by the run's own process.

The server has the client, the run's process (`agents.mcp_run`) has the torch, the model and the
sandbox. Calls wait in a queue and are done one at a time; pings are answered meanwhile, and who
asked for progress hears what the run says. When the client leaves, the run comes to its end by
itself, in a session of its own that outlives this process. Torch-free.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import anyio
import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from agents.claude.tools import TOOLS, complaint
from agents.claude.trajectory import Call
from agents.mcp_link import FD, line, lines
from harness.ledger import Ledger

BEAT_S = 5.0  # between two notes of progress; clients count minutes of silence as a failure
TICK_S = 0.2
MOST = 1 << 24  # bytes of a message between the run and this process
INSTRUCTIONS = """\
The tools work on one run, which measures first how fast the unchanged model is: the first call may
wait minutes for that, and its result begins with the machine, the task and the ranked
opportunities. Calls are done one after the other. What you submit is judged, timed and kept or
refused; give_up ends the run and says where its report and pull requests are.

"""


@dataclass
class Waiting:
    """A call of the client until its result is there."""

    call: Call
    done: anyio.Event = field(default_factory=anyio.Event)
    text: str = ""
    error: bool = False

    def answer(self, text: str, error: bool) -> None:
        self.text, self.error = text, error
        self.done.set()


class RunServer:
    """Serves one client of the run that `command` works on."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self.queue: dict[str, Waiting] = {}
        self.given: str | None = None  # the call that the run is at
        self.asked = False  # the run waits for a call
        self.opened = False  # it asked for one, ever
        self.directory: str | None = None
        self.task: str | None = None  # not told yet
        self.over: str | None = None  # what to say once the run has ended
        self.latest = ""  # line of the run's progress
        self.left = False
        self.log = tempfile.TemporaryFile()
        self.relayed = 0  # bytes of it
        self.process: asyncio.subprocess.Process | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def serve(self) -> NoReturn:
        """Until the client has left and the run has ended; ends this process with its code, for the
        SDK reads stdin in a thread that nothing can end."""
        reader = await self.start()
        server = Server(
            "kernelwright",
            version="0.1.0",
            instructions=INSTRUCTIONS + (Path(__file__).parent / "claude/system.md").read_text(),
            on_list_tools=self.list_tools,
            on_call_tool=self.call_tool,
        )
        async with anyio.create_task_group() as group:
            for work in (partial(self.hear, reader), self.relay, self.obey):
                group.start_soon(self.whole, work)
            async with stdio_server() as streams:
                options = server.create_initialization_options()
                group.start_soon(self.whole, self.watch)
                await server.run(*streams, options)
            await self.leave()
            assert self.process is not None
            self.end(await self.process.wait())
        raise AssertionError("end() ended this process")

    async def start(self) -> asyncio.StreamReader:
        """Start the run's process, with its words in a file that outlives this process."""
        ours, theirs = socket.socketpair()
        self.process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            pass_fds=[theirs.fileno()],
            env={**os.environ, FD: str(theirs.fileno())},
            start_new_session=True,
        )
        theirs.close()
        reader, self.writer = await asyncio.open_connection(sock=ours, limit=MOST)
        return reader

    async def whole(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do a part of this server's work. What breaks it ends the process: the others would wait
        for stdin for ever."""
        try:
            await work()
        except Exception:  # noqa: BLE001 - with its traceback
            traceback.print_exc()
            self.end(1)

    # The client

    async def list_tools(
        self, ctx: ServerRequestContext[Any], params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[types.Tool(**tool) for tool in TOOLS])

    async def call_tool(
        self, ctx: ServerRequestContext[Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        call = Call(f"mcp_{uuid.uuid4().hex}", params.name, dict(params.arguments or {}))
        if (wrong := complaint(call)) is not None:
            return result(wrong, error=True)
        if self.over is not None:
            return result(self.over, error=True)
        waiting = self.queue[call.id] = Waiting(call)
        started = time.monotonic()
        self.give()
        try:
            while not waiting.done.is_set():
                with anyio.move_on_after(BEAT_S):
                    await waiting.done.wait()
                if not waiting.done.is_set():
                    seconds = round(time.monotonic() - started, 1)
                    await ctx.session.report_progress(seconds, None, self.latest or None)
        finally:
            if self.given != call.id:  # cancelled before the run began it, or done
                self.queue.pop(call.id, None)
        texts = [waiting.text]
        if not waiting.error and self.task is not None:
            texts, self.task = [self.task, waiting.text], None
        return result(*texts, error=waiting.error)

    # The run

    def give(self) -> None:
        """Give the run the first call that waits, if it asked for one."""
        if not self.asked or not self.queue or self.writer is None:
            return
        call = next(iter(self.queue.values())).call
        self.asked, self.given = False, call.id
        self.tell(call={"id": call.id, "name": call.name, "input": call.input})

    def tell(self, **facts: Any) -> None:
        assert self.writer is not None
        self.writer.write(line(**facts))

    async def hear(self, reader: asyncio.StreamReader) -> None:
        while text := await reader.readline():
            for message in lines(text):
                self.take(message)

    def take(self, message: dict[str, Any]) -> None:
        """A message of the run. One that asks again has forgotten a call without a result."""
        if "hello" in message:
            self.directory = message["directory"]
            self.asked, self.given = False, None
            self.tell(welcome=message["hello"])
        elif "task" in message:
            self.task = message["task"]
        elif "ask" in message:
            self.asked = self.opened = True
            self.given = None
            self.give()
        elif (waiting := self.queue.pop(message.get("result", ""), None)) is not None:
            waiting.answer(message["text"], message["error"])

    async def relay(self) -> None:
        """What the run says, to stderr."""
        while True:
            self.relay_new()
            await anyio.sleep(TICK_S)

    def relay_new(self) -> None:
        while part := os.pread(self.log.fileno(), 1 << 16, self.relayed):
            self.relayed += len(part)
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                sys.stderr.buffer.write(part)
                sys.stderr.buffer.flush()
            said = part.decode(errors="replace").splitlines()
            self.latest = next((x.strip() for x in reversed(said) if x.strip()), self.latest)

    async def watch(self) -> None:
        """Until the run's process ends: every call that waits is told so, and give_up how."""
        assert self.process is not None
        code = await self.process.wait()
        await anyio.sleep(2 * TICK_S)  # its last words
        if not self.opened:
            self.end(code)
        reason = None if self.directory is None else stopped(Path(self.directory))
        self.over = self.words(code, reason)
        for waiting in self.queue.values():
            waiting.answer(self.over, waiting.call.name != "give_up" or reason is None)

    def words(self, code: int, reason: str | None) -> str:
        """How the run ended, and what it left."""
        if self.directory is None or reason is None:
            return f"the run ended with exit code {code}: {self.latest}"
        folder = Path(self.directory)
        found = [folder / "report.md", *sorted(folder.glob("prs/*/PR.md"))]
        left = "\n".join(str(path) for path in found if path.is_file())
        return f"the run is over ({reason}); --resume {folder} continues it. It left\n{left}"

    # The end

    async def obey(self) -> None:
        """Signals: Ctrl-C interrupts the run, SIGTERM leaves it to its end. Of a client that has
        left already, SIGTERM ends this process only."""
        assert self.process is not None
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                if self.left:
                    os._exit(128 + number)
                await self.leave(interrupt=number == signal.SIGINT)
                self.end(await self.process.wait())

    async def leave(self, interrupt: bool = False) -> None:
        """The client has gone. A run that is not ready yet is interrupted; any other notices that
        the line is closed, and ends as it does without proposals."""
        self.left = True
        assert self.process is not None and self.writer is not None
        if self.process.returncode is None and (interrupt or not self.opened):
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)
        self.writer.close()

    def end(self, code: int) -> NoReturn:
        self.relay_new()
        os._exit(code if code >= 0 else 128 - code)


def stopped(directory: Path) -> str | None:
    """Why the run in `directory` came to its end; None if it broke off."""
    if not (directory / Ledger.NAME).exists():
        return None
    events = list(Ledger(directory).events())
    return events[-1].data["reason"] if events and events[-1].kind == "stopped" else None


def result(*texts: str, error: bool = False) -> types.CallToolResult:
    content: list[Any] = [types.TextContent(type="text", text=text) for text in texts]
    return types.CallToolResult(content=content, is_error=error)


def serve(command: Sequence[str]) -> NoReturn:
    anyio.run(RunServer(command).serve)
    raise AssertionError("serve() ends this process")
