"""Changes that are right until they are timed, and then end the run's process, each in its way.

Run as a program, it is `python -m agents.run` with a proposer "killers" that proposes those that
the variable KILLERS names, in order. PyTorch is imported before the run's processes are forked, and
measurements are short, so that lives are short.
"""

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import agents.loop  # noqa: F401
from agents import measure, run
from agents.proposers.auto import PROPOSERS
from agents.proposers.base import Context, Suggestion, suggest
from harness import cli
from harness.environment import environment
from harness.ledger import Ledger
from harness.records import SCHEMA, Attempt, Baseline, Ceilings, Status
from harness.workload import Workload
from optimized.change import Change, Contract, Implementation
from traces.opportunities import Opportunity

TOY = str(Path(__file__).with_name("toy_model.py"))
REGION = "scaled_norm"
OPPORTUNITY = Opportunity(
    region=REGION,
    node_count=3,
    launches=30,
    launches_saved=27,
    bytes_saved=0,
    time_us=100.0,
    gap_us=0.0,
    floor_us=10.0,
    predicted_us=50.0,
    bound_us=90.0,
    contains=(),
    inside=("block",),
)


def segfaults() -> None:
    ctypes.string_at(0)


def hangs() -> None:
    time.sleep(3600)


def leaves() -> None:
    sys.exit(0)


def forks() -> None:
    while True:
        os.fork()


def breaks_the_card() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def slow() -> None:
    time.sleep(0.001)  # right, and refused for sure: a kept change would be in the others' way


KILLERS: dict[str, Callable[[], None]] = {
    f.__name__: f for f in (segfaults, hangs, leaves, forks, breaks_the_card, slow)
}


def change(name: str) -> Change:
    def build(node: nn.Module, _knobs: None) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:  # [..., D] bf16 -> [..., D]
            if not gc.isenabled():  # as while steps are timed
                KILLERS[name]()
            return type(node).forward(node, x)

        return forward

    implementation = Implementation(backend="torch", devices=("cpu",), build=build)
    return Change(
        name=name,
        region=REGION,
        summary=f"{name} when it is timed",
        contract=Contract(numerics="exact"),
        implementations=(implementation,),
    )


class Killers:
    name = "killers"

    def propose(self, context: Context) -> list[Suggestion]:
        tried = {t.change for t in context.tried}
        left = [n for n in os.environ["KILLERS"].split(",") if n and n not in tried]
        return [suggest(OPPORTUNITY, change(n), "torch", "nobody looks") for n in left]


def begun(directory: Path, model: str = TOY) -> Ledger:
    """A run of the toy model as it stands when its first change is due."""
    ledger = Ledger.create(directory)
    run_data: dict[str, Any] = {
        "schema": SCHEMA,
        "target": "decode-bs1",
        "model": model,
        "preset": "toy",
        "device": "cpu",
        "proposer": "killers",
        "seed": 0,
        "options": {},
        "workload": {},
    }
    ledger.append("run", run_data)
    ledger.append("environment", environment(torch.device("cpu")))
    ledger.append("self_test", {"passed": True})
    for name in ("eager", "graph", "compile"):
        ledger.append("baseline", Baseline(name=name, decode=None, prefill=None, absent="test"))
    ledger.append("effect", {"decode_us": 20.0, "prefill_us": 200.0})
    ceilings = Ceilings(
        device_name="test",
        read_gb_per_s=10.0,
        copy_gb_per_s=10.0,
        bf16_tflop_per_s=0.1,
        fp32_tflop_per_s=0.1,
        launch_us=5.0,
    )
    ledger.append("ceilings", ceilings)
    ledger.append("opportunities", {"opportunities": [OPPORTUNITY.to_json()]})
    for index, control in enumerate(("identity", "slowed"), start=1):
        attempt = Attempt(
            index=index,
            name=f"control:{control}",
            region=REGION,
            backend="torch",
            status=Status.REJECTED,
            reason="test",
            predicted_us=None,
            bound_us=None,
            knobs={},
            region_verdict=None,
            model_verdict=None,
            latency=None,
            control=control,
            parent=None,
            seconds=1.0,
        )
        ledger.append("attempt", attempt)
    return ledger


if __name__ == "__main__":
    PROPOSERS["killers"] = Killers  # type: ignore[assignment]
    measure.SHARES.update(decode=(0.02, 0.2), prefill=(0.02, 0.2))
    Workload.load(TOY, "toy", "cpu", 0)  # each life would import what this does
    sys.exit(cli.run(run.supervised))
