"""Step time against context or batch, as `harness bench --curve` wrote it: one standalone SVG.

Both axes are logarithmic. Each model has a line; below lie the floors, of all bytes and of the
weights alone. A point without a time stands at the foot, with the reason in the list under it.
"""

import json
import math
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import UserError
from reports import text
from reports.svg import Canvas, text_width

WIDTH, PLOT = 440, 260
LEFT, RIGHT, HEAD = 56, 14, 58
SMALL = 12
COLOURS = "faint", "kept", "rejected", "ink"  # of the models, in order
HINT = "make one with: python -m harness bench --curve context --out DIR"
CHARACTERS = 64  # of a reason on one line


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One file of `harness bench --curve`; `points` as they stand there."""

    kind: str  # "context" or "batch"
    title: str
    points: list[dict[str, Any]]


def load(path: Path) -> Curve:
    """Read the file; UserError where it is anything else."""
    try:
        data = json.loads(path.read_text())
        known = {"batch", "context", "model", "step", "absent", "kv_floor_us", "weight_floor_us"}
        if any(known - set(point) for point in data["points"]) or not data["points"]:
            raise ValueError("its points lack figures")
        title = f"{data['model']} {data['preset']}, {data['environment']['device_name']}"
        return Curve(kind=data["curve"], title=title, points=data["points"])
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; {HINT}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no curve ({error}); {HINT}") from error


def figure(curve: Curve) -> str:
    """The curve as a standalone <svg>; without any time it shows the floors and the reasons."""
    canvas = Canvas(WIDTH, f"Step time against {curve.kind}: {curve.title}")
    canvas.text(0, 12, f"Step time against {curve.kind}", size=16, bold=True)
    fixed = "batch" if curve.kind == "context" else "context"
    held = f"{fixed} {curve.points[0][fixed]:,}"
    canvas.text(0, 31, f"decode, {held}; {curve.title}", size=SMALL, colour="muted")
    xs = sorted({point[curve.kind] for point in curve.points})
    times = [p["step"]["median_us"] for p in curve.points if p["step"]]
    floors = [us for p in curve.points if (us := p["kv_floor_us"] + (p["weight_floor_us"] or 0))]
    known_us = [*times, *floors]
    low, high = _decade(min(known_us), math.floor), _decade(max(known_us), math.ceil)
    x, y = _log(xs[0], xs[-1], LEFT, WIDTH - RIGHT), _log(low, high, HEAD + PLOT, HEAD)
    _axes(canvas, xs, (low, high), x, y)
    key: list[tuple[str, str, str]] = []
    names = list(dict.fromkeys(point["model"] for point in curve.points))
    for name, colour in zip(names, COLOURS, strict=False):
        own = [p for p in curve.points if p["model"] == name and p["step"]]
        line = [(x(p[curve.kind]), y(p["step"]["median_us"])) for p in own]
        if line:
            canvas.line(line, colour, 2.2)
        for at in line:
            canvas.dot(*at, colour, radius=2.5)
        if own:
            last = own[-1]["step"]["median_us"]
            words = text.time(last, 3)
            canvas.text(
                line[-1][0], line[-1][1] - 8, words, size=SMALL, anchor="end", halo=True, bold=True
            )
        key.append((name, colour, ""))
    for words, part, dashes in (
        ("floor: weights and KV cache", ("weight_floor_us", "kv_floor_us"), "5 4"),
        ("weights alone", ("weight_floor_us",), "1.5 4"),
    ):
        known = {p[curve.kind]: sum(p[f] or 0.0 for f in part) for p in curve.points
                 if p["weight_floor_us"]}  # fmt: skip
        line = [(x(at), y(us)) for at, us in sorted(known.items()) if us >= low]
        if len(line) > 1:
            canvas.line(line, "muted", 1.4, dashes)
            key.append((words, "muted", dashes))
    bottom = _key(canvas, key, HEAD + PLOT + 42)
    return canvas.svg(_reasons(canvas, curve, bottom))


def _decade(us: float, side) -> float:
    """The power of ten, or its double or fivefold, at that side of `us`."""
    power = 10.0 ** math.floor(math.log10(us))
    steps = [n * power for n in (1, 2, 5, 10)]
    if side is math.floor:
        return max(s for s in steps if s <= us * (1 + 1e-9))
    return min(s for s in steps if s >= us * (1 - 1e-9))


def _log(low: float, high: float, first: float, last: float):
    """A logarithmic axis: a function from values to places between `first` and `last`."""
    span = math.log(high / low) or 1.0
    return lambda value: first + (last - first) * math.log(value / low) / span


def _axes(canvas: Canvas, xs: list[int], bounds: tuple[float, float], x, y) -> None:
    low, high = bounds
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for n in (1, 2, 5):
            us = n * 10.0**power
            if low * 0.999 <= us <= high * 1.001:
                canvas.line([(LEFT, y(us)), (WIDTH - RIGHT, y(us))], "rule")
                words = text.time(us, 1)
                canvas.text(LEFT - 6, y(us) + 4, words, size=SMALL, colour="muted", anchor="end")
    reached = -math.inf
    for value in xs:
        words, at = short(value), x(value)
        if at - text_width(words, SMALL) / 2 > reached:
            place = HEAD + PLOT + 18
            canvas.text(at, place, words, size=SMALL, colour="muted", anchor="middle")
            reached = at + text_width(words, SMALL) / 2 + 4


def short(value: int) -> str:
    """1,048,576 as 1M, 8192 as 8K."""
    for power, unit in ((20, "M"), (10, "K")):
        if value >= 1 << power and value % (1 << power) == 0:
            return f"{value >> power}{unit}"
    return f"{value}"


def _key(canvas: Canvas, key: list[tuple[str, str, str]], top: float) -> float:
    for i, (words, colour, dashes) in enumerate(key):
        y = top + 18 * i
        canvas.line([(0, y - 4), (22, y - 4)], colour, 1.4 if dashes else 2.2, dashes)
        canvas.text(30, y, words, size=SMALL, colour="muted")
    return top + 18 * len(key)


def _reasons(canvas: Canvas, curve: Curve, top: float) -> float:
    """What has no time, by reason."""
    by_reason: dict[str, list[str]] = {}
    for point in curve.points:
        if point["absent"]:
            what = f"{short(point[curve.kind])} ({point['model']})"
            by_reason.setdefault(point["absent"], []).append(what)
    for reason, what in by_reason.items():
        words = f"not timed: {', '.join(what)}: {reason}"
        for line in textwrap.wrap(words, CHARACTERS):
            canvas.text(0, top, line, size=SMALL, colour="muted")
            top += 16
    return top
