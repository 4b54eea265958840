"""`python -m harness cheats` and `sandbox`."""

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence

import torch

from harness import cli, evidence
from harness.arguments import require_folder
from harness.cheats import Outcome, fixtures, run
from harness.command_bench import progress
from harness.errors import ExitCode, UserError
from harness.protections import Protection, describe, require
from harness.sandbox import Sandbox
from harness.workload import pick_device


def cheats(a: argparse.Namespace) -> int:
    found = fixtures()
    if a.only:
        known = {fixture.name for fixture in found}
        if unknown := set(a.only) - known:
            raise UserError(f"no cheat {sorted(unknown)[0]!r}; known: {', '.join(sorted(known))}")
        found = [fixture for fixture in found if fixture.name in a.only]
    require_folder(a.out)
    started = time.monotonic()
    outcomes, protections = run(found, a.device, a.seed, a.jobs, progress)
    seconds = time.monotonic() - started
    bad = [outcome for outcome in outcomes if outcome.bad]
    output = {
        "seed": a.seed,
        "cheats": [outcome.to_json() for outcome in outcomes],
        "protections": [protection.to_json() for protection in protections],
        "passed": not bad,
    }
    evidence.give(a, output, lambda: show(outcomes, protections, seconds), seconds)
    return ExitCode.FOUND if bad else ExitCode.DONE


def show(outcomes: Sequence[Outcome], protections: Sequence[Protection], seconds: float) -> None:
    rows = [(o.name, o.tries, o.outcome, o.how) for o in outcomes]
    cli.print_table("cheats", ("file", "tries", "outcome", "how"), rows, left=4)
    counts = Counter(o.outcome for o in outcomes)
    print(", ".join(f"{count} {word}" for word, count in counts.items()) + f"; {seconds:.0f} s")
    print(describe(protections))


def sandbox(a: argparse.Namespace) -> int:
    """What this machine gives, and how tensors are handed over on the device."""
    device = pick_device(a.device)
    with torch.no_grad():
        model = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16, device=device)
    with Sandbox(model.requires_grad_(False), device) as box:
        candidate = box.open(None)
        x = torch.randn(3, 64, dtype=torch.bfloat16, device=device)
        ours = model(x)
        theirs = candidate.model(x)
        same = bool(torch.equal(ours, theirs))
        mechanisms = candidate.process.mechanisms
        candidate.close()
        how = "a file in memory (memfd)"
        if device.type == "cuda":
            how = "CUDA IPC" if box.ipc else f"copies through {how}: {box.no_ipc}"
        rows = box.protections
    if a.json:
        output = {
            "protections": [row.to_json() for row in rows],
            "mechanisms": [m.to_json() for m in mechanisms],
            "hand_over": how,
            "same_result": same,
        }
        print(json.dumps(output, indent=2))
    else:
        cli.print_table(
            "protections",
            ("protection", "in force", "by", "absent"),
            (
                (
                    row.name,
                    "yes" if row.in_force else "NO",
                    ", ".join(row.by),
                    "; ".join(f"{name}: {why}" for name, why in row.absent.items()),
                )
                for row in rows
            ),
            left=4,
        )
        print(f"tensors are handed over by {how}; a call gives the same bits: {same}")
    if a.require_sandbox:
        require(rows)
    return ExitCode.DONE if same else ExitCode.FOUND


COMMANDS = {"cheats": cheats, "sandbox": sandbox}
