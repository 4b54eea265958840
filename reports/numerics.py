"""How far each change's outputs are from its contract's replay: ULP histograms, as one picture."""

import math
from collections.abc import Mapping
from typing import Any

from harness.records import Attempt, UlpReport, Verdict
from reports import text
from reports.run import Run
from reports.shown import Picture
from reports.svg import Canvas

WIDTH, SMALL = 440, 12
HEAD, ROW, BAR = 20, 62, 24
BINS = "0", "1", "2", "3-4", "5-8", ">8"


def pooled(outputs: tuple[UlpReport, ...]) -> dict[str, int]:
    """Elements of all outputs by their distance in BF16 ULPs, every bin of BINS."""
    return {name: sum(o.histogram.get(name, 0) for o in outputs) for name in BINS}


def judged(run: Run) -> list[Attempt]:
    """The changes whose region verdict compared outputs."""
    return [a for a in run.changes() if a.region_verdict is not None and a.region_verdict.outputs]


def histograms(run: Run) -> str | None:
    """One row of bars for each change, as an <svg> element; None where nothing was compared.

    A bar's height is the logarithm of its elements: a thousandth of them is still to be seen.
    """
    return _drawn(
        {f"{a.index}. {a.name}": a.region_verdict for a in judged(run) if a.region_verdict}
    )


def picture(verdicts: Mapping[str, Verdict]) -> Picture:
    """The same of verdicts by name, for a notebook."""
    compared = {name: verdict for name, verdict in verdicts.items() if verdict.outputs}
    svg = _drawn(compared, standalone=True)
    return Picture(svg or "<svg/>", f"ULPs of {', '.join(compared) or 'nothing'}")


def _drawn(verdicts: Mapping[str, Verdict], *, standalone: bool = False) -> str | None:
    if not verdicts:
        return None
    canvas = Canvas(WIDTH, "Elements by their distance from the replay, in BF16 ULPs")
    slot = WIDTH / len(BINS)
    for i, name in enumerate(BINS):
        words = "equal" if name == "0" else f"{name} ULP"
        canvas.text((i + 0.5) * slot, 12, words, size=SMALL, colour="muted", anchor="middle")
    for at, (name, verdict) in enumerate(verdicts.items()):
        _row(canvas, name, verdict, HEAD + at * ROW, slot)
    return canvas.svg(HEAD + len(verdicts) * ROW, standalone=standalone)


def _row(canvas: Canvas, title: str, verdict: Verdict, top: float, slot: float) -> None:
    counts = pooled(verdict.outputs)
    total = sum(counts.values()) or 1
    canvas.line([(0, top), (WIDTH, top)], "rule")
    said = "" if verdict.passed else " (refused by its numerics)"
    canvas.text(0, top + 16, f"{title}{said}", size=SMALL, bold=True)
    foot = top + 20 + BAR
    for i, (name, count) in enumerate(counts.items()):
        if not count:
            canvas.text((i + 0.5) * slot, foot + 12, "0", size=SMALL, colour="muted",
                        anchor="middle")  # fmt: skip
            continue
        high = max(2.0, BAR * math.log1p(count) / math.log1p(total))
        colour = "faint" if name == "0" else "kept" if verdict.passed else "rejected"
        canvas.box(i * slot + 8, foot - high, slot - 16, high, colour)
        words = share(count / total)
        canvas.text((i + 0.5) * slot, foot + 12, words, size=SMALL, colour="muted",
                    anchor="middle")  # fmt: skip


def share(value: float) -> str:
    """99.98% or 2.8e-6: never a rounded 100% where something differs."""
    if value < 0.001:
        return text.share(value)
    words = f"{100 * value:.2f}%"
    return words if value == 1 or words != "100.00%" else ">99.99%"


def counts(output: UlpReport) -> str:
    """The histogram of one output in a table's cell: 65,518 / 18 / 0 / 0 / 0 / 0."""
    return " / ".join(text.count(output.histogram.get(name, 0)) for name in BINS)


def figures(output: UlpReport) -> dict[str, Any]:
    """One output's row in a table of a notebook."""
    return {
        "output": output.output,
        "elements": output.elements,
        "differing_share": 1 - output.bit_equal_share,
        "allowed_share": output.allowed_share,
        "worst_scaled_ulp": output.worst_scaled,
        "golden_error": output.golden_error,
        "reference_golden_error": output.reference_golden_error,
        **{f"{name} ULP": output.histogram.get(name, 0) for name in BINS},
    }
