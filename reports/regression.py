"""What differs between two states of a project: bits, times and machine, each a finding of its own.

Two states are compared by what each recorded of itself (`Snapshot`), or, measured in turns on one
machine, by the times of both (`interleaved`). Nothing here is judged by a typed-in percentage: a
time has changed only beyond the smallest effect that its own scatter can tell from none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from harness.record import Record
from harness.records import SCHEMA, Environment, Latency, Paired, Timing
from harness.stats import LEVEL, NULL_QUANTILE, abba_differences, median
from reports import text
from reports.run import KINDS, Run

# Other versions of these round otherwise.
OF_BITS = "device", "device_name", "torch", "triton", "cuda"
# Besides, with these a step takes another time.
OF_TIMES = "gpu_uuid", "driver", "sm_clock_mhz", "memory_clock_mhz", "cpu_threads", "python"
SHOWN = 10  # rounding points that are listed


class Outcome(StrEnum):
    SAME = "same"
    CHANGED = "changed"
    FASTER = "faster"
    SLOWER = "slower"
    UNKNOWN = "not compared"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One of bits, latency and environment; `regression` is what fails a check."""

    name: str
    outcome: Outcome
    words: str
    details: tuple[str, ...] = ()

    @property
    def regression(self) -> bool:
        changed_bits = self.name == "bits" and self.outcome is Outcome.CHANGED
        return changed_bits or self.outcome is Outcome.SLOWER


@dataclass(frozen=True, kw_only=True)
class Snapshot(Record):
    """What a run showed: a baseline file holds one. `points` are fingerprints by rounding point,
    empty where none were taken; `pairs` set the result against the reference of the same run."""

    schema: int
    model: str
    preset: str
    target: str
    seed: int
    changes: tuple[str, ...]  # that were kept
    environment: Environment | None
    decode: Timing | None
    prefill: Timing | None
    pairs: Latency | None
    points: dict[str, str]
    unstable: tuple[str, ...]

    @classmethod
    def of(cls, run: Run) -> "Snapshot":
        after = run.after
        return cls(
            schema=SCHEMA,
            model=run.header.model,
            preset=run.header.preset,
            target=run.header.target,
            seed=run.header.seed,
            changes=tuple(f"{a.name} ({a.backend})" for a in run.changes() if a.status == "kept"),
            environment=run.environment,
            decode=after.decode if after else None,
            prefill=after.prefill if after else None,
            pairs=after.pairs if after else None,
            points=run.points,
            unstable=run.unstable,
        )

    @property
    def workload(self) -> tuple[str, str, str, int]:
        return self.model, self.preset, self.target, self.seed


def environment(
    base: Environment | None, current: Environment | None
) -> tuple[Finding, dict[str, list[str]]]:
    """The finding, and what forbids comparing "bits" and "times"."""
    if base is None or current is None:
        missing = "one of the two does not say what it ran on"
        words = Finding(name="environment", outcome=Outcome.UNKNOWN, words=missing)
        return words, {"bits": [missing], "times": [missing]}

    def changed(names: Sequence[str]) -> list[str]:
        pairs = [(n, getattr(base, n), getattr(current, n)) for n in names]
        return [f"{n}: {a} → {b}" for n, a, b in pairs if a != b]

    bits = changed(OF_BITS)
    times = bits + changed(OF_TIMES)
    if times:
        words = "not the same machine and versions: figures would not compare"
        outcome = Outcome.CHANGED
    else:
        words, outcome = "same device, driver, clocks and versions", Outcome.SAME
    finding = Finding(name="environment", outcome=outcome, words=words, details=tuple(times))
    return finding, {"bits": bits, "times": times}


def bits(base: Snapshot, current: Snapshot, forbidden: Sequence[str] = ()) -> Finding:
    """Whether any rounding point has other bits, the first ones by name."""
    if forbidden:
        return _unknown("bits", f"the environment changed ({'; '.join(forbidden)})")
    for which, one in (("baseline", base), ("current", current)):
        if not one.points:
            return _unknown("bits", f"the {which} holds no fingerprint of its outputs")
    loose = {*base.unstable, *current.unstable}
    there, here = ({n: m for n, m in s.points.items() if n not in loose} for s in (base, current))
    other = [name for name, value in here.items() if there.get(name, value) != value]
    gone = [name for name in there if name not in current.points]
    new = [name for name in here if name not in base.points]
    details = [f"{name}: {there[name]} → {here[name]}" for name in other]
    details += [f"{name}: gone" for name in gone] + [f"{name}: new" for name in new]
    if not details:
        words = f"{text.count(len(here), 'rounding point')} bit for bit the same"
        if loose:
            words += f"; {text.count(len(loose))} differ from run to run and were left out"
        return Finding(name="bits", outcome=Outcome.SAME, words=words)
    first = f", first in {other[0]}" if other else ""
    words = (
        f"{text.count(len(other))} of {text.count(len(here), 'rounding point')} have other bits"
        f"{first}; {len(gone)} gone, {len(new)} new"
    )
    more = [f"and {len(details) - SHOWN} more"] if len(details) > SHOWN else []
    listed = (*details[:SHOWN], *more)
    return Finding(name="bits", outcome=Outcome.CHANGED, words=words, details=listed)


