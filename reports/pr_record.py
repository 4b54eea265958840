"""What a kept change's bundle needs beside its attempt and its certificate, torch-free records."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.certificate import ROOT
from harness.records import Record

GROUND = "ground"
COMPILED = "compiled"
COMMITTED = "committed"
TIMEOUT_S = 120
NO_KERNEL = "its files define no kernel that can be compiled without a GPU"


@dataclass(frozen=True, kw_only=True)
class Ground(Record):
    """What the patch of the change that was tried `index`-th stands on."""

    index: int
    commit: str | None  # whose files were run; None: no git checkout
    name: str  # by which the repository finds the change once the patch is in
    before: dict[str, str]  # files that the patch changes, as the commit has them
    files: dict[str, str]  # the kernel's files as judged, where the commit has other ones or none
    others: tuple[str, ...]  # files of oracle and judge that are not as in the commit
    obstacle: str | None = None  # why no patch can be made


@dataclass(frozen=True, kw_only=True)
class Kernel(Record):
    """One kernel compiled for one target, without a GPU."""

    change: str  # the file of optimized/ that defines it
    kernel: str
    constexprs: dict[str, int | str | bool | float | None]
    num_warps: int
    target: str
    registers: int | None
    spills: int | None  # bytes of local memory on NVIDIA, registers on AMD
    shared_bytes: int | None
    error: str | None


@dataclass(frozen=True, kw_only=True)
class Compiled(Record):
    """The Triton kernels of a change for each target; `absent` says why there are none."""

    index: int
    kernels: tuple[Kernel, ...]
    absent: str | None = None


@dataclass(frozen=True, kw_only=True)
class Committed(Record):
    """The commit of a kept change's files in the run's own repository; `absent`: why none."""

    index: int
    commit: str | None
    branch: str | None
    absent: str | None


def compiled(index: int, modules: Iterable[str], root: Path = ROOT) -> Compiled:
    """Compile the kernels of these files of optimized/, in the checkout at `root`, in a process of
    its own."""
    names = sorted(name for name in modules if (root / "optimized" / f"{name}.py").is_file())
    if not names:
        return Compiled(index=index, kernels=(), absent=NO_KERNEL)
    command = [sys.executable, "-m", "optimized.offline", "--json", *names]
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    try:
        done = subprocess.run(
            command, cwd=root, env=settings, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return Compiled(index=index, kernels=(), absent=f"compiling took over {TIMEOUT_S} s")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no words"])[-1]
        return Compiled(index=index, kernels=(), absent=f"could not be compiled here: {last}")
    kernels = tuple(_kernel(line) for line in done.stdout.splitlines())
    return Compiled(index=index, kernels=kernels, absent=None if kernels else NO_KERNEL)


def _kernel(line: str) -> Kernel:
    data = json.loads(line)
    used = data.pop("resources") or {}
    taken = {name: used.get(name) for name in ("registers", "spills", "shared_bytes")}
    return Kernel.from_json({**data, **taken})
