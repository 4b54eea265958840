"""The MCP server with a real client, and a run's process that plays: who is told what, and when."""

import json
import subprocess
import sys
import time
from pathlib import Path

import anyio
import pytest

from agents.claude.tools import TOOLS, complaint
from agents.claude.trajectory import Call
from agents.mcp import words
from harness.errors import UserError
from tests.agents import killers
from tests.agents.mcp_client import ROOT, Agent, connected
from tests.agents.mcp_played import TASK

HERE = Path(__file__).parent
SERVE, PLAYED = str(HERE / "mcp_serve.py"), str(HERE / "mcp_played.py")
TARGET = "--target", "decode-bs1"


@pytest.mark.filterwarnings("ignore:ping is removed")  # from the newest protocol
def test_a_client_sees_the_tools_and_what_they_say(tmp_path: Path) -> None:
    """Through one that is slow, one whose run dies, a wrong call and the run's end."""

    async def work(agent: Agent) -> None:
        listed = (await agent.client.list_tools()).tools
        assert [t.model_dump(exclude_none=True) for t in listed] == TOOLS
        assert "# The contract" in (agent.client.instructions or "")

        wrong = Call("", "read_file", {"path": 1, "last": 2, "more": 3})
        assert await agent.call("read_file", **wrong.input) == (True, [complaint(wrong)])
        unknown = complaint(Call("", "shell", {}))
        assert unknown is not None and unknown.startswith("there is no tool 'shell'; there are ")
        assert await agent.call("shell") == (True, [unknown])

        # The task comes with the first result that is none of an error, and once.
        assert await agent.call("region", region="x") == (True, ['region {"region": "x"}, life 1'])
        found = await agent.call("read_file", path="README.md")
        assert found == (False, [TASK, 'read_file {"path": "README.md"}, life 1'])

        async def verify() -> None:
            found = await agent.call("verify", file="a.py")
            assert found == (False, ['verify {"file": "a.py"}, life 1'])

        started = time.monotonic()
        async with anyio.create_task_group() as group:
            group.start_soon(verify)
            await anyio.sleep(0.3)
            await agent.client.send_ping()
            assert time.monotonic() - started < 1.2  # of the 1.5 s that verify takes
        assert time.monotonic() - started >= 1.5

        # The run's process died in the middle of its answer; the next one gets the call again.
        found = await agent.call("bench", file="a.py")
        assert found == (False, ['bench {"file": "a.py"}, life 2'])

        # And here between two calls: the one that came while nobody asked is done once.
        await agent.call("search", text="x")
        await anyio.sleep(0.2)
        assert await agent.call("layer_map") == (False, ["layer_map {}, life 3"])

        error, (said,) = await agent.call("give_up", reason="enough")
        assert not error and said.startswith("the run is over (done); --resume ")
        assert said.splitlines()[1:] == [str(tmp_path / "run/report.md")]
        assert await agent.call("ceilings") == (True, [said])

    log = tmp_path / "log"
    connected(work, SERVE, PLAYED, *TARGET, log=log, PLAYED=str(tmp_path))
    assert log.read_text() == "said on stdout\n"
    answered = (tmp_path / "answered").read_text().split()
    assert len(answered) == len(set(answered)) == 6


def test_a_run_that_breaks_is_told_and_one_whose_client_leaves_hears_it(tmp_path: Path) -> None:
    async def breaks(agent: Agent) -> None:
        error, (said,) = await agent.call("attempts")
        assert error and said == "the run ended with exit code 1: error: the run broke"

    async def leaves(agent: Agent) -> None:
        await agent.call("layer_map")
        with anyio.move_on_after(0.3):
            await agent.call("verify", file="a.py")

    log = tmp_path / "log"
    connected(breaks, SERVE, PLAYED, *TARGET, log=log, mode="auto", PLAYED=str(tmp_path))
    assert not (tmp_path / "left").exists()
    connected(leaves, SERVE, PLAYED, *TARGET, log=log, PLAYED=str(tmp_path))
    assert appears(tmp_path / "left")


def test_a_run_that_only_measures_is_interrupted_when_its_client_leaves(tmp_path: Path) -> None:
    async def looks(agent: Agent) -> None:
        assert len((await agent.client.list_tools()).tools) == len(TOOLS)
        while not (tmp_path / "begun").exists():
            await anyio.sleep(0.05)

    words = *TARGET, "--seed", "1"
    connected(looks, SERVE, PLAYED, *words, log=tmp_path / "log", PLAYED=str(tmp_path))
    assert appears(tmp_path / "interrupted")


def appears(file: Path) -> bool:
    deadline = time.monotonic() + 10
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return file.exists()


def server(*given: str, more: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """With a client that says nothing."""
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", **(more or {})}
    line = [sys.executable, *given]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        line, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=ROOT
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    code = process.wait(60)
    out, err = process.stdout.read(), process.stderr.read()
    for end in (process.stdin, process.stdout, process.stderr):
        end.close()
    return subprocess.CompletedProcess(line, code, out, err)


def test_without_the_sdk_one_line_says_which_extra(tmp_path: Path) -> None:
    (tmp_path / "mcp_types.py").write_text("raise ModuleNotFoundError('no', name='mcp_types')\n")
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = server("-m", "agents.mcp", *TARGET, more=path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: no package mcp_types, which the MCP server needs; install the extra mcp: "
        "pip install -c constraints.txt -e '.[mcp]'\n"
    )


def test_a_run_that_does_not_begin_ends_the_server_with_its_line(tmp_path: Path) -> None:
    done = server(SERVE, PLAYED, *TARGET, "--max-changes", "1", more={"PLAYED": str(tmp_path)})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: it will not begin\n"


def test_words_that_cannot_work_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--target is missing; name what to make faster"):
        words([])
    with pytest.raises(UserError, match="--budget-minutes: '-1' is not a finite number above 0"):
        words([*TARGET, "--budget-minutes", "-1"])
    with pytest.raises(UserError, match="unrecognized arguments: --proposer claude; see python"):
        words([*TARGET, "--proposer", "claude"])
    killers.begun(tmp_path / "run")
    with pytest.raises(UserError, match="is a run of --proposer killers; continue it with python"):
        words(["--resume", str(tmp_path / "run")])
    a = words([*TARGET])
    assert (a.proposer, a.budget_minutes, a.model) == ("mcp", 120.0, "beam")


def test_the_configuration_in_the_readme_starts_the_server() -> None:
    text = (ROOT / "README.md").read_text().partition("<!-- example: mcp -->\n```json\n")[2]
    (server,) = json.loads(text.partition("```")[0])["mcpServers"].values()
    assert server["args"][:2] == ["-m", "agents.mcp"]
    assert words(server["args"][2:]).target == "decode-bs1"
