"""Memory errors and races of a candidate's kernels, by NVIDIA's compute-sanitizer where installed.

The smallest recorded calls of the region are run once more in a process of their own, under
memcheck and then under racecheck, with the module that holds the region's node and no other
weights. What the tools find is a refusal, unless the reference shows the same there. Where a tool
is absent or cannot run, the verdict's notes say so. Several changes share a process for each tool,
which takes long to begin; only if it finds something has each one of its own.
"""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from harness.cases import Case, record
from harness.confine import ROOT
from harness.process import FOLDERS, scrubbed
from harness.records import Verdict
from harness.spent import spent
from harness.steps import steps
from harness.trees import leaves
from harness.workload import Workload, free_bytes
from optimized.change import KnobValue, nodes

PROGRAM = "compute-sanitizer"  # also how each of its notes begins
TOOLS = "memcheck", "racecheck"
QUIET = {"memcheck": ("--report-api-errors", "no")}
LIMIT_S = 120.0  # of one tool
CALLS_FILE, OPTIONS_FILE = "calls.pt", "options.pt"
CALLS = 2  # the smallest of a prefill and a decode of the judge's steps
SHARE = 4  # what is handed over may take a quarter of the free memory
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: .*\((\d+) error)")
MARK = re.compile(r"^=+ ?")
HEADINGS = "COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY"

Knobs = Mapping[str, Mapping[str, KnobValue]]


@dataclass(frozen=True)
class Checked:
    """`reason` is what the tools found, if anything."""

    reason: str | None = None
    notes: tuple[str, ...] = ()

    def noting(self, note: str) -> "Checked":
        return replace(self, notes=(*self.notes, note))

    def named(self, change: str) -> "Checked":
        """The same, where it is told beside others."""
        reason = None if self.reason is None else f"{change}: {self.reason}"
        return Checked(reason, tuple(f"{change}: {note}" for note in self.notes))

    def joined(self, verdict: Verdict) -> Verdict:
        """The verdict with this; refused by it if it had passed."""
        notes = verdict.notes + self.notes
        if self.reason is None or not verdict.passed:
            return replace(verdict, notes=notes)
        return replace(verdict, passed=False, reason=self.reason, notes=notes)


@dataclass(frozen=True)
class Ran:
    """One tool's run: how many errors, None if it came to no summary, and its first lines."""

    errors: int | None
    said: str


