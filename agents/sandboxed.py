"""The gate of a run: what has to pass its region's verdict in a worker before it runs in the run's
own process. That is each change file given to it, and with `--require-sandbox` any change.

Tuning, timing and the layers' verdict of what passed are done in the run's process, which another
one watches (`agents.supervised`).
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from agents.evaluate import ask, many
from harness import confined
from harness.bench_jobs import Job
from harness.cli import CACHES
from harness.confine import ROOT
from harness.errors import UserError
from harness.executors.base import Executor
from harness.git import Git
from harness.ledger import Ledger
from harness.observe import CandidateError
from harness.protections import describe
from harness.records import Verdict
from harness.region_bench import RegionBench
from harness.sandbox import Sandbox
from harness.sandboxed import broken
from harness.workload import Workload
from optimized.change import Change

OWN_PROCESS, LOST = "own_process", "worker_lost"  # the ledger's events
# Where compilers of libraries keep what they made, if they have; the rest of HOME is closed.
CUDA = "CUDA_HOME", "CUDA_PATH"
# Its settings in HOME; what it keeps of credentials lies beside them.
GIT = ".gitconfig", ".config/git/config", ".config/git/ignore", ".config/git/attributes"
LIBRARY_CACHES = ".nv/ComputeCache", ".cache/flashinfer", ".cache/torch_extensions"


def give_up_rights(ledger: Ledger, say: Callable[[str], None], model: str) -> None:
    """From here on the run's own process writes in its directory, its caches and the folder for
    temporary files only, reads little else, and reaches neither the network nor other processes;
    who needs one has a process of its own by now. `model` is the model's name, or its file."""
    os.environ.setdefault("MPLCONFIGDIR", str((ledger.directory / "cache/matplotlib").resolve()))
    caches = [Path(os.environ[name]) for name in (*CACHES, "MPLCONFIGDIR") if name in os.environ]
    for path in caches:
        path.mkdir(parents=True, exist_ok=True)
    library = [Path.home() / name for name in LIBRARY_CACHES]
    folders = [ledger.directory, Path(tempfile.gettempdir()), *caches, *library]
    rows = confined.give_up(folders, needed(model))
    ledger.append(OWN_PROCESS, {"protections": [row.to_json() for row in rows]})
    say(f"the run's own process: {confined.describe(rows)}")


def needed(model: str) -> list[Path]:
    """What a run reads besides Python, the system and its own folders: the project, the model's
    file, the objects of the repository, git's settings, the programs on PATH, CUDA."""
    found = [ROOT, *objects(ROOT), *(Path.home() / name for name in GIT)]
    found += [Path(model)] if model.endswith(".py") else []
    found += map(Path, filter(None, os.environ.get("PATH", "").split(os.pathsep)))
    found += [Path(os.environ[name]) for name in CUDA if name in os.environ]
    home = Path.home().resolve()
    return [path for path in found if not home.is_relative_to(path.resolve())]


def objects(root: Path) -> list[Path]:
    """Where git finds the objects of the checkout at `root`: its own, and those that it borrows."""
    try:
        git = Git.open(root)
    except UserError:
        return []
    found = [root / git.run("rev-parse", "--git-path", "objects")]
    for place in found:  # it grows
        listed = place / "info" / "alternates"
        lines = listed.read_text().splitlines() if listed.exists() else []
        found += [place / line for line in lines if line and not line.startswith("#")]
    return found


class Gate:
    """Verdicts on changes by name or file, each in a worker of its own.

    With `required`, UserError at the start where this machine lacks a protection.
    """

    def __init__(
        self,
        reference: nn.Module,
        workload: Workload,
        ledger: Ledger,
        say: Callable[[str], None],
        *,
        required: bool = True,
        calls: Callable[[str], list[Job]] | None = None,
        root: Path | None = None,
        executor: Executor | None = None,
    ) -> None:
        """`calls` are those of a region in the timed steps, on which it must not be remembered.
        Workers run the project's files at `root`, by default those of this process. Verdicts are
        those of `executor` where there is one, and `look` asks the sandbox here."""
        self.sandbox = Sandbox(
            reference, workload.device, model=workload.name, required=required, root=root or ROOT
        )
        self.bench = RegionBench(workload, self.sandbox, calls)
        self.ledger, self.say, self.required, self.executor = ledger, say, required, executor
        with contextlib.ExitStack() as undo:
            undo.callback(self.sandbox.close)
            self.sandbox.open(None).close()
            undo.pop_all()
        rows = self.sandbox.protections
        ledger.append("sandbox", {"protections": [row.to_json() for row in rows]})
        say(describe(rows))

    def close(self) -> None:
        self.sandbox.close()

    def look(self, change: str) -> tuple[Change, str] | None:
        """What a change file says of itself, without its code, and its backend for this device;
        None if it broke, which `verdict` tells about."""
        try:
            candidate = self.sandbox.open(change)
        except (CandidateError, UserError):
            return None
        candidate.close()
        assert candidate.change is not None and candidate.backend is not None
        return candidate.change, candidate.backend

    def verdict(self, change: str, backend: str | None, seed: int) -> Verdict:
        """The region's verdict with default launch knobs; whatever the candidate does is in it.
        Without a `backend`, the first for this device."""
        if self.executor is None:
            return self.bench.judge(change, backend, seed).verdict
        ((verdict, _),) = self.verdicts([(change, backend, seed)])
        return verdict

    def verdicts(
        self,
        changes: Sequence[tuple[str, str | None, int]],
        tell: Callable[[str], None] = lambda text: None,
    ) -> list[tuple[Verdict, float]]:
        """On workers, which there must be: of each change with its backend and seed, as `verdict`
        says, and the seconds that it took; `tell` hears when one is done."""
        assert self.executor is not None
        workload = self.bench.workload
        asked = [
            ask(workload, change, backend, case_seed=seed, timed=False, required=self.required)
            for change, backend, seed in changes
        ]
        done = []
        for found in many(self.executor, asked, tell):
            if found.losses:
                self.ledger.append(LOST, {"change": found.change, "losses": list(found.losses)})
                self.say(f"a worker was lost, another did its work: {'; '.join(found.losses)}")
            verdict = found.verdict or broken(found.failure or "no verdict", workload.seed)
            done.append((verdict, found.seconds))
        return done
