"""A run's kept changes as patches that stack in order, and the folders they are written to.

A patch enables its change in the plan that the repository keeps for this model and device, brings
the evidence, and the kernel's files where the commit lacks them. All of it comes from the ledger.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.certificate import NAME, STANDS_ON, Applied, Certificate, folder_of
from harness.errors import UserError
from harness.ledger import Ledger
from harness.records import SCHEMA, Attempt, Environment, Proposal, Status, Verdict
from optimized import plan_text
from reports import text
from reports.files import write_text
from reports.pr_patch import difference, patch
from reports.pr_record import COMMITTED, COMPILED, GROUND, Committed, Compiled, Ground
from reports.run import Run

PATCH = "change.patch"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """All that the ledger holds of one kept change; None where an older ledger lacks it."""

    attempt: Attempt
    time_s: float  # Unix time of the decision
    environment: Environment
    ground: Ground
    certificate: Certificate | None
    compiled: Compiled | None
    committed: Committed | None = None  # None as well where the commit had all its files
    compiled_later: bool = False  # of files that may not be those that were judged

    @property
    def name(self) -> str:
        return self.ground.name

    @property
    def line(self) -> Applied:
        """The line of the plan."""
        a = self.attempt
        domain = a.region_verdict.domain if a.region_verdict else None
        return Applied(name=self.name, backend=a.backend, knobs=a.knobs, domain=domain)


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """One change's patch on those before it; `obstacle` says why there is none."""

    kept: Kept
    parents: tuple[str, ...]  # what the change stands on
    subject: str
    body: str  # of the commit: device, before, after, interval
    patch: str | None
    obstacle: str | None
    plan: str  # the plan's path in the repository
    evidence: str  # its own, likewise
    files: dict[str, str]  # the texts that stand in the repository once the patch is in

    @property
    def index(self) -> int:
        return self.kept.attempt.index

    def folder(self, run: Path) -> Path:
        return folder_of(run, self.index, self.kept.attempt.name)


def kept_changes(ledger: Ledger) -> list[Kept]:
    """In the order in which they were kept."""
    environment: Environment | None = None
    found: list[tuple[Attempt, float, Environment]] = []
    for event in ledger.events():
        if event.kind in ("environment", "resumed"):
            environment = Environment.from_json(event.data)
        elif event.kind == "attempt" and event.data["status"] == Status.KEPT:
            if environment is None:
                raise UserError(f"{ledger.path} does not say where its changes were timed")
            found.append((Attempt.from_json(event.data), event.time_s, environment))
    grounds = {g.index: g for g in ledger.all(GROUND, Ground)}
    compiled = {c.index: c for c in ledger.all(COMPILED, Compiled)}
    committed = {c.index: c for c in ledger.all(COMMITTED, Committed)}
    certificates: dict[tuple[str, int | None], Certificate] = {
        (made.change.name, made.region_seed): made
        for made in ledger.all("certificate", Certificate)
    }
    return [
        Kept(
            attempt=attempt,
            time_s=time_s,
            environment=there,
            ground=grounds.get(attempt.index) or _unrecorded(attempt, there),
            certificate=certificates.get((attempt.name, _seed(attempt))),
            compiled=compiled.get(attempt.index),
            committed=committed.get(attempt.index),
        )
        for attempt, time_s, there in found
    ]


def _seed(attempt: Attempt) -> int | None:
    return attempt.region_verdict.seed if attempt.region_verdict else None


def _unrecorded(attempt: Attempt, there: Environment) -> Ground:
    """What an older ledger tells: the commit had all files, or nobody knows."""
    outside = attempt.name.endswith(".py")
    dirty = (there.git_commit or "").endswith("+dirty")
    return Ground(
        index=attempt.index,
        commit=commit_of(there),
        name=attempt.name,
        before={},
        files={},
        others=("the ledger does not tell which",) if dirty else (),
        obstacle="the ledger lacks the change file's text" if outside else None,
    )


def commit_of(there: Environment) -> str | None:
    return None if there.git_commit is None else there.git_commit.removesuffix("+dirty")


def bundles(run: Run) -> list[Bundle]:
    """One for each kept change of `run`, from its ledger alone."""
    ledger = Ledger.open(run.directory)
    names = tuple(line["name"] for line in (ledger.last("run") or {}).get(STANDS_ON, []))
    return list(_stacked(run, names, kept_changes(ledger)))


def _stacked(run: Run, begun: tuple[str, ...], kept: list[Kept]) -> Iterator[Bundle]:
    tree: dict[str, str] = {}
    missing = ""
    for number, change in enumerate(kept):
        model, device = run.header.model, change.environment.device_name
        plan = plan_text.place(model, device)
        slug = folder_of(Path(), change.attempt.index, change.attempt.name).name
        bundle = Bundle(
            kept=change,
            parents=(*begun, *(k.name for k in kept[:number])),
            subject=_subject(run, change),
            body="",
            patch=None,
            obstacle=change.ground.obstacle or missing or None,
            plan=plan,
            evidence=f"{plan.removesuffix('.toml')}/{slug}.json",
            files={},
        )
        bundle = replace(bundle, body=_body(run, bundle))
        if bundle.obstacle is None:
            before = {**change.ground.before, **tree}
            label = Path(model).name if model.endswith(".py") else model
            lines = before.get(plan) or plan_text.header_text(label, device)
            evidence = json.dumps(_evidence(run, bundle), indent=1) + "\n"
            tree = {
                **before,
                **change.ground.files,
                plan: lines + plan_text.line_text(change.line),
                bundle.evidence: evidence,
            }
            made = patch(
                before,
                tree,
                subject=bundle.subject,
                body=bundle.body,
                time_s=change.time_s,
            )
            bundle = replace(bundle, patch=made, files=tree)
        else:
            missing = missing or f"it stands on {change.name}, which has no patch"
        yield bundle


