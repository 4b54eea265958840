"""The history of checks: one JSON line each, and the times over it as one standalone SVG."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.records import Paired
from reports import text
from reports.files import write_text
from reports.regression import Finding, Outcome, Snapshot
from reports.run import KINDS
from reports.svg import Canvas, ticks

WIDTH, SMALL = 440, 12
LEFT, PANEL, HEAD, GAP = 60, 120, 34, 30


def append(
    file: Path, current: Snapshot, findings: Sequence[Finding], pairs: Mapping[str, Paired]
) -> None:
    """Add the check to `file` and draw all of it in `file` with .svg; UserError if `file` holds
    anything else."""
    earlier = load(file) if file.exists() else []
    line = entry(current, findings, pairs)
    lines = [*earlier, line]
    write_text(file, "".join(json.dumps(each) + "\n" for each in lines))
    if (svg := chart(lines)) is not None:
        write_text(file.with_suffix(".svg"), svg)


def entry(
    current: Snapshot, findings: Sequence[Finding], pairs: Mapping[str, Paired]
) -> dict[str, Any]:
    here = current.environment
    times = {}
    for kind in KINDS:
        taken = pairs.get(kind) or (current.pairs and getattr(current.pairs, kind))
        timing = getattr(current, kind)
        # What the finding is of, where there are pairs.
        us = taken.candidate_us if taken else timing.median_us if timing else None
        times[f"{kind}_us"] = us
    return {
        "time_s": round(time.time(), 3),
        "commit": here.git_commit if here else None,
        "device": here.device_name if here else None,
        **times,
        "findings": {f.name: str(f.outcome) for f in findings},
    }


def load(file: Path) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        if not all(
            {"time_s", "findings", "decode_us", "prefill_us"} <= set(line) for line in lines
        ):
            raise ValueError("a line lacks its figures")
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file} is no history ({error}); name another file") from error
    return lines


def chart(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Each kind's time over the checks, from 0; what got slower is red. None without any time."""
    canvas = Canvas(WIDTH, "Times over the checks")
    top = 0.0
    for kind in KINDS:
        at = [(i, line) for i, line in enumerate(lines) if line[f"{kind}_us"] is not None]
        if at:
            top = _panel(canvas, kind, at, len(lines), top + HEAD) + GAP
    if not top:
        return None
    first, last = (text.date(line["time_s"]).partition(" ")[0] for line in (lines[0], lines[-1]))
    canvas.text(LEFT, top - GAP + 18, first, size=SMALL, colour="muted")
    canvas.text(WIDTH, top - GAP + 18, last, size=SMALL, colour="muted", anchor="end")
    canvas.dot(LEFT + 3, top - GAP + 36, "failed", radius=2.5)
    canvas.text(LEFT + 12, top - GAP + 40, "slower than its baseline", size=SMALL, colour="muted")
    return canvas.svg(top - GAP + 46)


def _panel(
    canvas: Canvas, kind: str, at: list[tuple[int, Mapping[str, Any]]], count: int, top: float
) -> float:
    values = [line[f"{kind}_us"] for _, line in at]
    high = 1.1 * max(values)
    step = (WIDTH - LEFT - 10) / max(1, count - 1)

    def place(i: int, us: float) -> tuple[float, float]:
        return LEFT + i * step, top + PANEL * (1 - us / high)

    canvas.text(0, top - 14, kind.capitalize(), size=16, bold=True)
    last = f"{text.time(values[-1])}, check {at[-1][0] + 1}"
    canvas.text(WIDTH, top - 14, last, size=SMALL, colour="muted", anchor="end")
    for value in ticks(high, 3):
        y = place(0, value)[1]
        canvas.line([(LEFT, y), (WIDTH, y)], "rule")
        words = text.time(value, 2) if value else "0"
        canvas.text(LEFT - 6, y + 4, words, size=SMALL - 1, colour="muted", anchor="end")
    canvas.line([place(i, line[f"{kind}_us"]) for i, line in at], "ink", 1.6)
    for i, line in at:
        slower = line["findings"].get(f"latency, {kind}") == Outcome.SLOWER
        canvas.dot(*place(i, line[f"{kind}_us"]), "failed" if slower else "ink", radius=2.5)
    return top + PANEL
