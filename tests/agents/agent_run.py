"""`python -m agents.run` with short measurements, for runs with a scripted model.

`begun` is a run of the toy model as it stands when its first change is due. The program is
`agent_lives.py`.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agents import measure, run
from agents.claude.trajectory import FOLDER, NAME, Trajectory
from agents.proposers.replay import Replay  # noqa: F401 - imported before lives begin
from harness import cli
from harness.git import Git
from harness.ledger import Ledger
from harness.records import Attempt
from harness.workload import Workload
from tests.agents import killers
from tests.agents.fake_api import KEY, FakeApi
from tests.layout import ROOT, own_files

PROGRAM = Path(__file__).with_name("agent_lives.py")
SECRET = "a-secret-of-the-environment"


def clone(source: Path, to: Path) -> Git:
    subprocess.run(["git", "clone", "--quiet", "--local", source, to], check=True)
    return Git(to)


def committed(folder: Path) -> Git:
    """A clone whose last commit holds this very tree, from which runs work."""
    git = clone(ROOT, folder)
    for file in own_files():
        copy = git.root / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    git.run("add", "--all")
    git.run("commit", "--quiet", "--allow-empty", "-m", "as it is", fallback_identity=True)
    return git


def begun(directory: Path, proposer: str, model: str = killers.TOY) -> Path:
    ledger = killers.begun(directory, model)
    text = ledger.path.read_text()
    ledger.path.write_text(text.replace('"proposer": "killers"', f'"proposer": "{proposer}"', 1))
    return directory


def environment(api: FakeApi | None, root: Path = ROOT) -> dict[str, str]:
    own = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "MY_SECRET": SECRET}
    if api is not None:
        own |= {"ANTHROPIC_API_KEY": KEY, "ANTHROPIC_BASE_URL": api.url}
    kept = {n: v for n, v in os.environ.items() if not n.startswith("ANTHROPIC_")}
    return {**kept, **own}


def goes_on(
    directory: Path, api: FakeApi | None, *more: str, killed: str = "", root: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """The run in `directory`, in a process of its own, until it ends; `root` has the files that it
    runs. With `killed` nobody watches it, and it is killed once it has written such an event of its
    trajectory (`result:verify`: the result of that tool) or of its ledger (`ledger:attempt`)."""
    words = "--resume", str(directory), "--budget-minutes", "10", *more
    return started(words, api, root, KILLED=killed)


def started(
    words: Sequence[str], api: FakeApi | None, root: Path, **more: str
) -> subprocess.CompletedProcess[str]:
    """The program with `words`, and `more` in its environment."""
    line = [sys.executable, str(root / PROGRAM.relative_to(ROOT)), *words]
    own = {**environment(api, root), **more}
    return subprocess.run(line, env=own, cwd=root, capture_output=True, text=True)


def attempts(directory: Path) -> list[Attempt]:
    decided = Ledger.open(directory).all("attempt", Attempt)
    return [a for a in decided if a.control is None]


def trajectory(directory: Path) -> list[dict]:
    return list(Trajectory(directory / FOLDER / NAME).events())


def results(directory: Path) -> list[str]:
    """What the tools said, in order."""
    return [e["text"] for e in trajectory(directory) if e["kind"] == "result"]


def die_after(what: str) -> None:
    kind, _, name = what.partition(":")
    if kind == "ledger":
        write = Ledger.append

        def writing(self: Ledger, kind: str, record: Any) -> None:
            write(self, kind, record)
            if kind == name:
                os.kill(os.getpid(), signal.SIGKILL)

        Ledger.append = writing
        return
    append = Trajectory.append

    def appending(self: Trajectory, *args: Any, **data: Any) -> Any:
        event = append(self, *args, **data)
        if event["kind"] == kind and name in ("", event.get("name")):
            os.kill(os.getpid(), signal.SIGKILL)
        return event

    Trajectory.append = appending


def main(words: Sequence[str]) -> int:
    decode_s = float(os.environ.get("DECODE_S", "0.2"))
    measure.SHARES.update(decode=(0.02, decode_s), prefill=(0.02, 0.2))
    Workload.load(killers.TOY, "toy", "cpu", 0)  # each life would import what this does
    if killed := os.environ.get("KILLED"):
        die_after(killed)
        return cli.run(lambda: run.main(list(words)))
    return cli.run(lambda: run.supervised(list(words)))
