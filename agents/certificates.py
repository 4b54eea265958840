"""Certificates of a run: one for each kept change, in the ledger and in its bundle, prs/NN-slug."""

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from agents.grounds import ground_of, modules_of
from agents.history import History
from agents.stack import enabled, stood_on
from agents.workspace import Workspace, commit_files
from harness.certificate import NAME, ROOT, Certificate, folder_of
from harness.certify import certificate
from harness.ledger import Ledger
from harness.records import Attempt, Environment
from harness.workload import Workload
from reports.pr_bundle import Kept, bundles, kept_changes
from reports.pr_page import write
from reports.pr_record import COMMITTED, COMPILED, GROUND, Compiled, compiled
from reports.run import Run

EVENT = "certificate"
AT_ONCE = 8  # changes whose kernels are compiled at a time


def certify(
    ledger: Ledger,
    workload: Workload,
    timed: dict[str, str],
    layers_per_kind: int | None,
    *,
    generated: str | None,
) -> Path:
    """Certify the change that was kept last: into the ledger, then into its bundle.

    `timed` names the run's targets by "decode" and "prefill", `layers_per_kind` says how many
    layers judged the change at model level, `generated` is what a compiler made for it.
    """
    kept = History(ledger).kept
    return _certify(ledger, workload, timed, layers_per_kind, kept, generated)


def restore(
    ledger: Ledger, workload: Workload, timed: dict[str, str], layers_per_kind: int | None
) -> str | None:
    """Write what is missing of the bundles: from the ledger, where the same bytes come out, and
    the last certificate itself, if the run was killed before it was made.

    That one is made only from the files that the change was judged with; returns why another kept
    change has none, or None.
    """
    kept = History(ledger).kept
    certificates = ledger.all(EVENT, Certificate)
    for attempt in kept[: len(certificates)]:
        if not (folder_of(ledger.directory, attempt.index, attempt.name) / NAME).exists():
            write(ledger.directory, only=attempt.index)
    missing = kept[len(certificates) :]
    if not missing:
        return None
    there, here = _environment_of(ledger, missing[-1]), _environment_of(ledger, None)
    if len(missing) > 1 or there.git_commit != here.git_commit:
        names = ", ".join(attempt.name for attempt in missing)
        return f"not certified, since other files may have judged it: {names}"
    source = missing[0].generated_source
    text = None if source is None else (ledger.directory / source).read_text()
    _certify(ledger, workload, timed, layers_per_kind, kept, text)
    return None


def _environment_of(ledger: Ledger, attempt: Attempt | None) -> Environment:
    """In which `attempt` was made; None: the latest."""
    found: dict[str, Any] = {}
    for event in ledger.events():
        if event.kind in ("environment", "resumed"):
            found = event.data
        if attempt is not None and (event.kind, event.data.get("index")) == (
            "attempt",
            attempt.index,
        ):
            break
    return Environment.from_json(found)


def _certify(
    ledger: Ledger,
    workload: Workload,
    timed: dict[str, str],
    layers_per_kind: int | None,
    kept: Sequence[Attempt],
    generated: str | None,
) -> Path:
    *before, attempt = kept
    assert attempt.region_verdict is not None  # it has a latency, so it has a verdict
    environment, started = _environment_of(ledger, attempt), stood_on(ledger)
    made = certificate(
        workload,
        enabled(attempt),
        [*started, *(enabled(a) for a in before)],
        region_verdict=attempt.region_verdict,
        model_verdict=attempt.model_verdict,
        latency=attempt.latency,
        environment=environment,
        timed=timed,
        layers_per_kind=layers_per_kind,
        generated=generated,
    )
    ground = ground_of(attempt, made, [line.name for line in started])
    ledger.append(GROUND, ground)
    if ground.files and ground.commit is not None:
        bundle = bundles(Run.load(ledger.directory))[-1]
        ledger.append(COMMITTED, commit_files(ROOT, ledger.directory, bundle))
    ledger.append(EVENT, made)  # the last of them: with it, all are there
    write(ledger.directory, only=attempt.index)
    return folder_of(ledger.directory, attempt.index, attempt.name) / NAME


def compile_kept(ledger: Ledger) -> None:
    """What the kept changes' Triton kernels take on each target, for those of which it isn't known:
    into the ledger and the bundles. Compiles as many changes at once as there are processors, up to
    eight, so it comes after everything that is timed."""
    done = {c.index for c in ledger.all(COMPILED, Compiled)}
    left = [
        change
        for change in kept_changes(ledger)
        if change.attempt.backend == "triton"
        and change.certificate is not None
        and change.attempt.index not in done
    ]
    if not left:
        return
    with ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as pool:
        for found in pool.map(functools.partial(_compiled, ledger.directory, Lock()), left):
            ledger.append(COMPILED, found)
            write(ledger.directory, only=found.index)


def _compiled(run: Path, worktrees: Lock, change: Kept) -> Compiled:
    """With its files as they are in a commit of the run's repository, or as they are here."""
    assert change.certificate is not None
    modules = {*modules_of(change.certificate), *(Path(p).stem for p in change.ground.files)}
    commit = None if change.committed is None else change.committed.commit
    if commit is None:
        return compiled(change.attempt.index, modules)
    with worktrees, Workspace.open(ROOT, run).judged(commit) as tree:
        return compiled(change.attempt.index, modules, tree)