def proposal_of(run: Run, attempt: Attempt) -> Proposal | None:
    """What was proposed, from the latest ranking that has it."""
    for ranking in reversed(run.rankings):
        for proposal in ranking:
            if (proposal.change, proposal.backend) == (attempt.name, attempt.backend):
                return proposal
    return None


def _subject(run: Run, change: Kept) -> str:
    latency, kind = change.attempt.latency, run.header.kind
    assert latency is not None  # it was kept
    pair = getattr(latency, kind)
    path = _ascii(text.path(pair.base_us, pair.candidate_us))
    return f"perf({change.name}): {kind} {path} on {change.environment.device_name}"


def _body(run: Run, bundle: Bundle) -> str:
    change, here = bundle.kept, bundle.kept.environment
    attempt, latency = change.attempt, change.attempt.latency
    assert latency is not None
    words = [f"{run.hypothesis(attempt) or f'{change.name} ({attempt.backend})'}."]
    on = f"the model with {', '.join(bundle.parents)}" if bundle.parents else "the unchanged model"
    words.append(
        f"Judged against the reference at its rounding points: "
        f"{'; '.join(_outcome(v) for v in _verdicts(attempt))}. "
        f"Timed in interleaved pairs with {on}."
    )
    rows = [f"  device   {here.device_name}, torch {here.torch}, Triton {here.triton}"]
    for kind in ("decode", "prefill"):
        pair = getattr(latency, kind)
        rows += [
            f"  {kind}  {run.header.workload.get(kind, '')}",
            f"    before {text.time(pair.base_us)}, after {text.time(pair.candidate_us)}",
            f"    gain {text.estimate(pair.gain_us, pair.gain_interval_us)} "
            f"(95%), {pair.pairs} pairs",
        ]
    rows.append(f"  evidence {bundle.evidence}")
    return _ascii("\n\n".join([*words, "\n".join(row.rstrip() for row in rows)]))


def _verdicts(attempt: Attempt) -> list[Verdict]:
    return [v for v in (attempt.region_verdict, attempt.model_verdict) if v is not None]


def _outcome(verdict: Verdict) -> str:
    return f"{verdict.scope} {'passed' if verdict.passed else 'failed'}, {verdict.cases} cases"


def _ascii(words: str) -> str:
    return words.replace("→", "to").replace("µ", "u").replace(text.MINUS, "-")


def _evidence(run: Run, bundle: Bundle) -> dict[str, Any]:
    """The change's own figures, small enough to be read in a diff."""
    change, attempt = bundle.kept, bundle.kept.attempt
    here, certificate = change.environment, bundle.kept.certificate
    latency = attempt.latency
    assert latency is not None
    digest = None
    if certificate is not None:
        digest = hashlib.sha256(certificate.text().encode()).hexdigest()
    return {
        "schema": SCHEMA,
        "change": change.name,
        "backend": attempt.backend,
        "region": attempt.region,
        "stands_on": list(bundle.parents),
        "preset": run.header.preset,
        "device": here.device_name,
        "torch": here.torch,
        "triton": here.triton,
        "commit": change.ground.commit,
        "timed": run.header.workload,
        "latency": latency.to_json(),
        "predicted_us": attempt.predicted_us,
        "contract": None if certificate is None else certificate.contract.to_json(),
        "verdicts": {v.scope: _figures(v) for v in _verdicts(attempt)},
        "certificate_sha256": digest,
    }


def _figures(verdict: Verdict) -> dict[str, Any]:
    worst = max(verdict.outputs, key=lambda o: 1 - o.bit_equal_share, default=None)
    figures: dict[str, Any] = {"passed": verdict.passed, "cases": verdict.cases}
    figures |= {"seed": verdict.seed, "outputs": len(verdict.outputs)}
    if worst is not None:
        figures["most_differing"] = {
            "output": worst.output,
            "differing_share": 1 - worst.bit_equal_share,
            "noise_share": worst.noise_share,
            "allowed_share": worst.allowed_share,
        }
    return figures


def write_bundle(run: Run, bundle: Bundle, page: str, out: Path) -> Path:
    """Write the bundle to its folder under `out`; UserError if the patch there is not the one that
    the ledger gives. The page is written anew."""
    folder = bundle.folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PATCH
    if bundle.patch is not None:
        there = path.read_bytes().decode(errors="replace") if path.exists() else bundle.patch
        if there != bundle.patch:
            raise UserError(
                f"{path} is not the patch that the ledger gives, from "
                f"{difference(there, bundle.patch)} on: edited, or of another version; "
                "move it away and run this again"
            )
        write_text(path, bundle.patch)
    if bundle.kept.certificate is not None and not (folder / NAME).exists():
        bundle.kept.certificate.save(folder)
    write_text(folder / "PR.md", page)
    return folder
