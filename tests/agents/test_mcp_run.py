"""A whole run over MCP: real client, server, run and sandbox, the toy model on the CPU."""

from pathlib import Path

import anyio
import pytest

from harness.ledger import Ledger
from harness.records import Status
from tests.agents.agent_run import SECRET, attempts, begun, committed, results, trajectory
from tests.agents.mcp_client import Agent, connected
from tests.agents.test_claude_run import CHEATS, DECIDED, HONEST, TELLS, text
from tests.layout import ROOT

SERVER = Path(__file__).with_name("mcp_run.py").relative_to(ROOT)
LIMITS = "--budget-minutes", "10"


@pytest.mark.long
def test_a_coding_agent_writes_submits_and_hears_the_decision(tmp_path: Path) -> None:
    """It cheats and is refused, leaves while the run verifies, comes back, and is judged fairly."""
    directory = begun(tmp_path / "run", "mcp")
    more = {"MY_SECRET": SECRET}
    said: dict[str, str] = {}

    async def leaves(agent: Agent) -> None:
        error, (task, source) = await agent.call("region", region="scaled_norm")
        assert not error and "## Ranked opportunities, by the trace" in task
        assert "class ScaledNorm(nn.Module):" in source
        _, (known,) = await agent.call("read_file", path="../secret.py")
        assert known.startswith("../secret.py is not to be read; what can be: reference, ")
        await agent.call("write_change", file="cheats.py", text=text("cheats", CHEATS))
        error, (said["cheat"],) = await agent.call("submit", file="cheats.py", hypothesis="none")
        assert not error
        await agent.call("write_change", file="honest.py", text=text("honest", HONEST))
        with anyio.move_on_after(0.3):
            await agent.call("verify", file="honest.py")

    async def returns(agent: Agent) -> None:
        error, (_, known) = await agent.call("attempts")
        assert not error and known.startswith("1 attempts so far\n3. cheats-")
        # It was judged after its author had left.
        error, (known,) = await agent.call("verify", file="honest.py")
        assert error and known.startswith("this was judged before, as it is: region verdict: pass")
        await agent.call("write_change", file="tells.py", text=text("tells", TELLS))
        _, (known,) = await agent.call("verify", file="tells.py")
        assert "RuntimeError: knows " in known and "SECRET" not in known.partition("\n")[0]
        _, (known,) = await agent.call("bench", file="honest.py")
        assert known.startswith("blocks.*.norm, 1x1x64, 64, one call: ") and "; gain " in known
        _, (said["profile"],) = await agent.call("profile", file="honest.py")
        _, (said["honest"],) = await agent.call("submit", file="honest.py", hypothesis="fewer")
        error, (said["over"],) = await agent.call("give_up", reason="nothing is left")
        assert not error
        assert any("s " in note for note in agent.heard)  # a call took five seconds, and told

    root = committed(tmp_path / "clone").root
    words = str(root / SERVER), "--resume", str(directory), *LIMITS
    connected(leaves, *words, log=tmp_path / "log", root=root, **more)
    # The run comes to its end without its client; what continues it waits for that.
    connected(returns, *words, log=tmp_path / "log", mode="auto", root=root, **more)

    cheat, honest = attempts(directory)
    assert cheat.status is Status.REJECTED
    assert cheat.reason.startswith("region verdict: remembers results: ")
    assert said["cheat"].startswith(f"rejected: {cheat.reason}\n")
    assert honest.reason.startswith(DECIDED) and honest.latency is not None
    assert said["honest"].startswith(f"{honest.status}: {honest.reason}\n")
    assert said["profile"] == (
        "no profile: this run is on a CPU; Nsight Compute profiles a card's kernels.\n"
        "it has no offline_cases(), so nothing is known of its kernels without a card; "
        "search optimized/ for one"
    )
    over = said["over"].splitlines()
    assert over[0].startswith("the run is over (done); ")
    assert over[1] == str(directory / "report.md")
    assert len(over) == 2 + (honest.status is Status.KEPT)  # its pull request
    events = trajectory(directory)
    left, gave_up = (e["reason"] for e in events if e["kind"] == "ended")
    assert left == "the coding agent has disconnected"
    assert gave_up == "the model gave up: nothing is left"
    kinds = [e.kind for e in Ledger.open(directory).events()]
    assert kinds.count("stopped") == 2 and kinds.index("stopped") < kinds.index("resumed", 20)
    called = [e["id"] for e in events if e["kind"] == "result"]
    assert len(called) == len(set(called)) == len(results(directory)) == 13
    log = (tmp_path / "log").read_text()
    assert "the run's own process: " in log and SECRET not in log
