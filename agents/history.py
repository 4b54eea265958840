"""What a run's ledger says was done: the state from which a run goes on, torch-free."""

import statistics
from dataclasses import dataclass
from typing import Any

from harness.ledger import Ledger
from harness.records import Attempt, Baseline, Record, Status

MAX_DEATHS = 3


@dataclass(frozen=True, kw_only=True)
class Started(Record):
    """A change as it is when it is begun: what is known of it, should it end the run's process."""

    index: int
    name: str
    region: str
    backend: str
    predicted_us: float | None
    bound_us: float | None
    control: str | None
    parent: str | None

    def ended(self, status: Status, reason: str, seconds: float, **found: Any) -> Attempt:
        """Its outcome; `found` are the fields of an Attempt that are known by then."""
        known = {"knobs": {}, "region_verdict": None, "model_verdict": None, "latency": None}
        outcome = {"status": status, "reason": reason, "seconds": round(seconds, 1)}
        return Attempt(**self.to_json(), **known | found, **outcome)


@dataclass(frozen=True)
class History:
    """A view of the ledger; nothing is kept beside it, so killing the run loses nothing."""

    ledger: Ledger

    @property
    def attempts(self) -> list[Attempt]:
        return self.ledger.all("attempt", Attempt)

    @property
    def kept(self) -> list[Attempt]:
        return [a for a in self.attempts if a.status is Status.KEPT]

    def gained_us(self, kind: str) -> dict[str, float]:
        """What the kept changes gained in one of the two measurements, by region."""
        gained: dict[str, float] = {}
        for attempt in self.kept:
            if attempt.latency is not None:
                pair = getattr(attempt.latency, kind)
                gained[attempt.region] = gained.get(attempt.region, 0.0) + pair.gain_us
        return gained

    @property
    def controls(self) -> frozenset[str]:
        """The controls that were refused, as they must be."""
        refused = (a for a in self.attempts if a.status is Status.REJECTED)
        return frozenset(a.control for a in refused if a.control)

    @property
    def changes_judged(self) -> int:
        """Attempts that were not controls."""
        return sum(a.control is None for a in self.attempts)

    @property
    def change_s(self) -> float:
        """About how many seconds a change takes; 0 before the first."""
        seconds = [a.seconds for a in self.attempts if a.control is None]
        return statistics.median(seconds) if seconds else 0.0

    @property
    def baselines(self) -> dict[str, Baseline]:
        return {b.name: b for b in self.ledger.all("baseline", Baseline)}

    def step_us(self, kind: str, device_type: str) -> float | None:
        """How long a step of this kind takes now: with what was kept, or of the unchanged model run
        as candidates are; None where it was not timed."""
        if (measured := self.ledger.last("measured")) is not None:
            return float(measured[kind]["median_us"])
        in_graph = device_type == "cuda" and kind == "decode"
        timed = self.baselines.get("graph" if in_graph else "eager")
        timing = None if timed is None else getattr(timed, kind)
        return None if timing is None else timing.median_us

    def deaths(self, name: str, backend: str) -> int:
        """How often this change was begun and not decided: it may have broken the run."""
        kinds = [
            e.kind
            for e in self.ledger.events()
            if (e.data.get("name"), e.data.get("backend")) == (name, backend)
        ]
        return kinds.count("started") - kinds.count("attempt")

    def effect_us(self) -> dict[str, float]:
        """The smallest detectable effects in force, by "decode" and "prefill"."""
        effect = self.ledger.last("effect") or {}
        return {name: effect[f"{name}_us"] for name in ("decode", "prefill")}

    def since_last_attempt(self) -> set[str]:
        """The kinds of events after the last attempt: which closing stages are done."""
        kinds: set[str] = set()
        for event in self.ledger.events():
            kinds = set() if event.kind == "attempt" else kinds | {event.kind}
        return kinds
