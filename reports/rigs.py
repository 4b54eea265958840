"""Rigs (`harness/rig.py`) as processes: one source tree each, asked in turns, torch-free.

Times of two commits from two runs differ by what the machine did in between. Here both are alive at
once and every block times baseline, current, current, baseline, so that only the code differs.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from harness.certificate import ROOT
from harness.errors import UserError
from harness.git import Git
from reports.run import KINDS, Run

RIG = ROOT / "harness" / "rig.py"
WARM_BLOCKS = 2  # at the start of a round, not counted
MIN_BLOCKS = 4
AT_LEAST_US = 5000.0  # of one turn, so that changing processes costs little
AT_LEAST = 3  # runs of one turn, whose median a burst of other work does not move


class Rig:
    """One process; UserError with its last words if it fails."""

    def __init__(self, tree: Path, order: dict[str, Any]) -> None:
        path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
        self.tree = tree
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(RIG)], cwd=tree, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
        )  # fmt: skip
        self.first: dict[str, Any] = {}  # the answer to `order`
        self._send(order)

    @property
    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self.process.stdin is not None and self.process.stdout is not None
        return self.process.stdin, self.process.stdout

    def _send(self, order: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # its last words say more
            self._pipes[0].write(json.dumps(order) + "\n")
            self._pipes[0].flush()

    def answer(self) -> dict[str, Any]:
        """The next answer."""
        line = self._pipes[1].readline()
        said = json.loads(line) if line else {"error": self._last_words()}
        if "error" in said:
            raise UserError(f"{self.tree.name} cannot be measured: {said['error']}")
        return said

    def ask(self, **order: Any) -> dict[str, Any]:
        self._send(order)
        return self.answer()

    def take(self, kind: str, count: int) -> float:
        """The median us of `count` runs."""
        return float(np.median(self.ask(take=kind, count=count)["us"]))

    def _last_words(self) -> str:
        self.log.seek(0)
        lines = [line for line in self.log.read().splitlines() if line.strip()]
        return lines[-1] if lines else f"its process ended with code {self.process.wait()}"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self.log.close()


@contextlib.contextmanager
def started(trees: Sequence[Path], orders: Sequence[dict[str, Any]]) -> Iterator[list[Rig]]:
    """A rig for each tree, all ready."""
    rigs: list[Rig] = []
    try:
        for tree, order in zip(trees, orders, strict=True):
            rigs.append(Rig(tree, order))
        for rig in rigs:
            rig.first = rig.answer()
        yield rigs
    finally:
        for rig in rigs:
            rig.close()


@contextlib.contextmanager
def worktree(commit: str, root: Path = ROOT) -> Iterator[Path]:
    """The files of `commit` in a folder of their own, which goes again; UserError if there is no
    such commit."""
    git = Git.open(root)
    full = git.commit(commit)
    if full is None:
        raise UserError(
            f"--baseline {commit} is no baseline file, no run and no commit of {root}; in a "
            "shallow clone, fetch it first"
        )
    with tempfile.TemporaryDirectory(prefix="baseline-") as folder:
        tree = Path(folder) / full[:12]
        git.run("worktree", "add", "--detach", "--quiet", tree, full)
        try:
            yield tree
        finally:
            git.run("worktree", "remove", "--force", tree)


def order_for(run: Run, root: Path = ROOT) -> dict[str, Any]:
    """What a rig needs to build the result of `run`. A model file of the project is named relative
    to it, so that each tree takes its own."""
    header, plan = run.header, run.directory / "plan.toml"
    model = Path(header.model)
    if model.suffix == ".py":
        where = model.resolve()
        if where.is_relative_to(root):
            model = where.relative_to(root)
        elif not (root / model).is_file():
            model = where
    return {
        "model": str(model),
        "preset": header.preset,
        "device": header.device,
        "seed": header.seed,
        "target": header.target,
        "plan": str(plan.resolve()) if plan.is_file() else None,
    }


@dataclass(frozen=True, kw_only=True)
class Times:
    """By kind, one array [n, 4] of us a round: of baseline and current, and of the baseline and a
    second build of it."""

    pairs: dict[str, list[np.ndarray]]
    twins: dict[str, list[np.ndarray]]


def in_turns(
    base: Path, current: Path, order: dict[str, Any], *, rounds: int, seconds: float
) -> Times:
    """Time both trees' steps, `seconds` for each kind and round; each round has new processes, for
    two builds of one program can differ for good by where their code and data happen to lie. Each
    round says on stderr that it is done, and how long the others will take."""
    begun = time.monotonic()
    times = Times(pairs={k: [] for k in KINDS}, twins={k: [] for k in KINDS})
    for done in range(1, rounds + 1):
        with started([base, base, current], [order] * 3) as (one, twin, other):
            for kind in KINDS:
                pairs, twins = _round(kind, one, twin, other, seconds)
                times.pairs[kind].append(pairs)
                times.twins[kind].append(twins)
        left_s = (time.monotonic() - begun) / done * (rounds - done)
        print(f"round {done} of {rounds}; about {left_s:.0f} s left", file=sys.stderr, flush=True)
    return times


def _round(
    kind: str, one: Rig, twin: Rig, other: Rig, seconds: float
) -> tuple[np.ndarray, np.ndarray]:
    once_us = min(one.take(kind, 2), one.take(kind, 2))
    count = max(AT_LEAST, round(AT_LEAST_US / once_us))
    block_us = 8 * (count + 1) * once_us
    blocks = max(MIN_BLOCKS, int(seconds * 1e6 / block_us))
    found: dict[int, list[list[float]]] = {id(other): [], id(twin): []}
    for block in range(WARM_BLOCKS + blocks):
        for partner in (other, twin) if block % 2 else (twin, other):
            if block.bit_count() % 2:  # no place in a block favours either
                b, a, a2, b2 = (r.take(kind, count) for r in (partner, one, one, partner))
            else:
                a, b, b2, a2 = (r.take(kind, count) for r in (one, partner, partner, one))
            found[id(partner)].append([a, b, b2, a2])
    return tuple(np.array(found[id(r)][WARM_BLOCKS:]) for r in (other, twin))  # type: ignore[return-value]
