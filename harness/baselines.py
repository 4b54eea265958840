"""The unchanged reference, run in each of the ways that a user has without writing a kernel.

eager: plain PyTorch. graph: the same in one CUDA graph. compile: torch.compile by layer kind, then,
on CUDA, one graph around the whole. No gain is quoted against eager alone.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from harness.assembler import torchs_assembler
from harness.bench import time_step
from harness.errors import UserError
from harness.layer_compile import LayerCompiler
from harness.records import Baseline, Timing
from harness.step import Mode, Step, default_mode
from harness.workload import StepInputs, Workload
from optimized.change import share

NAMES = "eager", "graph", "compile"
# The share of the budget that timing (not building) each of the two may take, and its seconds.
TIMING_SHARE = 0.05
TIMING_AT_MOST_S = {"decode": 3.0, "prefill": 6.0}
# Max-autotune times its matrix products on a GPU; on a CPU it takes minutes for next to nothing.
COMPILE_MODE = {"cuda": "max-autotune-no-cudagraphs", "cpu": "default"}
# How many times as long as a decode a prefill takes to compile: 1.4 and 1.7 on an H200 (Beam's TP8
# rank), where its products are searched for; 0.80 to 0.85 on two cores (both mini presets).
PREFILL_COMPILE_FACTOR = {"cuda": 1.8, "cpu": 0.9}  # measured 2026-12-01
UNTUNED_SHARE = 0.4


def run_baselines(
    workload: Workload,
    decode: StepInputs,
    prefill: StepInputs,
    *,
    budget_s: float = 600.0,
    only: str | None = None,
) -> Iterator[Baseline]:
    """Each baseline, or `only` the one of that name, as soon as it is measured.

    `budget_s` seconds are for all that are asked for. What does not fit in them, in the memory or
    on the device is absent, with the reason in the record.
    """
    if only is not None and only not in NAMES:
        raise UserError(f"unknown baseline {only!r}; choose one of {', '.join(NAMES)}")
    names = NAMES if only is None else (only,)
    inputs = {"decode": decode, "prefill": prefill}
    for name in names:
        yield BASELINES[name](workload, inputs, budget_s / len(names))


def eager(workload: Workload, inputs: dict[str, StepInputs], budget_s: float) -> Baseline:
    decode, prefill = (
        timed(workload.model, inputs[kind], "eager", kind, budget_s)
        for kind in ("decode", "prefill")
    )
    return Baseline(name="eager", decode=decode, prefill=prefill, absent=None)


def graph(workload: Workload, inputs: dict[str, StepInputs], budget_s: float) -> Baseline:
    """A prefill whose temporary tensors do not fit in a graph's pool beside the weights is absent:
    it is bound by its arithmetic, so that a graph would gain it little."""
    if workload.device.type != "cuda":
        return Baseline(name="graph", decode=None, prefill=None, absent="a CPU has no CUDA graphs")
    decode = timed(workload.model, inputs["decode"], "graph", "decode", budget_s)
    prefill, note = None, None
    try:
        prefill = timed(workload.model, inputs["prefill"], "graph", "prefill", budget_s)
    except UserError as error:
        note = f"no prefill: {error}"
    return Baseline(name="graph", decode=decode, prefill=prefill, absent=None, note=note)


def compiled(workload: Workload, inputs: dict[str, StepInputs], budget_s: float) -> Baseline:
    device = workload.device
    if device.type == "cpu" and (missing := missing_compiler()) is not None:
        return Baseline(name="compile", decode=None, prefill=None, absent=missing)
    started = time.perf_counter()
    mode = COMPILE_MODE[device.type]
    model, decode_s, kinds = compile_layers(workload, mode, inputs["decode"])
    decode = timed(model, inputs["decode"], default_mode(device), "decode", budget_s)
    left_s = budget_s - (time.perf_counter() - started)
    # Searching for the fastest matrix products is what takes long; without it, one more try.
    expected_s = PREFILL_COMPILE_FACTOR[device.type] * decode_s
    tries = {mode: expected_s}
    tries.setdefault("default", expected_s * UNTUNED_SHARE)
    chosen = next((m for m, seconds in tries.items() if seconds <= left_s), None)
    if chosen is None:
        prefill = None
        outcome = (
            f"no prefill: it takes about {min(tries.values()):.0f} s to compile, and of the budget "
            f"of {budget_s:.0f} s {max(0.0, left_s):.0f} s are left"
        )
    else:
        model, prefill_s, _ = compile_layers(workload, chosen, inputs["prefill"])
        prefill = timed(model, inputs["prefill"], "eager", "prefill", budget_s)
        outcome = f"prefill, mode {chosen!r}, in {prefill_s:.0f} s"
    note = (
        f"layers compiled as {kinds} kind(s): decode, mode {mode!r}, in {decode_s:.0f} s; "
        f"{outcome}; what is outside the layers (embedding, final norm, head) runs as in eager"
    )
    return Baseline(name="compile", decode=decode, prefill=prefill, absent=None, note=note)


def compile_layers(
    workload: Workload, mode: str, inputs: StepInputs
) -> tuple[nn.Module, float, int]:
    """The model with its layers compiled for `inputs`, the seconds that took, and how many kinds of
    layer there are."""
    started = time.perf_counter()
    model = share(workload.model)
    layers = LayerCompiler(model, mode=mode)
    # Each kind of layer has a function of its own; the limit is for floats that stay constants.
    limit = torch._dynamo.config.patch(recompile_limit=max(8, len(layers.layers)))
    with limit, torchs_assembler(), torch.no_grad():
        model(*inputs.args)
    return model, time.perf_counter() - started, layers.kinds


BASELINES: dict[str, Callable[[Workload, dict[str, StepInputs], float], Baseline]] = {
    "eager": eager,
    "graph": graph,
    "compile": compiled,
}


def timed(
    model: nn.Module | Callable[..., Any],
    inputs: StepInputs,
    mode: Mode,
    kind: str,
    budget_s: float,
) -> Timing:
    seconds = min(TIMING_SHARE * budget_s, TIMING_AT_MOST_S[kind])
    with Step(model, inputs, mode) as step:
        return time_step(step, budget_s=seconds)


def missing_compiler() -> str | None:
    """Why torch.compile cannot work on this CPU, or None: it needs a C++ compiler."""
    named = os.environ.get("CXX")
    for compiler in (named,) if named else ("g++", "clang++"):
        if shutil.which(compiler):
            return None
    return (
        f"no C++ compiler ({named or 'g++ or clang++'}) on this machine; install one (Debian: "
        "apt-get install g++), or name it in CXX"
    )
