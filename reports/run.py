"""A run as the reports see it: a typed view over its ledger, without torch and without a GPU."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.certificate import STANDS_ON
from harness.errors import UserError
from harness.ledger import Event, Ledger
from harness.protections import Protection
from harness.records import (
    Attempt,
    Baseline,
    Ceilings,
    Environment,
    LayerMap,
    Paired,
    Proposal,
    Status,
    Verdict,
)
from reports.events import READERS
from reports.other_targets import OtherTargets
from reports.parts import KINDS, Header, Kernels, Measured
from reports.rounds import Evaluated
from reports.spending import Spending

BASELINES = ("eager", "graph", "compile")
# By kind, us [pairs, 4] of base, candidate, candidate, base.
Samples = dict[str, list[list[float]]]


@dataclass(kw_only=True)
class Run:
    """Everything a ledger holds. What has not happened yet is None or empty.

    Of what a continued run measures again the latest counts. `anchors` holds the unchanged model
    timed again at the start of each continued session: they show whether the machine drifted.
    """

    directory: Path
    header: Header
    started_s: float  # Unix seconds of the first and the last event
    ended_s: float
    sessions: int = 1
    environments: list[Environment] = field(default_factory=list)
    ceilings: Ceilings | None = None
    baseline_history: list[Baseline] = field(default_factory=list)
    anchors: list[Measured] = field(default_factory=list)
    effect: dict[str, float] = field(default_factory=dict)  # "decode_us", "prefill_us"
    floors: dict[str, float | None] = field(default_factory=dict)  # us by kind; None: not known
    kernels: dict[str, Kernels] = field(default_factory=dict)  # "before", "after"
    layers: dict[str, tuple[LayerMap, ...]] = field(default_factory=dict)  # "before", "after"
    rankings: list[tuple[Proposal, ...]] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    final: Measured | None = None
    closing_verdict: Verdict | None = None  # on every layer of the model as it ended
    others: OtherTargets = field(default_factory=OtherTargets)  # kept changes at other targets
    protections: tuple[Protection, ...] = ()  # of the sandbox, if candidates were judged in one
    own_process: tuple[Protection, ...] = ()  # what holds where accepted candidates are timed
    samples: dict[int, Samples] = field(default_factory=dict)  # of pairs, by attempt and kind
    points: dict[str, str] = field(default_factory=dict)  # fingerprints by rounding point
    unstable: tuple[str, ...] = ()  # those of them that differ from run to run
    workers: list[str] = field(default_factory=list)  # that judged regions, with device and host
    lost: list[str] = field(default_factory=list)  # of them: at what, and how
    spending: list[Spending] = field(default_factory=list)  # of a language model, if one took part
    rounds: list[list[str]] = field(default_factory=list)  # its change files, by round
    evaluated: list[Evaluated] = field(default_factory=list)  # and what their regions came to
    workspace: dict[str, Any] | None = None  # what they were judged by
    # "done", "budget", "plateau", "floor" or "interrupted"; None: not stopped by itself
    stopped: str | None = None
    stopped_why: str | None = None
    in_progress: str | None = None  # a change that was started and has no outcome

    @classmethod
    def load(cls, directory: Path) -> "Run":
        """Read the ledger in `directory`; UserError if it is no run, another schema, or damaged."""
        ledger = Ledger.open(Path(directory))
        run: Run | None = None
        for number, event in enumerate(_events(ledger), start=1):
            try:
                if run is None:
                    run = cls._begin(ledger.directory, event)
                else:
                    run._add(event)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
                raise UserError(
                    f"{ledger.path}:{number} is not a valid {event.kind!r} event ({what}); "
                    "restore the file, or start a new run"
                ) from error
        if run is None:
            raise UserError(f"{ledger.path} is empty; start a new run")
        return run

    @classmethod
    def _begin(cls, directory: Path, event: Event) -> "Run":
        names = ("target", "model", "preset", "device", "seed", "proposer")
        if event.data["target"].partition("-")[0] not in KINDS:
            raise ValueError(f"target {event.data['target']!r} is neither a decode nor a prefill")
        header = Header(
            **{name: event.data[name] for name in names},
            options=dict(event.data.get("options") or {}),
            workload=dict(event.data.get("workload") or {}),
            note=event.data.get("note") or "",
            stands_on=tuple(line["name"] for line in event.data.get(STANDS_ON, [])),
        )
        time_s = event.time_s
        return cls(directory=directory, header=header, started_s=time_s, ended_s=time_s)

    def _add(self, event: Event) -> None:
        self.ended_s = event.time_s
        if (read := READERS.get(event.kind)) is not None:
            read(self, event.data)

    @property
    def environment(self) -> Environment | None:
        return self.environments[-1] if self.environments else None

    @property
    def kinds(self) -> tuple[str, ...]:
        """KINDS, the target's first."""
        return tuple(sorted(KINDS, key=lambda kind: kind != self.header.kind))

    def pair(self, attempt: Attempt) -> Paired | None:
        """What the attempt did to the target: its gain decides."""
        return getattr(attempt.latency, self.header.kind) if attempt.latency else None

    @property
    def unchanged(self) -> bool:
        """Whether the run's result is the model as it was: no plan below it, and nothing kept."""
        return not self.header.stands_on and not self.changes(Status.KEPT)

    @property
    def finished(self) -> bool:
        return self.final is not None

    @property
    def baselines(self) -> dict[str, Baseline]:
        """The latest of each, plain eager first; one without figures never hides one with."""
        latest: dict[str, Baseline] = {}
        for baseline in self.baseline_history:
            if baseline.decode is not None or baseline.name not in latest:
                latest[baseline.name] = baseline
        order = [n for n in BASELINES if n in latest] + [n for n in latest if n not in BASELINES]
        return {name: latest[name] for name in order}

    def before(self, kind: str) -> Baseline | None:
        """The unchanged model run as its candidates are: on a GPU decode replays a CUDA graph,
        everything else runs eagerly. `kind` is "decode" or "prefill"."""
        in_graph = self.header.device == "cuda" and kind == "decode"
        names = ("graph", "eager") if in_graph else ("eager", "graph")
        timed = {n: b for n, b in self.baselines.items() if getattr(b, kind) is not None}
        return next((timed[name] for name in names if name in timed), None)

    @property
    def after(self) -> Measured | None:
        """The model at the end, or, in an unfinished run, after the last change kept so far."""
        return self.final or (self.measured[-1] if self.measured else None)

    def changes(self, status: Status | None = None) -> list[Attempt]:
        """The attempts that were no controls, in order, all or those of one status."""
        real = [a for a in self.attempts if a.control is None]
        return [a for a in real if status is None or a.status is status]

    @property
    def controls(self) -> list[Attempt]:
        """The last try of each control: one that was accepted widens the smallest effect and is
        offered again."""
        latest = {a.control: a for a in self.attempts if a.control is not None}
        return list(latest.values())

    def hypothesis(self, attempt: Attempt) -> str | None:
        """What the proposer expected of the attempt, from the latest ranking that names it."""
        for ranking in reversed(self.rankings):
            for proposal in ranking:
                if (proposal.change, proposal.backend) == (attempt.name, attempt.backend):
                    return proposal.hypothesis
        return None


def _events(ledger: Ledger) -> Iterable[Event]:
    try:
        yield from ledger.events()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read {ledger.path}: {error}; restore the file, or start a new run"
        ) from error
