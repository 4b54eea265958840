"""Where a model's tools are used: one run, its ledger, its model, and its sandbox.

Nothing that a model wrote runs in this process; `verify` and `bench` ask workers of the sandbox.
"""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from agents import search
from agents.calls import calls_of
from agents.claude import profiled, words
from agents.claude.ideas import Ideas
from agents.claude.profile import Profiler
from agents.claude.trajectory import Call
from agents.claude.tree import Tree, cut
from agents.proposers.base import Context
from agents.sandboxed import Gate
from agents.session import Session
from harness import seeds
from harness.bench import ImpossibleTimeError
from harness.errors import UserError
from harness.observe import CandidateError
from harness.points import rounding_points
from harness.records import Environment
from harness.region_time import region_time
from optimized.change import Change, nodes

SHAPES = 8  # of a region's calls


class Desk:
    """The tools, on `session`. `gate` opens the sandbox when it is first needed."""

    def __init__(self, session: Session, gate: Callable[[], Gate]) -> None:
        self.session, self.gate = session, gate
        self.ledger, self.workload = session.ledger, session.workload
        self.ideas = Ideas(session.ledger)
        self.tree = Tree(self.ideas.folder)
        self.context: Context | None = None  # of the proposal that is being worked out
        self.seen: dict[str, tuple[Change, str] | None] = {}
        self.profiler = Profiler(session.workload.device.type)

    def connect(self) -> None:
        """Begin what needs the network, before this process gives it up."""
        self.profiler.connect()

    def close(self) -> None:
        self.profiler.close()

    def prompt(self) -> str:
        """What the model is told first: the machine, the task, what the trace offers."""
        session, target = self.session, self.workload.target(self.session.measure.target)
        here = Environment.from_json(self.ledger.last("environment") or {})
        effect = session.history.effect_us()
        parts = {
            "Machine": words.machine(here, session.ceilings),
            "Task": f"{self.workload.name} {self.workload.preset}: make {target.name} faster "
            f"({target.describe()}); a gain of less than {effect[session.measure.kind]:.1f} us "
            "cannot be told from none here.",
            "The unchanged model": words.baselines(session.history.baselines.values()),
            "Ranked opportunities, by the trace": words.opportunities(session.opportunities),
            "Attempts": words.attempts(session.history.attempts),
        }
        return "\n\n".join(f"## {title}\n\n{text}" for title, text in parts.items())

    def do(self, call: Call) -> tuple[str, bool]:
        """The result of a tool other than submit and give_up, and whether it is an error."""
        self.session.progress.part(f"the model's tool {call.brief}")
        try:
            return cut(getattr(self, call.name)(**call.input)), False
        except (ValueError, UserError, CandidateError) as error:
            return str(error), True

    def read_file(self, path: str, first: int = 1, last: int | None = None) -> str:
        return self.tree.read(path, first, last)

    def search(self, text: str, under: str = "") -> str:
        return self.tree.search(text, under)

    def kernel_table(self, region: str | None = None) -> str:
        return words.kernels(self.ledger.last("kernels"), region)

    def layer_map(self) -> str:
        return words.layers(self.ledger.last("layers"))

    def ceilings(self) -> str:
        here = Environment.from_json(self.ledger.last("environment") or {})
        return words.machine(here, self.session.ceilings)

    def attempts(self) -> str:
        return words.attempts(self.session.history.attempts)

    def region(self, region: str) -> str:
        """Its modules, its source, its calls' shapes, its rounding points."""
        model, jobs = self.session.reference, calls_of(self.session, region)
        names = nodes(model, region)
        kind = type(model.get_submodule(names[0]))
        lines = [
            f"{region}: {len(names)} modules: {', '.join(names[:4])}{' ...' * (len(names) > 4)}"
        ]
        lines += [f"its parameters: {parameters(model.get_submodule(names[0]))}"]
        for job in jobs[:SHAPES]:
            lines.append(f"called in a step of {job.rows} token(s) with {job.shapes}")
        node, args = model.get_submodule(jobs[0].names[0]), jobs[0].calls[0]
        for p in rounding_points(node, args):
            where = "interior, kept unless the contract elides it" if p.interior else "an output"
            lines.append(f"rounding point `{p.name}` ({p.operator}, {p.source}): {where}")
        return "\n".join([*lines, "", *sources(kind)])

    def write_change(self, file: str, text: str) -> str:
        return self.ideas.write(file, text)

    def verify(self, file: str) -> str:
        path = self.ideas.path(file)
        self.refuse_repeated(path)
        verdict = self.gate().verdict(str(path), None, seeds.draw())
        text = words.verdict(verdict)
        self.ideas.note(path, verdict.passed, text)
        return text

    def refuse_repeated(self, path: Path) -> None:
        """ValueError with what was found out about the same file before."""
        if (attempt := self.ideas.tried(path)) is not None:
            raise ValueError(f"the run tried this before, as it is: {words.attempt(attempt)}")
        if (judged := self.ideas.judged(path)) is not None:
            raise ValueError(f"this was judged before, as it is: {judged[1]}")

    def bench(self, file: str) -> str:
        """The region's first call in the timed step, with the change and without it."""
        path = self.passed(file, "timed")
        sandbox = self.gate().sandbox
        candidate, fresh = sandbox.open(str(path)), sandbox.open(str(path))
        try:
            assert candidate.change is not None
            job = calls_of(self.session, candidate.change.region)[0]
            reference = self.session.reference
            times, audited = region_time(sandbox, candidate, fresh, job, reference)
            if audited.reason is not None:
                candidate.findings.setdefault(audited.reason)
        except ImpossibleTimeError as error:
            return f"rejected: {error}"
        finally:
            findings = candidate.close()
            fresh.close()
        if findings:
            return f"rejected: {'; '.join(findings)}"
        return words.pair(f"{job.label}, {job.shapes}, one call", times)

    def passed(self, file: str, to_be: str) -> Path:
        """Of a change file that passed `verify` as it is; ValueError for another."""
        path = self.ideas.path(file)
        judged = self.ideas.judged(path)
        if judged is None or not judged[0]:
            raise ValueError(f"{file} has not passed verify; only what did is {to_be}")
        return path

    def profile(self, file: str) -> str:
        """The metrics of the region's first call in the timed step with the change; where they
        cannot be had, why, and what its kernels take."""
        handed = self.ideas.submit(self.passed(file, "profiled"))
        profiler = self.profiler
        if profiler.absent is not None:
            return f"no profile: {profiler.absent}.\n{profiled.resources(handed)}"
        seen = self.look(handed)
        if seen is None:
            raise ValueError(f"{file} cannot be loaded; verify says why")
        change, backend = seen
        job = calls_of(self.session, change.region)[0]
        node = self.session.reference.get_submodule(job.names[0])
        profiled.save(profiler.case, node, job.calls[0], file=handed, backend=backend)
        try:
            return f"{job.label}, {job.shapes}, one call\n{profiler.profile(self.workload.name)}"
        except ValueError as error:
            return f"no profile: {error}.\n{profiled.resources(handed)}"

    def take(self, call: Call) -> tuple[str | None, str]:
        """A submitted file as it will be tried, with its hypothesis; or None, and why it is not."""
        file, hypothesis = call.input["file"], call.input["hypothesis"]
        try:
            path = self.ideas.path(file)
            if (attempt := self.ideas.tried(path)) is not None:
                raise ValueError(f"the run tried this before: {words.attempt(attempt)}")
            judged = self.ideas.judged(path)
            if judged is not None and not judged[0]:
                raise ValueError(f"verify refused this as it is: {judged[1]}")
            handed = self.ideas.submit(path)
            self.refuse_stale(handed)
        except ValueError as error:
            return None, str(error)
        return handed, hypothesis

    def refuse_stale(self, file: str) -> None:
        """ValueError for a change to a region that a kept one has replaced by now."""
        seen = self.look(file)
        if seen is None or self.context is None:
            return  # its verdict says what is wrong
        region = seen[0].region
        if nodes(self.session.reference, region) and not self.context.free(region):
            kept = [a.name for a in self.session.history.kept]
            raise ValueError(
                f"stale: {region}, or what is around or inside it, is replaced by a change that "
                f"was kept: {', '.join(kept)}"
            )

    def look(self, file: str) -> tuple[Change, str] | None:
        """What a change file says of itself, without its code."""
        if file not in self.seen:
            self.seen[file] = self.gate().look(file)
        return self.seen[file]

    def decided(self, files: Sequence[str]) -> str | None:
        """What came of a round of submitted files; None while one of them is not decided."""
        return search.outcome_of(self.session.history, files)

    def outcome(self, file: str) -> str | None:
        """What came of a submitted file; None while it is not decided."""
        attempt = self.ideas.attempt(file)
        return None if attempt is None else words.attempt(attempt)


def parameters(node: torch.nn.Module) -> str:
    found = [
        f"{name} {list(p.shape)} {str(p.dtype).removeprefix('torch.')}"
        for name, p in node.named_parameters()
    ]
    return ", ".join(found) or "none"


def sources(kind: type) -> list[str]:
    """A module class's source, with the file that it stands in."""
    try:
        text = inspect.getsource(kind)
    except (OSError, TypeError):
        return [f"{kind.__name__}: its source cannot be found"]
    file = Path(inspect.getsourcefile(kind) or "").name
    return [f"{kind.__name__} in {file}:", text]
