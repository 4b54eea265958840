"""The first picture: latency after each change, the target first, as one standalone SVG."""

from harness.records import Status
from reports import text
from reports.chart import levels, visible_baselines
from reports.figures import Step, ends, steps
from reports.headline import workload
from reports.run import Run
from reports.svg import Canvas, text_width, ticks

NAME = "latency.svg"
WIDTH = 440  # on a phone of 390 px 12 px of text are still 9
LEFT, RIGHT = 44, 52
PANEL, HEAD, GAP = 190, 52, 26
SMALL = 12
UNITS = (1e6, "s"), (1e3, "ms"), (1.0, "µs")
TURN = -50


def latency(run: Run) -> str | None:
    """The picture, or None where nothing was timed."""
    paths = {kind: path for kind in run.kinds if (path := steps(run, kind)) and path[0].level}
    if not paths:
        return None
    canvas = Canvas(WIDTH, f"Latency after each change: {run.header.model} {run.header.preset}")
    top = 0.0
    for kind, path in paths.items():
        top = _panel(canvas, run, kind, path, top + HEAD)
    names = [step.name for step in next(iter(paths.values()))]
    bottom = _names(canvas, names, top)
    return canvas.svg(_key(canvas, bottom))


def _panel(canvas: Canvas, run: Run, kind: str, path: list[Step], top: float) -> float:
    """Draws one panel from `top` on; returns where it ends."""
    level, baselines = levels(path), visible_baselines(run, kind, path)
    tried = [s.tried_us for s in path if s.tried_us is not None and s.status is not Status.KEPT]
    largest = max([*level, *tried, *(us for _, us in baselines)])
    scale, unit = next(pair for pair in UNITS if min(level) >= pair[0] or pair[0] == 1.0)
    high = 1.12 * largest / scale

    def y(us: float) -> float:
        return top + PANEL * (1 - us / scale / high)

    start, end = ends(run, kind) if not run.unchanged else (None, None)  # as every headline has it
    path_words = text.path(
        start.median_us if start else level[0], end.median_us if end else level[-1]
    )
    canvas.text(0, top - 30, kind.capitalize(), size=16, bold=True)
    canvas.text(WIDTH, top - 30, path_words, size=16, anchor="end", bold=True)
    canvas.text(
        0, top - 13, workload(run.header.workload.get(kind, "")), size=SMALL, colour="muted"
    )
    for value in ticks(high):
        at = y(value * scale)
        canvas.line([(LEFT, at), (WIDTH - RIGHT, at)], "rule")
        words = f"{value:g}" if value else f"0 {unit}"
        canvas.text(LEFT - 6, at + 4, words, size=SMALL, colour="muted", anchor="end")
    slot = (WIDTH - LEFT - RIGHT) / len(path)
    for name, us in baselines:
        canvas.line([(LEFT, y(us)), (WIDTH - RIGHT, y(us))], "muted", 1.2, "5 4")
        beside = WIDTH - RIGHT + 5
        canvas.text(beside, y(us), name, size=SMALL, colour="muted")
        canvas.text(beside, y(us) + 13, text.number(us / scale, 3), size=SMALL, colour="muted")
    corners: list[tuple[float, float]] = []
    for i, us in enumerate(level):
        corners += [(LEFT + i * slot, y(us)), (LEFT + (i + 1) * slot, y(us))]
    canvas.line(corners, "ink", 2.2)
    said: str | None = None
    for i, (step, us) in enumerate(zip(path, level, strict=True)):
        x = LEFT + (i + 0.5) * slot
        _mark(canvas, step, x, y, us)
        room = WIDTH if i in (0, len(path) - 1) else slot
        words = _value(us / scale, room) if step.level is not None else None
        if words is not None and words != said:
            canvas.text(x, y(us) - 8, words, size=SMALL - 1, anchor="middle", halo=True)
            said = words
    return top + PANEL + GAP


def _value(value: float, room: float) -> str | None:
    """The value with as many digits as there is room for; None if there is for none."""
    for digits in (3, 2):
        words = text.number(value, digits)
        if text_width(words, SMALL - 1) <= room - 4:
            return words
    return None


def _mark(canvas: Canvas, step: Step, x: float, y, us: float) -> None:
    if step.level is not None:
        canvas.dot(x, y(us), "ink" if step.status is None else "kept")
    elif step.tried_us is not None:
        canvas.line([(x, y(us)), (x, y(step.tried_us))], "rejected")
        canvas.dot(x, y(step.tried_us), "rejected", hollow=True)
    else:
        canvas.cross(x, y(us), "failed" if step.status is Status.FAILED else "rejected")


def _names(canvas: Canvas, names: list[str], top: float) -> float:
    """The changes' names under the last panel, turned; returns where they end."""
    slot = (WIDTH - LEFT - RIGHT) / len(names)
    size = SMALL if slot >= SMALL else max(5.0, slot)
    for i, name in enumerate(names):
        x = LEFT + (i + 0.5) * slot + 4
        canvas.text(x, top - 6, name, size=size, colour="muted", anchor="end", turned=TURN)
    return top + 0.77 * max(text_width(name, size) for name in names) + 14


def _key(canvas: Canvas, top: float) -> float:
    x, y = 6.0, top + 12
    for words, colour, shape in (
        ("kept", "kept", "dot"),
        ("refused: its time", "rejected", "hollow"),
        ("refused, or failed, untimed", "rejected", "cross"),
    ):
        if shape == "cross":
            canvas.cross(x, y - 4, colour)
        else:
            canvas.dot(x, y - 4, colour, hollow=shape == "hollow")
        canvas.text(x + 10, y, words, size=SMALL, colour="muted")
        x += 26 + text_width(words, SMALL)
    canvas.line([(0, y + 17), (22, y + 17)], "muted", 1.2, "5 4")
    words = "the unchanged model otherwise run, where it fits the scale"
    canvas.text(28, y + 21, words, size=SMALL, colour="muted")
    return y + 26
