"""Change files that try to fool the judge, each of which it must refuse, and honest ones beside
them, which it must accept. All take the path that every change file takes: the sandbox, the
region's cases, then runs that are timed from outside and compared.
"""

import ast
import contextlib
import functools
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from harness.burst_audit import audit, call_draws
from harness.cases import storages
from harness.confine import ROOT, Limits
from harness.errors import UserError
from harness.jobs import Pool, Task
from harness.observe import CandidateError
from harness.outside import MOST_RUNS, Bursts, memoises
from harness.protections import Protection
from harness.records import Record
from harness.region import RegionCases
from harness.remote import Candidate
from harness.sandbox import Sandbox
from harness.workload import Workload

FOLDER = ROOT / "tests" / "harness" / "cheats"
TOY = ROOT / "tests" / "harness" / "toy_model.py"
# Docstrings say which model that ships a file is written against: "Against NAME PRESET."
AGAINST = re.compile(r"\s*Against (\S+) (\S+)\.\s*$")
LIMITS = Limits(
    load_s=60.0, call_s=10.0, memory=2 << 30, disk=64 << 20, file=64 << 20, processes=32
)  # fmt: skip
BURSTS = 8  # timed before the one that is compared
AUDITED = 5  # runs of the burst that is compared

# An error of a file's own shows nothing of the judge, save where it is what the file tries; its
# docstring says so then: "Raises NAME."
OWN_ERROR = re.compile(r"raises (\w+(?:Error|Exception)):")
RAISES = re.compile(r"\s*Raises (\w+)\.")

CAUGHT, SURVIVED, NOT_HERE = "caught", "survived", "not runnable here"
ACCEPTED, REJECTED, BROKEN = "accepted", "wrongly rejected", "fails by itself"
BAD = SURVIVED, REJECTED, BROKEN


@dataclass(frozen=True)
class Fixture:
    """One change file: what it tries (its docstring), and the model it is written against."""

    path: Path
    tries: str
    model: str
    preset: str
    raises: tuple[str, ...] = ()  # errors that are what it tries

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def honest(self) -> bool:
        return self.name.startswith("honest_")


@dataclass(frozen=True, kw_only=True)
class Outcome(Record):
    """What became of one file; `how` is the judge's reason."""

    name: str
    tries: str
    outcome: str
    how: str

    @property
    def bad(self) -> bool:
        return self.outcome in BAD


def fixtures(folder: Path = FOLDER) -> list[Fixture]:
    """All change files of a folder by name, honest ones first; read, not imported."""
    if not folder.is_dir():
        raise UserError(f"no change files at {folder}; run this in a checkout of the project")
    found = []
    for path in sorted(folder.glob("*.py")):
        text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
        against = AGAINST.search(text)
        model, preset = against.groups() if against else (str(TOY), "auto")
        tries = RAISES.sub("", AGAINST.sub("", text))
        found.append(Fixture(path, tries, model, preset, tuple(RAISES.findall(text))))
    return sorted(found, key=lambda f: (f.model, not f.honest, f.name))


def run(
    chosen: Sequence[Fixture], device: str, seed: int, jobs: int, say: Callable[[str], None]
) -> tuple[list[Outcome], tuple[Protection, ...]]:
    """Run them all in `jobs` processes; what became of each, in that order, and the protections
    that they ran under. UserError if a worker ended."""
    found: dict[str, Outcome] = {}
    seen: dict[str, tuple[Protection, ...]] = {}

    def keep(result: tuple[Outcome, tuple[Protection, ...]]) -> None:
        outcome, seen[outcome.name] = result
        found[outcome.name] = outcome
        say(f"{outcome.name}: {outcome.outcome}" + f": {outcome.how}" * bool(outcome.how))

    with Pool(functools.partial(arenas, device, seed), jobs) as pool:
        for fixture in chosen:
            key = f"{fixture.model} {fixture.preset}"
            pool.add(Task(f"judges {fixture.name}", key, functools.partial(judge, fixture), keep))
        pool.run()
    return [found[f.name] for f in chosen], next((seen[f.name] for f in reversed(chosen)), ())


def judge(fixture: Fixture, worker: "Arenas") -> tuple[Outcome, tuple[Protection, ...]]:
    arena = worker.arena(fixture.model, fixture.preset)
    return arena.outcome(fixture), arena.sandbox.protections