def applies(device: torch.device) -> bool:
    return device.type == "cuda"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A change to check, by name or file, on calls of its region drawn from `seed`."""

    change: str
    region: str
    backend: str
    seed: int
    knobs: Knobs | None = None


def check(workload: Workload, asked: Asked, *, limit_s: float = LIMIT_S) -> Checked:
    """One change; see `check_all`."""
    return check_all(workload, [asked], limit_s=limit_s)[0]


@spent("compute-sanitizer")
def check_all(
    workload: Workload, asked: Sequence[Asked], *, limit_s: float = LIMIT_S
) -> list[Checked]:
    """What comes of each; nothing on a CPU. A tool is given `limit_s`.

    The candidates' code runs in a process of its own with a scrubbed environment, but in no
    sandbox: only for code that may run in this process, too.
    """
    if not applies(workload.device):
        return [Checked()] * len(asked)
    program = shutil.which(PROGRAM)
    if program is None:
        absent = f"{PROGRAM} is not installed: no check for memory errors and races"
        return [Checked(notes=(absent,))] * len(asked)
    found = [Checked()] * len(asked)
    with tempfile.TemporaryDirectory(prefix="memcheck-") as top:
        left: dict[int, Path] = {}
        for i, one in enumerate(asked):
            folder = Path(top) / f"{i:02d}"
            folder.mkdir()
            told = hand_over(workload, one, folder)
            if told is None:
                left[i] = folder
            else:
                found[i] = found[i].noting(f"{PROGRAM}: not run, {told}")
        for tool in TOOLS:
            together = run_tool(program, tool, list(left.values()), limit_s) if left else None
            for i, folder in list(left.items()):
                ran = together
                if together is not None and together.errors and len(left) > 1:
                    ran = run_tool(program, tool, [folder], limit_s)
                assert ran is not None
                if ran.errors is None:
                    found[i] = found[i].noting(f"{PROGRAM} {tool}: not done: {ran.said}")
                elif not ran.errors:
                    calls = f"{CALLS} calls of {asked[i].region}"
                    found[i] = found[i].noting(f"{PROGRAM} {tool}: no error in {calls}")
                elif run_tool(program, tool, [folder], limit_s, plain=True).errors:
                    both = "errors, but the reference has them, too"
                    found[i] = found[i].noting(f"{PROGRAM} {tool}: {both}")
                else:
                    reason = f"{PROGRAM} {tool}: {ran.errors} error(s): {ran.said}"
                    found[i] = replace(found[i], reason=reason)
            left = {i: folder for i, folder in left.items() if found[i].reason is None}
    return found


def hand_over(workload: Workload, asked: Asked, folder: Path) -> str | None:
    """Write the module around the region's first node, its smallest calls and what is asked into
    `folder`; or why not."""
    reference = workload.model
    name = nodes(reference, asked.region)[0]
    limit = free_bytes(torch.device("cpu")) // SHARE
    small = itertools.islice(steps(workload, asked.seed, sizes=False), 2)
    calls, _ = record(reference, [name], small, limit)
    if not calls:
        return f"no step calls {name}"
    parent, _, attribute = name.rpartition(".")
    holder = reference.get_submodule(parent)
    if not parent or isinstance(holder, nn.ModuleList):  # which is the whole model
        holder = _holding(holder, attribute)
    size = sum(t.nbytes for t in (*holder.parameters(), *holder.buffers()))
    if size > limit:
        return f"the module around {name} takes {size >> 30} GiB"
    chosen = sorted(calls, key=_bytes)[:CALLS]
    torch.save((holder, attribute, [(c.args, c.kwargs) for c in chosen]), folder / CALLS_FILE)
    options = {
        "change": _absolute(asked.change),
        "backend": asked.backend,
        "region": asked.region,
        "knobs": {shape: dict(values) for shape, values in (asked.knobs or {}).items()},
        "model": _absolute(workload.name),
    }
    torch.save(options, folder / OPTIONS_FILE)
    return None


def run_tool(
    program: str, tool: str, folders: Sequence[Path], limit_s: float, *, plain: bool = False
) -> Ran:
    """Run the calls in all `folders` under one tool, with the changes or, `plain`, without."""
    child = [sys.executable, "-m", "harness.memchecked", *["--plain"] * plain, *map(str, folders)]
    # A call that CUDA refuses, as when a library asks what a card can do, is no memory error.
    command = [program, "--tool", tool, "--print-limit", "10", *QUIET.get(tool, ()), *child]
    top = folders[0].parent
    for place in FOLDERS.values():
        (top / place).mkdir(exist_ok=True)
    environment = scrubbed(str(top)) | {
        # Tensors of their own: in a shared segment nothing is out of bounds.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))).rstrip(":"),
    }
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        cwd=top,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Ran(None, f"it took longer than {limit_s:.0f} s")
    return read(output.splitlines())


def read(lines: Sequence[str]) -> Ran:
    """What a tool's output says."""
    found = [m for line in lines if (m := SUMMARY.search(line))]
    if not found:
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return Ran(None, MARK.sub("", last))
    errors = sum(int(m.group(1) or m.group(2)) for m in found)
    told = (MARK.sub("", line).strip() for line in lines if line.startswith("==="))
    words = [text for text in told if text and not text.startswith(HEADINGS)]
    return Ran(errors, "; ".join(words[:3]))


def _absolute(name: str) -> str:
    return str(Path(name).resolve()) if name.endswith(".py") else name


def _holding(model: nn.Module, attribute: str) -> nn.Module:
    holder = nn.Module()
    setattr(holder, attribute, model.get_submodule(attribute))
    return holder


def _bytes(case: Case) -> int:
    return sum(t.nbytes for _, t in leaves((case.args, case.kwargs)))
