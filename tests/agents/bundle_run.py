"""A run with two kept changes from outside files, judged for real, their times made up: in the
folder named by the first argument, on the model file named by the second."""

import sys
from pathlib import Path

from agents.certificates import certify
from agents.stack import enabled
from harness.certify import judge_change
from harness.environment import environment
from harness.ledger import Ledger
from harness.records import SCHEMA, Attempt, Latency, Paired, Proposal, Status
from harness.selftest import regions
from harness.workload import Workload
from optimized.plan import Enabled

TIMED = {"decode": "decode-bs1", "prefill": "prefill-8x2048"}
KEPT = 2
CHANGE = '''"""The region as it is, {number}."""

from optimized.change import Change, Contract, Implementation

CHANGE = Change(
    name="again-{number}", region="{region}", summary="the same",
    contract=Contract(numerics="reduction"),
    implementations=(
        Implementation(backend="torch", devices=("cpu",), build=lambda node, _: node.forward),
    ),
)'''


def paired(base_us: float, gain_us: float) -> Paired:
    return Paired(
        base_us=base_us,
        candidate_us=base_us - gain_us,
        candidate_interval_us=(base_us - gain_us - 1, base_us - gain_us + 1),
        gain_us=gain_us,
        gain_interval_us=(gain_us - 2, gain_us + 2),
        mde_us=1.0,
        pairs=9,
    )


def main(folder: Path, model: str) -> tuple[Ledger, Workload]:
    workload = Workload.load(model, "toy", "cpu")
    ledger = Ledger.create(folder / "run")
    about = {"target": "decode-bs1", "model": model, "preset": "toy", "device": "cpu", "seed": 0}
    words = {kind: f"{kind} of {name}" for kind, name in TIMED.items()}
    ledger.append("run", {"schema": SCHEMA, **about, "proposer": "auto", "workload": words})
    ledger.append("environment", environment(workload.device))
    parents: list[Enabled] = []
    for index, region in enumerate(list(regions(workload.model))[:KEPT], start=3):
        file = folder / f"Again {index}.py"
        file.write_text(CHANGE.replace("{number}", str(index)).replace("{region}", region))
        line = Enabled(name=str(file), backend="torch")
        judged = judge_change(
            workload, line, parents, targets=tuple(TIMED.values()), region_seed=index
        )
        assert judged.region_verdict.passed, judged.region_verdict.reason
        proposal = Proposal(
            change=line.name,
            region=region,
            backend="torch",
            hypothesis="the same | again",
            launches_saved=3,
            bytes_saved=2_000_000,
            predicted_us=12.0,
            bound_us=20.0,
            node_count=1,
        )
        ledger.append("proposals", {"proposals": [proposal.to_json()]})
        attempt = Attempt(
            index=index,
            name=line.name,
            region=region,
            backend="torch",
            status=Status.KEPT,
            reason="decode gained 10.0 us",
            predicted_us=12.0,
            bound_us=20.0,
            knobs={"N=1": {"warps": index}},
            region_verdict=judged.region_verdict,
            model_verdict=None,
            latency=Latency(decode=paired(100.0, 10.0), prefill=paired(900.0, 5.0)),
            control=None,
            parent=None,
            seconds=1.0,
        )
        ledger.append("attempt", attempt)
        certify(ledger, workload, TIMED, None, generated=None)
        parents.append(enabled(attempt))
    return ledger, workload


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