@contextlib.contextmanager
def arenas(device: str, seed: int) -> Iterator["Arenas"]:
    with contextlib.closing(Arenas(device, seed)) as worker:
        yield worker


@dataclass
class Arenas:
    """One worker: the arena of the model that it was last asked for."""

    device: str
    seed: int
    open: dict[tuple[str, str], "Arena"] = field(default_factory=dict)

    def arena(self, model: str, preset: str) -> "Arena":
        if (model, preset) not in self.open:
            self.close()
            workload = Workload.load(model, preset, self.device, self.seed)
            self.open[model, preset] = Arena(workload, self.seed)
        return self.open[model, preset]

    def close(self) -> None:
        while self.open:
            self.open.popitem()[1].close()


@dataclass
class Arena:
    """One model's sandbox and cases, prepared once for all files written against it."""

    workload: Workload
    seed: int
    limits: Limits = LIMITS
    cases: dict[str, RegionCases] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model = self.workload.name
        self.sandbox = Sandbox(
            self.workload.model, self.workload.device, model=model, limits=self.limits
        )
        self.folder = tempfile.TemporaryDirectory(prefix="results-")

    def __enter__(self) -> "Arena":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.sandbox.close()
        self.folder.cleanup()

    def outcome(self, fixture: Fixture) -> Outcome:
        """Judge one file as any other."""
        try:
            found = self.reason(str(fixture.path))
        except UserError as error:
            text = str(error)
            if "has nothing for" not in text:
                raise
            return Outcome(name=fixture.name, tries=fixture.tries, outcome=NOT_HERE, how=text)
        reason = None if found is None else found.replace(f"{ROOT}/", "")
        own = OWN_ERROR.match(reason or "")
        if fixture.honest:
            word = ACCEPTED if reason is None else REJECTED
        elif own is not None and own.group(1) not in fixture.raises:
            word = BROKEN
        else:
            word = SURVIVED if reason is None else CAUGHT
        return Outcome(name=fixture.name, tries=fixture.tries, outcome=word, how=reason or "")

    def reason(self, change: str) -> str | None:
        """Why a change is refused, or None if it is not."""
        try:
            candidate = self.sandbox.open(change)
        except CandidateError as error:
            return str(error)
        with_fresh: list[Candidate] = []
        try:
            assert candidate.change is not None
            cases = self.prepared(candidate)
            verdict = cases.judge(candidate.model, candidate.backend, until_fault=True)
            verdict = candidate.judged(verdict)
            if not verdict.passed:
                return verdict.reason
            with_fresh.append(self.sandbox.open(change))
            told = self.timed(candidate, with_fresh[0], cases)
            if told is not None:
                candidate.findings.setdefault(told)
        except CandidateError as error:
            candidate.findings.setdefault(f"while timed: {error}")
        finally:
            findings = candidate.close()
            for fresh in with_fresh:
                findings += fresh.close()
        return "; ".join(dict.fromkeys(findings)) or None

    def prepared(self, candidate: Candidate) -> RegionCases:
        """The region's cases under the candidate's contract; the reference's results are left in a
        file, as somebody careless might."""
        assert candidate.change is not None
        change = candidate.change
        key = repr((change.region, change.contract))
        if key not in self.cases:
            made = RegionCases.prepare(
                self.workload.model, change.region, change.contract, self.workload, self.seed
            )
            self.cases[key] = made
            for number, tensor in enumerate(_results(made)):
                torch.save(tensor, Path(self.folder.name) / f"{len(self.cases)}-{number}.pt")
        self.cases[key].kills.clear()  # the order of the cases must not depend on other files
        return self.cases[key]

    def timed(self, candidate: Candidate, fresh: Candidate, cases: RegionCases) -> str | None:
        """What runs that are timed show: results that are remembered, or not those of a fresh
        process."""
        first = next(c for c in cases.recorded if c.node == cases.names[0] and not c.kwargs)
        draws = call_draws(first.args, storages(self.workload.model), MOST_RUNS)
        mine = Bursts(candidate, first.node, draws)
        told = memoises(mine)
        for _ in range(BURSTS):
            mine.slope_us(mine.count())
        differs = audit(mine, fresh, AUDITED)
        return "; ".join(text for text in (differs, told) if text) or None


def _results(cases: RegionCases) -> Iterator[torch.Tensor]:
    for node in cases.nodes():
        for prepared in node.prepared:
            yield from prepared.first.outputs.values()
