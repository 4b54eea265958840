"""Predicted against realised, and the parts of a step: two pictures of what a run expected."""

from harness.records import Status
from reports import text
from reports.budget import WHOLE, Part
from reports.figures import Prediction, predictions
from reports.run import Run
from reports.svg import Canvas, ticks

WIDTH, SMALL = 440, 12
ROW, NAME, FOOT = 36, 17, 24
LEFT, RIGHT = 8, 8
SLIT = 1  # between two parts, so that each can be seen
COLOURS = {Status.KEPT: "kept", Status.REJECTED: "rejected", Status.FAILED: "failed"}


def fit(run: Run) -> str | None:
    """A row for each change: predicted (hollow) and realised (filled, with its interval), as an
    <svg> element; None where no change has both."""
    rows = predictions(run)
    if not rows:
        return None
    values = [us for row in rows for us in (row.predicted_us, *_interval(run, row))]
    values += [row.realised_us for row in rows]
    low, high = min(0.0, *values), max(0.0, *values)
    scale = (WIDTH - LEFT - RIGHT) / ((high - low) or 1.0)

    def x(us: float) -> float:
        return LEFT + (us - low) * scale

    canvas = Canvas(WIDTH, "Predicted and realised gain of each change")
    bottom = ROW * len(rows)
    for value in ticks(high):
        for at in range(len(rows)):  # beside the marks only: names stand free
            ends = [(x(value), float(at * ROW + NAME)), (x(value), float((at + 1) * ROW))]
            canvas.line(ends, "muted" if value == 0 else "rule")
        canvas.text(x(value), bottom + 15, text.time(value, 2) if value else "0", size=SMALL - 1,
                    colour="muted", anchor=_anchor(x(value)))  # fmt: skip
    for at, row in enumerate(rows):
        _dumbbell(canvas, run, row, at * ROW, x)
    return canvas.svg(bottom + FOOT, standalone=False)


def _anchor(x: float) -> str:
    return "start" if x < 30 else "end" if x > WIDTH - 30 else "middle"


def _interval(run: Run, row: Prediction) -> tuple[float, float]:
    pair = run.pair(row.attempt)
    assert pair is not None
    return pair.gain_interval_us


def _dumbbell(canvas: Canvas, run: Run, row: Prediction, top: float, x) -> None:
    y, colour = top + 26, COLOURS[row.attempt.status]
    words = f"{row.attempt.index}. {row.attempt.name}"
    canvas.text(0, top + 12, words, size=SMALL)
    canvas.line([(x(row.predicted_us), y), (x(row.realised_us), y)], "muted")
    low, high = _interval(run, row)
    canvas.line([(x(low), y), (x(high), y)], colour, 4)
    canvas.dot(x(row.predicted_us), y, "ink", hollow=True)
    canvas.dot(x(row.realised_us), y, colour)


def budget(parts: list[Part]) -> str | None:
    """The step before and after as two bars of its parts, to one scale, as an <svg> element."""
    whole = next((part for part in parts if part.name == WHOLE), None)
    if whole is None:
        return None
    sides = [("before", whole.before_us), ("after", whole.after_us)]
    longest = max(us for _, us in sides if us)
    canvas = Canvas(WIDTH, "The parts of a step, before and after")
    top = 0.0
    for name, step_us in sides:
        if not step_us:
            continue
        canvas.text(0, top + 12, f"{name}: {text.time(step_us, 3)}", size=SMALL)
        left = 0.0
        for part in parts:
            us = getattr(part, f"{name}_us")
            if part.colour is None or not us:
                continue
            width = WIDTH * us / longest
            canvas.box(left, top + 18, max(width / 2, width - SLIT), 18, part.colour)
            left += width
        top += 48
    return canvas.svg(top - 8, standalone=False)
