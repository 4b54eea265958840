"""The process in which a change that passed `verify` is called once, or its kernels are compiled,
for a profile. It gives up its rights before it loads the change file.

`call CASE MODEL DEVICE` makes the call that is saved in CASE; on a card, between the marks that
`ncu --profile-from-start off` waits for. `compile FILE` prints what the kernels of the file's
`offline_cases()` take, a line of JSON each.
"""

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agents.claude.profile import PROFILED, TIMEOUT_S, run
from harness import confine, confined
from harness.process import FOLDERS, scrubbed
from harness.trees import map_tensors
from optimized.catalog import load_change
from optimized.change import apply_change
from reference import models

WARM_UP = 3  # calls before the one that counts: they compile, and fill caches
NO_CASES = (
    "it has no offline_cases(), so nothing is known of its kernels without a card; "
    "search optimized/ for one"
)
PROCESSES = 4096  # of this user, whose other processes count


def save(path: Path, node: nn.Module, args: tuple[Any, ...], **facts: str) -> None:
    """A case: one module with the arguments of one call, and by name what replaces it."""
    torch.save({"node": node, "args": args, **facts}, path)


def call(path: Path, model: str, device: str) -> None:
    on_card = device == "cuda"
    if on_card:
        torch.zeros(1, device="cuda")  # what profiles has its connection from here on
    models.load(model)  # the module's class is in there
    confined.give_up([path.parent])
    case = torch.load(path, weights_only=False)
    change = load_change(case["file"])
    box = nn.Module()
    box.node = case["node"]
    apply_change(box, change, case["backend"])
    with torch.no_grad():
        for _ in range(WARM_UP):
            box.node(*map_tensors(torch.clone, case["args"]))
        args = map_tensors(torch.clone, case["args"])
        if on_card:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        box.node(*args)
        if on_card:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def resources(file: str) -> str:
    """What the kernels of a change file take on each card, in words; compiled in a process of its
    own, which is confined."""
    if "offline_cases" not in Path(file).read_text():
        return NO_CASES
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        environment = scrubbed(folder)
        environment.pop("TRITON_INTERPRET", None)  # what is interpreted cannot be compiled
        for name in FOLDERS:
            Path(environment[name]).mkdir(parents=True, exist_ok=True)
        line = [*PROFILED, "compile", file, folder]
        code, out, err = run(line, TIMEOUT_S, environment)
    if code:
        last = (err.strip().splitlines() or ["it said nothing"])[-1]
        return f"its kernels could not be compiled (exit code {code}): {last}"
    rows = [json.loads(text) for text in out.splitlines() if text.startswith('{"kernel": ')]
    if not rows:
        return NO_CASES
    columns = "kernel | card | registers | spills | shared memory, B | warps | constants"
    return "\n".join(["compiled without a card:", columns, *map(shown, rows)])


def shown(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['kernel']} | {row['target']} | does not compile: {row['error']}"
    names = "kernel", "target", "registers", "spills", "shared_bytes", "warps", "constants"
    return " | ".join(str(row[name]) for name in names)


def compile_kernels(file: str, folder: str) -> None:
    from optimized import offline
    from optimized.triton_support import OfflineCase

    limits = confine.Limits(processes=PROCESSES)
    confine.restrict(folder, limits, [file], shm=False)
    load_change(file)
    module = sys.modules[f"change_file_{Path(file).stem}"]
    for given in getattr(module, "offline_cases", list)():
        case = OfflineCase(*given)
        constants = ", ".join(f"{name}={value}" for name, value in case.constexprs.items())
        for target in offline.TARGETS:
            row: dict[str, Any] = {"kernel": case.kernel.__name__, "target": target}
            row |= {"warps": case.num_warps, "constants": constants[:80]}
            try:
                found = offline.resources(
                    case.kernel, case.signature, case.constexprs, target, case.num_warps
                )
                row |= asdict(found)
            except offline.CompileError as error:
                row["error"] = " ".join(str(error).split())[:300]
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "call":
        call(Path(sys.argv[2]), *sys.argv[3:])
    else:
        compile_kernels(*sys.argv[2:])
