"""A run of the toy model that kept two changes, as its ledger stands when its search is over.

The first does nothing in a batch of one, and elsewhere makes each of three norms 8 ms slower. The
second leaves batches beyond 8 to the reference.
"""

import functools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from agents import measure
from agents.budget import Budget
from agents.progress import Progress
from agents.session import Session
from harness.ledger import Ledger
from harness.records import Attempt, Latency, Paired, Status, Verdict
from harness.workload import Workload
from reports.other_targets import PAIRS, OtherPairs
from tests.agents import killers

SLOWED_US = 3 * 8000.0  # by the first, a step of any other target
CHANGE = """
import time
from optimized.change import Change, Contract, Implementation


def build(node, _knobs):
    def forward(x, *rest):
        if {slow} and x.shape[0] > 1:
            time.sleep(0.008)
        return type(node).forward(node, x, *rest)

    return forward


def guard(node, x, *rest):
    return "a batch beyond 8" if x.shape[0] > {most} else None


CHANGE = Change(
    name="{name}", region="{region}", summary="as it is", contract=Contract(numerics="exact"),
    implementations=(
        Implementation(backend="torch", devices=("cpu",), build=build, guard=guard),
    ),
)
"""
FIRST = {"name": "slow_beside", "region": "scaled_norm", "slow": True, "most": 10_000}
SECOND = {"name": "small_only", "region": "mixer", "slow": False, "most": 8}
INDICES = 3, 4  # after the two controls
OTHERS = "decode-bs8", "decode-bs128", "decode-bs256"


def paired(gain_us: float, base_us: float = 1000.0, mde_us: float = 5.0) -> Paired:
    after = base_us - gain_us
    return Paired(
        base_us=base_us,
        candidate_us=after,
        candidate_interval_us=(after - 1, after + 1),
        gain_us=gain_us,
        gain_interval_us=(gain_us - 2, gain_us + 2),
        mde_us=mde_us,
        pairs=9,
    )


def attempt(index: int, name: str, region: str) -> Attempt:
    verdict = Verdict(
        scope="region", passed=True, reason=None, cases=1, seed=1, outputs=(), points=()
    )
    return Attempt(
        index=index,
        name=name,
        region=region,
        backend="torch",
        status=Status.KEPT,
        reason="decode gained 10.0 us; prefill got no slower",
        predicted_us=None,
        bound_us=None,
        knobs={},
        region_verdict=verdict,
        model_verdict=replace(verdict, scope="model"),
        latency=Latency(decode=paired(10.0), prefill=paired(0.0)),
        control=None,
        parent=None,
        seconds=1.0,
    )


def kept(folder: Path, model: str = killers.TOY) -> Ledger:
    """The run, in `folder`/run; its change files beside it."""
    ledger = killers.begun(folder / "run", model)
    lines = [json.loads(line) for line in ledger.path.read_text().splitlines()]
    lines[0]["data"]["proposer"] = "catalog"
    ledger.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for index, values in zip(INDICES, (FIRST, SECOND), strict=True):
        file = folder / f"{values['name']}.py"
        file.write_text(CHANGE.format(**values))
        ledger.append("attempt", attempt(index, str(file), str(values["region"])))
    return ledger


def session_on(
    ledger: Ledger, budget: Budget | None = None, workload: Workload | None = None
) -> Session:
    budget = budget or Budget(10.0)
    return Session(workload or toy(), ledger, "decode-bs1", budget, Progress(budget))


def found(ledger: Ledger) -> dict[tuple[int, str], OtherPairs]:
    return {(p.index, p.target): p for p in ledger.all(PAIRS, OtherPairs)}


def kinds(ledger: Ledger) -> Counter[str]:
    return Counter(event.kind for event in ledger.events())


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a fixture: short measurements."""
    shares = {"decode": (0.02, 0.02), "prefill": (0.02, 0.02)}
    monkeypatch.setattr(measure, "SHARES", shares)


@functools.cache
def toy() -> Workload:
    return Workload.load(killers.TOY, "toy", "cpu")
