"""A model as one source tree builds it, in a process of its own: its bits, and its times on demand.

    PYTHONPATH=TREE python -P harness/rig.py

reads one JSON line an order from stdin and answers each with one on stdout. The first order is
`{"model", "preset", "device", "seed", "target", "plan"}`, the others are `{"points": true}` and
`{"take": KIND, "count": N}`. This file alone is today's: all that it imports is the tree's own, so
that an older commit can be set beside the current one, step by step in turns.
"""

import contextlib
import ctypes
import gc
import itertools
import json
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.clock import Clock
from harness.environment import environment
from harness.replay import Plan as Replay
from harness.replay import replay
from harness.step import Step, default_mode
from harness.steps import steps
from harness.trees import leaves
from harness.workload import Workload
from optimized.change import share
from optimized.plan import Plan

DEFAULTS = {"decode": "decode-bs1", "prefill": "prefill-8x2048"}
# Odd constants that spread the number of a place over 64 bits (as splitmix64 does).
MIX, MORE = 0x9E3779B97F4A7C15 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
ASK, FIXED = 0xFFFFFFFF, 0x0040000  # of personality(2): which is in force; ADDR_NO_RANDOMIZE
PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Rig:
    """The reference and the same with a plan's changes; steps are made when first timed."""

    workload: Workload
    target: str
    result: nn.Module
    clock: Clock
    made: dict[str, Step] = field(default_factory=dict)

    @classmethod
    def build(cls, order: dict[str, Any]) -> "Rig":
        names = (order[name] for name in ("model", "preset", "device", "seed"))
        workload = Workload.load(*names)
        result = share(workload.model)
        if order["plan"] is not None:
            Plan.load(Path(order["plan"])).apply(result)
        if workload.device.type == "cpu" and torch.get_num_threads() == 1:
            # All rigs on one core: only one of them runs at a time, and none has a busier one.
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        clock = Clock(workload.device)
        return cls(workload=workload, target=order["target"], result=result, clock=clock)

    def take(self, kind: str, count: int) -> list[float]:
        """Microseconds of `count` runs of the step, after an untimed one."""
        if kind not in self.made:
            chosen = self.workload.target(self.target)
            target = chosen if chosen.kind == kind else self.workload.target(DEFAULTS[kind])
            inputs = self.workload.inputs(target, seed=self.workload.seed)
            mode = default_mode(self.workload.device) if kind == "decode" else "eager"
            self.made[kind] = Step(self.result, inputs, mode)
            gc.collect()
        step = self.made[kind]
        step()
        return self.clock.take([step] * count)

    def points(self) -> dict[str, Any]:
        """A fingerprint of every rounding point of the reference's decode and of everything that
        modules of the result give in a prefill and a decode. What differs when it is done again is
        listed as unstable."""
        first, second = (dict(self._points()) for _ in range(2))
        unstable = [name for name, mark in first.items() if second.get(name) != mark]
        return {"points": first, "unstable": unstable}

    def _points(self) -> Iterator[tuple[str, str]]:
        seed, reference = self.workload.seed, self.workload.model
        for label, inputs in itertools.islice(steps(self.workload, seed, sizes=False), 2):
            if inputs.ids.shape[1] == 1:
                named = Replay(carry=None, name=True, record=True)
                run = replay(reference, inputs.args, named)
                for point, value in zip(run.points, run.values, strict=True):
                    yield f"reference, {label}: {point.name}", mark(value)
            with _watched(self.result) as found, torch.no_grad():
                result = self.result(*inputs.args)
                found += [("", path, mark(t)) for path, t in leaves(result)]
            yield from _numbered(f"result, {label}: ", found)
            with torch.no_grad():
                reference(*inputs.args)  # the cache that the next step continues is the reference's


@contextlib.contextmanager
def _watched(model: nn.Module) -> Iterator[list[tuple[str, str, str]]]:
    """Fingerprints of what the modules return, as (module, path, mark), in the order returned."""
    found: list[tuple[str, str, str]] = []
    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                handle = module.register_forward_hook(
                    lambda _, __, out, name=name: found.extend(
                        (name, path, mark(t)) for path, t in leaves(out)
                    )
                )
                stack.callback(handle.remove)
        yield found


def _numbered(head: str, found: list[tuple[str, str, str]]) -> Iterator[tuple[str, str]]:
    """Names made unique: a module that is called again gets #2."""
    seen: dict[str, int] = {}
    for module, path, value in found:
        name = f"{head}{module or 'the output'}{path}"
        seen[name] = seen.get(name, 0) + 1
        yield (name if seen[name] == 1 else f"{name} #{seen[name]}"), value


def mark(tensor: Tensor) -> str:
    """A fingerprint of dtype, shape and every bit in its place, computed where the tensor is."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.detach().contiguous().flatten()
    bits = (
        flat.to(torch.uint8)
        if flat.dtype == torch.bool
        else flat.view(PATTERNS[flat.element_size()])
    )
    places = torch.arange(1, len(flat) + 1, device=flat.device, dtype=torch.int64) * MIX
    weights = (places ^ (places >> 31)) * MORE | 1
    total = int(((bits.to(torch.int64) + 1) * weights).sum()) & (1 << 64) - 1
    return f"{total:016x} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def serve(orders: Iterator[str], answer: Any) -> None:
    """Answer orders until there are no more; the first that fails is answered and ends it."""
    rig: Rig | None = None
    for line in orders:
        order = json.loads(line)
        try:
            if rig is None:
                rig = Rig.build(order)
                said = {"environment": environment(rig.workload.device).to_json()}
            elif "take" in order:
                said = {"us": rig.take(order["take"], order["count"])}
            else:
                said = rig.points()
        except Exception as error:  # noqa: BLE001  the answer, whatever it is
            traceback.print_exc()
            said = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print(json.dumps(said), file=answer, flush=True)
        if "error" in said:
            return


def unrandomised() -> None:
    """Start again with addresses that are not drawn anew in each process, where Linux lets us.

    Builds of one program differ for good by where their data lies: decode steps of 0.9 ms by up to
    6%, with fixed addresses and a fixed hash seed by up to 3.2% (two shared cores,
    2026-11-30).
    """
    libc = ctypes.CDLL(None)
    persona = libc.personality(ASK)
    if persona & FIXED or libc.personality(persona | FIXED) == -1:
        return  # as wanted, or forbidden (-1 has that bit, too)
    os.execv(sys.executable, sys.orig_argv)


if __name__ == "__main__":
    if sys.platform == "linux":
        unrandomised()
    gc.disable()  # a collection takes longer than a step
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    serve(iter(sys.stdin), answers)
