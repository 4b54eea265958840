"""PR.md: what a reviewer needs to decide on one kept change."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.certificate import ROOT, Certificate, imported
from harness.records import Paired, PointReport, Timing
from reports import drift, figures, spending, text
from reports.other_targets import Row
from reports.pr_bundle import Bundle, Kept, bundles, proposal_of, write_bundle
from reports.pr_record import Compiled, Kernel, compiled
from reports.render import environment
from reports.run import Run

KINDS = "decode", "prefill"


def page(run: Run, bundle: Bundle) -> str:
    """The page as Markdown, for a reader who has the repository and nothing of the run."""
    kept = bundle.kept
    region = kept.attempt.region_verdict
    template = environment(autoescape=False).get_template("pr.md.j2")
    return template.render(
        run=run,
        bundle=bundle,
        kept=kept,
        attempt=kept.attempt,
        here=kept.environment,
        proposal=proposal_of(run, kept.attempt),
        hypothesis=run.hypothesis(kept.attempt),
        kinds=KINDS,
        reason=figures.reason(run, kept.attempt),
        rows=step_rows(run, kept.attempt.latency),
        others=run.others.rows(kept.attempt.index),
        slower=slower,
        whole=whole_rows(run),
        promise=(promised := promise(kept.certificate, region.points if region else ())),
        roundings=roundings(promised),
        verdicts=figures.verdicts(kept.attempt),
        describe_verdict=figures.describe_verdict,
        describe_audit=figures.describe_audit,
        routing_of=drift.routing,
        compiled=kept.compiled,
        compiled_later=kept.compiled_later,
        targets=targets(kept.compiled),
        kernels=kernel_rows(kept.compiled),
        domain=region.domain if region else None,
        commit=kept.environment.git_commit,
        spent=spending.of_attempt(run, kept.attempt),
    )


def slower(row: Row) -> str:
    """decode 8 x 1 token(s), context 250, 10.00 → 10.50 ms, by 0.500 ms [0.400, 0.600] ms"""
    p = row.pairs
    assert p is not None and p.is_slower
    low, high = p.gain_interval_us
    lost = text.estimate(-p.gain_us, (-high, -low))
    return (
        f"{row.step}, {text.path(p.base_us, p.candidate_us)}, by {lost} (smallest detectable "
        f"effect {text.time(p.mde_us, 3)})"
    )


def step_rows(run: Run, latency: Any) -> list[tuple[str, Paired]]:
    """What was timed with the change and without it: batch and context, and the pairs."""
    if latency is None:
        return []
    return [(run.header.workload.get(kind) or kind, getattr(latency, kind)) for kind in KINDS]


def whole_rows(run: Run) -> list[tuple[str, Timing | str, Timing | str]]:
    """All changes of the run together, by step: the unchanged model and the result, or why not."""
    if run.final is None:
        return []
    rows: list[tuple[str, Timing | str, Timing | str]] = []
    for kind in KINDS:
        before, after = figures.ends(run, kind)
        if before is not None and after is not None:
            rows.append((run.header.workload.get(kind) or kind, before, after))
    sides: dict[str, dict[str, Timing | str]] = {}
    for name, timing in run.final.other_targets.items():
        target, _, side = name.partition(", ")
        sides.setdefault(target, {})[side] = timing
    absent = "not measured"
    steps = run.others.steps
    rows += [
        (steps.get(t, t), s.get("reference", absent), s.get("result", absent))
        for t, s in sides.items()
    ]
    return rows


def promise(
    certificate: Certificate | None, points: Iterable[PointReport]
) -> list[tuple[str, str, str, str]]:
    """(rounding point, declared, reason, observed): those judged, then those declared beside."""
    reasons: dict[str, str] = {}
    declared: dict[str, str] = {}
    if certificate is not None:
        contract = certificate.contract
        reasons = {**contract.elides, **contract.adds}
        declared = {
            **dict.fromkeys(contract.elides, "elided"),
            **dict.fromkeys(contract.adds, "added"),
        }
    rows = []
    seen = set()
    for p in points:
        key = next((name for name in reasons if name in p.point), "")
        seen.add(key)
        rows.append(
            (p.point, p.declared, reasons.get(key, "") if p.declared != "kept" else "", p.observed)
        )
    rest = [name for name in reasons if name not in seen]
    return rows + [(name, declared[name], reasons[name], "not seen") for name in rest]


def roundings(promised: Sequence[tuple[str, str, str, str]]) -> str:
    """keeps 3 of 4 interior rounding points, elides 1 and adds none"""
    declared = [row[1] for row in promised]
    kept, elided, added = (declared.count(how) for how in ("kept", "elided", "added"))
    interior = text.count(kept + elided, "interior rounding point")
    return f"keeps {kept} of {interior}, elides {elided or 'none'} and adds {added or 'none'}"


def targets(made: Compiled | None) -> list[str]:
    return list(dict.fromkeys(k.target for k in made.kernels)) if made else []


def kernel_rows(made: Compiled | None) -> list[tuple[str, str, list[str]]]:
    """(kernel, what it was built with, registers / spills / shared memory by target)."""
    if made is None:
        return []
    found: dict[tuple[str, str], dict[str, str]] = {}
    for kernel in made.kernels:
        built = f"{text.settings(kernel.constexprs)}; {kernel.num_warps} warps"
        found.setdefault((kernel.kernel, built), {})[kernel.target] = taken(kernel)
    names = targets(made)
    return [(k, built, [by.get(t, text.NONE) for t in names]) for (k, built), by in found.items()]


def taken(kernel: Kernel) -> str:
    if kernel.error is not None:
        return "does not compile: " + next(iter(kernel.error.splitlines()), "no words")
    return f"{kernel.registers} / {kernel.spills} / {text.size(kernel.shared_bytes)}"


def write(
    run_dir: Path,
    out: Path | None = None,
    only: int | None = None,
    *,
    compiling: bool = False,
    chosen: int | None = None,
) -> list[tuple[Bundle, Path]]:
    """Write the bundles of the run in `run_dir`, under `out` if it is given; with their folders.

    `only` is the number of one change. With `compiling`, Triton kernels are compiled now where the
    ledger lacks their resources: of all changes, or of the one whose number is `chosen`.
    """
    run = Run.load(run_dir)
    written = []
    for bundle in bundles(run):
        if only is not None and bundle.index != only:
            continue
        wanted = compiling and chosen in (None, bundle.index)
        if wanted and bundle.kept.attempt.backend == "triton" and bundle.kept.compiled is None:
            bundle = replace(bundle, kept=compiled_now(bundle.kept))
        written.append((bundle, write_bundle(run, bundle, page(run, bundle), out or run_dir)))
    return written


def compiled_now(kept: Kept) -> Kept:
    """With the resources of its files as they are here and now."""
    file = ROOT / "optimized" / f"{kept.name}.py"
    if not file.is_file():
        absent = f"this version of the project has no optimized/{file.name}"
        return replace(kept, compiled=Compiled(index=kept.ground.index, kernels=(), absent=absent))
    modules = {path.stem for path in imported(file, "optimized")}
    made = compiled(kept.ground.index, modules)
    return replace(kept, compiled=made, compiled_later=True)
