"""`python -m harness certify FILE`: is what a certificate says still so?"""

import argparse
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from harness import memcheck
from harness.bench import Step, compare, default_mode, smallest_effect
from harness.certificate import Certificate, changed_hashes, differences, taken_in
from harness.certify import Judged, enabled_of, hashes_of, judge_change, promise
from harness.command_bench import interval, progress
from harness.environment import environment
from harness.errors import ExitCode
from harness.policy import Policy
from harness.records import Latency, Paired, Verdict
from harness.workload import Workload

# Bits may differ where one of these does; then only the outcome is compared.
KIND = "device", "device_name", "cpu_threads", "torch", "triton"
SHOWN = 12  # differences that are printed of each part


def certify(a: argparse.Namespace) -> int:
    """Judge again what the certificate certifies; exit code 1 if anything differs."""
    path = Path(a.file)
    there = taken_in(Certificate.load(path))
    device = there.environment.device if a.device == "auto" and _has(there) else a.device
    workload = Workload.load(there.model, there.preset, device, there.seed)
    workload.policy = Policy.allowing(there.allows)
    if there.change.backend == "triton" and workload.device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the change's file is imported
    enabled = enabled_of(there.change)
    found = changed_hashes(there.hashes, hashes_of(enabled.name, workload, None))
    found = [text for text in found if not text.startswith("kernel: generated")]
    say(a, "hashes", found)
    here = environment(workload.device)
    other = [
        f"{name} {getattr(there.environment, name)}, here {getattr(here, name)}"
        for name in KIND
        if getattr(there.environment, name) != getattr(here, name)
    ]
    if other:
        progress(f"made elsewhere, so only the outcome is compared: {'; '.join(other)}")
    progress(f"judging {there.change.name} ({there.change.backend}) again")
    judged = judge_change(
        workload,
        enabled,
        [enabled_of(parent) for parent in there.parents],
        targets=there.region_verdict.targets,
        region_seed=there.region_seed,
        model_seed=there.model_seed,
        layers_per_kind=there.layers_per_kind,
    )
    parts = {"hashes": found, **compared(there, judged, workload, exact=not other)}
    latency = timed(workload, judged, there.timed, a.seconds) if a.time else None
    if latency is not None and there.latency is not None:
        parts["latency"] = [] if other else apart(there.latency, latency)
    for name, texts in parts.items():
        if name != "hashes":
            say(a, name, texts)
    if latency is not None and not a.json:
        print_gains(there.latency, latency)
    differ = [f"{name}: {texts[0]}" for name, texts in parts.items() if texts]
    if a.json:
        report = {"reproduced": not differ, "differences": parts, "other": other}
        report["latency"] = None if latency is None else latency.to_json()
        print(json.dumps(report, indent=2))
    else:
        print(f"differs: {'; '.join(differ)}" if differ else "reproduced")
    return ExitCode.FOUND if differ else ExitCode.DONE


def compared(
    there: Certificate, judged: Judged, workload: Workload, *, exact: bool
) -> dict[str, list[str]]:
    """By part, where what was judged now differs: all fields if `exact`, else the outcomes."""
    found: dict[str, list[str]] = {}
    change = judged.change
    promised = differences(asdict(there.contract), asdict(promise(change)))
    if there.region != change.region:
        promised.insert(0, f"region: {there.region!r}, here {change.region!r}")
    found["contract"] = promised
    pairs = {
        "region verdict": (there.region_verdict, judged.region_verdict),
        "model verdict": (there.model_verdict, judged.model_verdict),
    }
    for name, (old, new) in pairs.items():
        a, b = (None if v is None else _plain(v) for v in (old, new))
        if not exact:
            a, b = ({"passed": v["passed"]} if v is not None else None for v in (a, b))
        if a is None or b is None:
            found[name] = [] if a is b else ["absent there" if a is None else "absent here"]
        else:
            found[name] = differences(a, b)
    if exact:
        again = hashes_of(there.change.name, workload, judged.generated)
        texts = changed_hashes(there.hashes, again)
        found["generated source"] = [t for t in texts if t.startswith("kernel: generated")]
    return found


def _plain(verdict: Verdict) -> dict[str, Any]:
    """As JSON, without what another program said when the change was kept."""
    notes = tuple(n for n in verdict.notes if not n.startswith(memcheck.PROGRAM))
    return json.loads(json.dumps(replace(verdict, notes=notes).to_json()))


def timed(workload: Workload, judged: Judged, names: dict[str, str], seconds: float) -> Latency:
    """The model with the change against the one without it, on the certificate's targets."""

    def paired(kind: str) -> Paired:
        target = workload.target(names[kind])
        progress(f"timing {target.describe()}")
        inputs = workload.inputs(target, seed=workload.seed)
        mode = default_mode(workload.device) if kind == "decode" else "eager"
        models: tuple[nn.Module, nn.Module] = judged.base, judged.candidate
        with Step(models[0], inputs, mode) as base, Step(models[1], inputs, mode) as changed:
            effect = smallest_effect(base, budget_s=seconds)
            return compare(base, changed, effect, budget_s=seconds)

    return Latency(decode=paired("decode"), prefill=paired("prefill"))


def apart(there: Latency, here: Latency) -> list[str]:
    """Which gains have intervals that do not overlap."""
    found = []
    for kind in ("decode", "prefill"):
        a, b = (getattr(latency, kind).gain_interval_us for latency in (there, here))
        if a[1] < b[0] or b[1] < a[0]:
            found.append(f"{kind}.gain_interval_us: {interval(a)}, here {interval(b)}")
    return found


def print_gains(there: Latency | None, here: Latency) -> None:
    for kind in ("decode", "prefill"):
        new: Paired = getattr(here, kind)
        old: Paired | None = getattr(there, kind) if there is not None else None
        said = "not timed" if old is None else f"{old.gain_us:.1f} {interval(old.gain_interval_us)}"
        print(
            f"{kind} gain, us: {said} there, "
            f"{new.gain_us:.1f} {interval(new.gain_interval_us)} here"
        )


def say(a: argparse.Namespace, name: str, texts: list[str]) -> None:
    if a.json:
        return
    print(f"{name}: {'as certified' if not texts else f'{len(texts)} difference(s)'}")
    for text in texts[:SHOWN]:
        print(f"  {text}")
    if len(texts) > SHOWN:
        print(f"  and {len(texts) - SHOWN} more")


def _has(there: Certificate) -> bool:
    """Whether this machine has the kind of device that the certificate was made on."""
    import torch

    return there.environment.device == "cpu" or torch.cuda.is_available()


COMMANDS = {"certify": certify}
