"""What both reports show, and the template environment that shows it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from harness.confined import describe as describe_own
from harness.protections import describe
from harness.records import Status, Timing
from reports import budget, drift, figures, headline, layer, rounds, spending, text
from reports.run import Run
from traces import kernels
from traces.short import short_name

SECTIONS = (
    (Status.KEPT, "What was kept, and why", "Nothing was kept."),
    (Status.REJECTED, "What was rejected, and why", "Nothing was rejected."),
    (Status.FAILED, "What failed", "Nothing failed before it could be judged."),
)

ENDS = {  # why a search ended by itself although something was left to try
    "plateau": "The search ended at a plateau",
    "floor": "The search ended near the floor",
}


def environment(*, autoescape: bool) -> Environment:
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (
        text.time,
        text.interval,
        text.estimate,
        text.path,
        text.number,
        text.factor,
        text.factor_interval,
        text.share,
        text.percent,
        text.count,
        text.nbytes,
        text.date,
        text.knobs,
        spending.dollars,
    )
    templates.filters.update({words.__name__: words for words in filters})
    if autoescape:  # HTML: keep a figure and its unit on one line
        for words in (text.time, text.interval, text.estimate, text.path):
            templates.filters[words.__name__] = _unbroken(words)
    templates.filters["megabytes"] = text.nbytes  # as pr.md.j2 names it
    templates.filters["breakable"] = breakable
    templates.filters["cell"] = cell
    templates.filters["short_name"] = short_name
    templates.filters["workload"] = headline.workload
    templates.filters["capitalize_first"] = lambda words: words[:1].upper() + words[1:]
    return templates


def _unbroken(words: Callable[..., str]) -> Callable[..., str]:
    """May still break before an interval that follows a figure."""
    return lambda *given: words(*given).replace(" ", "\u00a0").replace("\u00a0[", " [")


def breakable(name: str) -> Markup:
    """A name as HTML that a narrow column may break after its separators."""
    return Markup(re.sub(r"([_:.])", r"\1<wbr>", str(escape(name))))


def cell(value: object) -> str:
    """Text that is safe inside a Markdown table: no pipes, line breaks or tags."""
    line = " ".join(str(value).split())
    for raw, safe in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|")):
        line = line.replace(raw, safe)
    return line


def context(run: Run) -> dict[str, Any]:
    """Everything a template needs, computed."""
    header, here = run.header, run.environment
    return {
        "run": run,
        "title": f"{Path(header.model).stem} {header.preset}, {header.target}",
        "device": text.device(
            header.device,
            here.device_name if here else None,
            here.cpu_threads if here else None,
        ),
        "state": state(run),
        "after_words": after_words(run),
        "kinds": run.kinds,
        "kind": header.kind,
        "workload": {k: headline.workload(header.workload.get(k, "")) for k in run.kinds},
        "outcome": headline.outcome(run),
        "means": headline.MEANS,
        "titles": figures.BASELINE_TITLES,
        "headlines": {line.kind: line for line in headline.headlines(run)},
        "no_floor": {kind: headline.why_no_floor(run, kind) for kind in run.kinds},
        "sections": SECTIONS,
        "baselines": figures.baseline_rows(run),
        "predictions": figures.predictions(run),
        "median_error_us": figures.median_error_us(run),
        "layers": figures.layer_pairs(run),
        "launch_word": "kernel" if header.device == "cuda" else "operator call",
        "facts": facts(run),
        "drift_lines": drift.lines(run.closing_verdict),
        "routing_words": drift.routing(run.closing_verdict),
        "routing_of": drift.routing,
        "flips_of": drift.flips,
        "step_parts": budget.parts(run),
        "whole_step": budget.WHOLE,
        "layer_picture": layer.layer(run, standalone=False),
        "launches": figures.launches,
        "beyond_memory": kernels.beyond_memory,
        "beyond_words": kernels.BEYOND_MEMORY,
        "time_us": figures.time_us,
        "verdicts": figures.verdicts,
        "broken_points": figures.broken_points,
        "reason": lambda attempt: figures.reason(run, attempt),
        "describe_point": figures.describe_point,
        "describe_verdict": figures.describe_verdict,
        "describe_audit": figures.describe_audit,
        "spending": spending.rows(run),
        "spent": spending.total(run.spending),
        "rounds": rounds.rows(run),
    }


def after_words(run: Run) -> str:
    """What `run.after` is of."""
    if not run.changes(Status.KEPT):
        return "again at the end, nothing kept"
    return "with the kept changes" if run.finished else "after the last kept change"


def state(run: Run) -> str | None:
    """How the run stands if it did not come to its own end, in a sentence."""
    resume = f"continue it with --resume {run.directory}"
    if run.stopped == "budget":
        why = f": {run.stopped_why}" if run.stopped_why else ""
        return f"The budget stopped this run{why}; {resume}."
    if run.stopped in ENDS:
        return f"{ENDS[run.stopped]}: {run.stopped_why}."
    if run.stopped == "interrupted":
        return f"This run was interrupted; {resume}."
    if run.stopped is None:
        return f"This run is unfinished: its ledger ends at {text.date(run.ended_s)}; {resume}."
    return None


def facts(run: Run) -> list[tuple[str, str]]:
    """What was run, on what, and what that machine can do, as names and values."""
    header, rows = run.header, []
    rows.append(("Model", f"{header.model}, preset {header.preset}, seed {header.seed}"))
    if header.note:
        rows.append(("Which is", header.note))
    rows.append(("Target", f"{header.target}; proposer {header.proposer}"))
    rows += [(f"Timed as {kind}", words) for kind, words in header.workload.items()]
    given = {name: value for name, value in header.options.items() if value is not None}
    rows.append(("Options", text.settings(given)))
    if (here := run.environment) is not None:
        gpu = [
            here.gpu_uuid,
            f"driver {here.driver}" if here.driver else None,
            f"SM {here.sm_clock_mhz} MHz" if here.sm_clock_mhz else None,
            f"memory {here.memory_clock_mhz} MHz" if here.memory_clock_mhz else None,
            f"{here.power_w:.0f} W" if here.power_w is not None else None,
            f"{here.temperature_c} °C" if here.temperature_c is not None else None,
        ]
        rows.append(("Device", here.device_name))
        if known := [part for part in gpu if part]:
            rows.append(("GPU", ", ".join(known)))
        versions = {"Python": here.python, "torch": here.torch, "Triton": here.triton,
                    "CUDA": here.cuda}  # fmt: skip
        rows.append(("Software", ", ".join(f"{n} {v}" for n, v in versions.items() if v)))
        rows.append(("CPU threads", str(here.cpu_threads)))
        rows.append(("Commit", here.git_commit or "not in a git checkout"))
    if (top := run.ceilings) is not None:
        limits = (
            f"read {text.number(top.read_gb_per_s, 3)} GB/s",
            f"copy {text.number(top.copy_gb_per_s, 3)} GB/s",
            f"BF16 {text.number(top.bf16_tflop_per_s, 3)} TFLOP/s",
            f"FP32 {text.number(top.fp32_tflop_per_s, 3)} TFLOP/s",
            f"smallest launch {text.time(top.launch_us, 3)}",
        )
        rows.append(("Ceilings, measured", ", ".join(limits)))
    for name, us in run.effect.items():
        kind = name.removesuffix("_us")
        rows.append((f"Smallest detectable effect, {kind}", text.time(us, 3)))
    if run.protections:
        rows.append(("Candidates judged first in a sandbox", describe(run.protections)))
    if run.own_process:
        rows.append(("The run's own process, which times them", describe_own(run.own_process)))
    if run.workspace is not None:
        rows.append(("A model's candidates judged by", rounds.judged_by(run.workspace)))
    if judges := run.workers or rounds.workers(run):
        lost = "".join(f"; lost at {how}" for how in (*rounds.losses(run), *run.lost))
        rows.append(("Candidates' regions judged by", f"{', '.join(judges)}{lost}"))
    if (closing := run.closing_verdict) is not None:
        said = "passed" if closing.passed else f"failed: {closing.reason}"
        rows.append(("Every layer of the result judged", f"{said}; {closing.cases} cases"))
    if run.final is not None:
        for name, timing in run.final.other_targets.items():
            measured = isinstance(timing, Timing)
            words = text.time(timing.median_us) if measured else f"not measured: {timing}"
            rows.append((f"At the end, {name}", words))
    return rows
