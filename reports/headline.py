"""The first thing a reader sees: before and after, how much faster, what is left to the floor."""

import re
from dataclasses import dataclass

from harness.records import Baseline, Status, Timing
from reports import text
from reports.figures import Ratio, baseline_rows, ends
from reports.run import Run
from reports.svg import Canvas, text_width

WIDTH, BAR = 440, 14
SMALL = 12
MEANS = {"decode": "writing one more token", "prefill": "reading a prompt"}
WORKLOAD = re.compile(r"(?:decode|prefill) (\d+) x (\d+) token\(s\), context (\d+)")


@dataclass(frozen=True, kw_only=True)
class Headline:
    """One kind of step; what was not measured is None."""

    kind: str
    before: Baseline | None  # run as the candidates are
    start: Timing | None
    end: Timing | None
    faster: Ratio | None  # the end over the start
    compiled: Ratio | None  # the end over torch.compile
    floor_us: float | None  # what its bytes and operations take at the measured ceilings

    @property
    def above_floor(self) -> float | None:
        """How many times its floor the step takes."""
        timed = self.end or self.start
        return timed.median_us / self.floor_us if timed and self.floor_us else None


def headlines(run: Run) -> list[Headline]:
    """The target, then the other kind."""
    rows = {row.baseline.name: row for row in baseline_rows(run)}
    found = []
    for kind in run.kinds:
        before = run.before(kind)
        compiled = rows.get("compile")
        start, end = ends(run, kind)
        found.append(
            Headline(
                kind=kind,
                before=before,
                start=start,
                end=end,
                faster=getattr(rows[before.name], kind) if before else None,
                compiled=getattr(compiled, kind) if compiled else None,
                floor_us=floor_us(run, kind),
            )
        )
    return found


def floor_us(run: Run, kind: str) -> float | None:
    """The floor that the ledger holds; in older ones, for a decode that was traced on a GPU, what
    the bytes that the reference must read take at the measured bandwidth: those of the first trace,
    so that a candidate that is traced to read less has no other floor."""
    if kind in run.floors:
        return run.floors[kind]
    traced = run.kernels.get("before")
    if kind != run.header.kind or kind != "decode" or run.header.device != "cuda":
        return None
    if traced is None or traced.compulsory_bytes is None or run.ceilings is None:
        return None
    return traced.compulsory_bytes / run.ceilings.read_gb_per_s / 1e3


def why_no_floor(run: Run, kind: str) -> str | None:
    """Why a step that was timed has no floor; None where it has one."""
    if run.after is None or floor_us(run, kind) is not None:
        return None
    if kind not in run.floors:
        return "it is computed when a run ends" if not run.finished else "this run computed none"
    traced = run.kernels.get("before")
    counted = traced is not None and traced.compulsory_bytes is not None
    if counted and not any(run.floors.values()):
        return "a toy's weights stay in a cache"
    return "its step was not traced"


def workload(words: str) -> str:
    """What one step is, in words; as the ledger has it where that is written otherwise."""
    found = WORKLOAD.fullmatch(words)
    if found is None:
        return words.removeprefix("decode ").removeprefix("prefill ")
    batch, tokens, context = (int(n) for n in found.groups())
    each = "one token each" if tokens == 1 else f"{tokens:,} tokens each"
    each = each.removesuffix(" each") if batch == 1 else each
    return f"{text.count(batch, 'sequence')}, {each}, at a context of {context:,}"


def outcome(run: Run) -> str | None:
    """What became of the changes and whether the result is right, in one sentence; None before
    anything was timed with a change."""
    if run.after is None:
        return None
    tried, kept = run.changes(), run.changes(Status.KEPT)
    if not kept:
        none = f"None of the {text.count(len(tried), 'change')} tried was kept"
        return f"{none}: the model is as it was."
    said = f"{len(kept)} of the {text.count(len(tried), 'change')} tried were kept"
    each = "each is numerically right by itself and measurably faster"
    closing = run.closing_verdict
    if closing is None:
        judged = "the result as a whole is not judged yet"
    elif closing.passed:
        judged = f"{closing.layers} of the result together passed the numerical check"
    else:
        judged = "the result as a whole failed the numerical check"
    return f"{said}: {each}; {judged}."


def bar(line: Headline, *, unchanged: bool = False) -> str | None:
    """Before, after and the floor to one scale, as an <svg> element; None with nothing to set
    against each other. Of an unchanged model there is one time."""
    if line.start is None or (line.end is None and line.floor_us is None):
        return None
    end = (not unchanged and line.end) or line.start
    scale = WIDTH / max(line.start.median_us, end.median_us)
    canvas = Canvas(WIDTH, f"{line.kind}: before, after and the floor")
    canvas.box(0, 0, line.start.median_us * scale, BAR, "faint")
    faster = end.median_us < line.start.median_us
    if line.end is not None and not unchanged:
        canvas.box(0, 0, end.median_us * scale, BAR, "kept" if faster else "rejected")
    if line.floor_us is None:
        return canvas.svg(BAR, standalone=False)
    x = line.floor_us * scale
    canvas.line([(x, -3), (x, BAR + 5)], "ink", 2.0)
    words = f"floor {text.time(line.floor_us, 3)}"
    right = x + text_width(words, SMALL) > WIDTH
    at, anchor = (x, "end") if right else (x - 1, "start")
    canvas.text(at, BAR + 18, words, size=SMALL, colour="muted", anchor=anchor)
    return canvas.svg(BAR + 22, standalone=False)