def latency(kind: str, base: Snapshot, current: Snapshot, forbidden: Sequence[str] = ()) -> Finding:
    """Two runs that were not interleaved. The machine may have drifted between them, so a time has
    changed only if it did so alone and beside the unchanged reference of its own run."""
    name = f"latency, {kind}"
    if forbidden:
        return _unknown(name, f"the environment changed ({'; '.join(forbidden)})")
    there, here = (s.pairs and getattr(s.pairs, kind) for s in (base, current))
    if there is None or here is None:
        return _unknown(name, "one of the two has no closing pairs against its reference")
    alone = math.log(here.candidate_us / there.candidate_us)
    beside = math.log(_beside(here) / _beside(there))
    effect = relative_effect(there) + relative_effect(here)
    moved = text.path(there.candidate_us, here.candidate_us)
    words = (
        f"{moved}: {percent(math.expm1(alone))}, beside its own reference "
        f"{percent(math.expm1(beside))}; smallest detectable effect {100 * effect:.2f}%"
    )
    outcome = Outcome.SAME
    if min(alone, beside) > effect:
        outcome = Outcome.SLOWER
    elif max(alone, beside) < -effect:
        outcome = Outcome.FASTER
    elif abs(alone) > effect:
        words += "; the unchanged reference moved with it, so the machine did"
    return Finding(name=name, outcome=outcome, words=words)


def _beside(pair: Paired) -> float:
    """The result's time in its reference's, by the paired gain: both medians alone would let in
    what disturbed only one of them."""
    return 1 - pair.gain_us / pair.base_us


def relative_effect(pair: Paired) -> float:
    """The smallest effect as a share of the step, no less than half its median's interval."""
    low, high = pair.candidate_interval_us
    return max(pair.mde_us, (high - low) / 2) / pair.candidate_us


def interleaved(pairs: Sequence[np.ndarray], twins: Sequence[np.ndarray]) -> Paired:
    """The baseline against the current state.

    `pairs` has one array [n, 4] a round: baseline, current, current, baseline; every round has
    processes of its own. `twins` are the same of the baseline and a second build of it.

    Builds of one program differ by where they lie, and other work comes in bursts, so a round is
    one sample, however many blocks it has. Their scatter is that of the twins about nothing and
    that of the gains about their mean; it is Student's t that says what so few can tell.
    """
    rounds = len(pairs)
    level = median(np.concatenate(pairs)[:, [0, 3]].ravel())
    gains, offsets = (
        np.array([median(abba_differences(_levelled(times, level))) for times in side])
        for side in (pairs, twins)
    )
    gain = float(gains.mean())
    degrees = 2 * rounds - 1
    spread = math.sqrt((((gains - gain) ** 2).sum() + (offsets**2).sum()) / degrees / rounds)
    half = student(0.5 + LEVEL / 2, degrees) * spread
    return Paired(
        base_us=level,
        candidate_us=level - gain,
        candidate_interval_us=(level - gain - half, level - gain + half),
        gain_us=gain,
        gain_interval_us=(gain - half, gain + half),
        mde_us=student(0.5 + NULL_QUANTILE / 2, degrees) * spread,
        pairs=sum(map(len, pairs)),
    )


def student(share: float, degrees: int) -> float:
    """The quantile of Student's t distribution for an odd number of degrees, by bisection."""

    def below(t: float) -> float:
        angle = math.atan(t / math.sqrt(degrees))
        term, total = math.cos(angle), 0.0
        for k in range((degrees - 1) // 2):
            total += term
            term *= math.cos(angle) ** 2 * (2 * k + 2) / (2 * k + 3)
        return 0.5 + (angle + math.sin(angle) * total) / math.pi

    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < share else (low, middle)
    return high


def _levelled(times: np.ndarray, level: float) -> np.ndarray:
    """A round scaled to the baseline's level in all: a machine that is slower for a minute changes
    the level by much and ratios by little."""
    return times * (level / median(times[:, [0, 3]].ravel()))


def measured(kind: str, pair: Paired, rounds: int) -> Finding:
    """The finding on `interleaved` times."""
    words = (
        f"{text.path(pair.base_us, pair.candidate_us)}: {percent(-pair.gain_us / pair.base_us)}, "
        f"in turns on one machine ({text.count(pair.pairs, 'pair')}, "
        f"{text.count(rounds, 'round')}); smallest detectable effect "
        f"{100 * pair.mde_us / pair.base_us:.2f}%"
    )
    outcome = Outcome.SAME
    if abs(pair.gain_us) > pair.mde_us:
        outcome = Outcome.FASTER if pair.gain_us > 0 else Outcome.SLOWER
    return Finding(name=f"latency, {kind}", outcome=outcome, words=words)


def compare(base: Snapshot, current: Snapshot, *, across: bool = False) -> list[Finding]:
    """The findings on two recorded states; `across` compares them on other machines, too."""
    machine, forbidden = environment(base.environment, current.environment)
    if across:
        forbidden = {"bits": [], "times": []}
    return [
        bits(base, current, forbidden["bits"]),
        *(latency(kind, base, current, forbidden["times"]) for kind in KINDS),
        machine,
    ]


def percent(change: float) -> str:
    return f"{100 * change:+.2f}%".replace("-", text.MINUS)


def _unknown(name: str, words: str) -> Finding:
    return Finding(name=name, outcome=Outcome.UNKNOWN, words=words)
