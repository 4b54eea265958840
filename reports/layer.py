"""The second picture: the kernels of one layer in launch order, before and after, to one scale.

Each row is a module, each piece of its two bars one kernel; written kernels are green.
"""

from collections.abc import Sequence

from harness.records import KernelRow
from reports import text
from reports.figures import LayerPair, launches, layer_pairs, time_us
from reports.run import Run
from reports.svg import Canvas, text_width

NAME = "layer.svg"
WIDTH = 440
HEAD, ROW, BAR = 96, 66, 12
SMALL, SIZE = 12, 14
SLIT = 0.8  # between two kernels, so that each can be seen
WIDEST = 262  # px of the longest bar: its words stand beside it


def chosen(run: Run) -> LayerPair | None:
    """The layer that launched most kernels before; its kind stands for the model."""
    pairs = [pair for pair in layer_pairs(run) if pair.before]
    return max(pairs, key=lambda pair: launches(pair.before), default=None)


def layer(run: Run, pair: LayerPair | None = None, *, standalone: bool = True) -> str | None:
    """The picture of `pair`, by default the layer with most kernels; None where none was traced."""
    pair = pair or chosen(run)
    if pair is None or not pair.before:
        return None
    word = "kernels" if run.header.device == "cuda" else "operator calls"
    before, after = by_module(pair.before, pair.module), by_module(pair.after, pair.module)
    names = ordered(list(before), list(after))
    longest = max(time_us(rows) for side in (before, after) for rows in side.values())
    scale = WIDEST / (longest or 1.0)
    canvas = Canvas(WIDTH, f"Kernels of one layer, {pair.kind}, before and after")
    _head(canvas, pair, word, run.header.kind)
    top = float(HEAD)
    for name in names:
        canvas.line([(0, top), (WIDTH, top)], "rule")
        canvas.text(0, top + 19, name, size=SIZE, bold=True)
        _bar(canvas, before.get(name, []), top + 26, scale, "faint", word)
        if pair.after:
            _bar(canvas, after.get(name, []), top + 26 + BAR + 5, scale, "muted", word)
        top += ROW
    canvas.line([(0, top), (WIDTH, top)], "rule")
    return canvas.svg(top + 6, standalone=standalone)


def by_module(rows: Sequence[KernelRow], layer_name: str) -> dict[str, list[KernelRow]]:
    """The rows of each module of the layer, in the order of the first launch."""
    found: dict[str, list[KernelRow]] = {}
    for row in rows:
        name = row.module.removeprefix(layer_name).removeprefix(".") or "(the layer itself)"
        found.setdefault(name, []).append(row)
    return found


def ordered(before: list[str], after: list[str]) -> list[str]:
    """All names: those of before in their order, others behind the one that they follow after."""
    names = list(before)
    for i, name in enumerate(after):
        if name not in names:
            at = names.index(after[i - 1]) + 1 if i else 0
            names.insert(at, name)
    return names


def described(rows: list[KernelRow], word: str, room: float) -> str:
    """The written kernels by name where there is room for that, else how many they are."""
    count = launches(rows)
    if all(row.written for row in rows):
        names = ", ".join(row.name for row in rows)
        if text_width(f"{names}, 12.3 µs", SMALL) <= room:
            return names
    return f"{count} {word.rstrip('s') if count == 1 else word}"


def _head(canvas: Canvas, pair: LayerPair, word: str, kind: str) -> None:
    canvas.text(0, 20, f"One layer of a {kind} step, in launch order", size=16, bold=True)
    where = f"{pair.kind}, {pair.module}; each piece is one of its {word}"
    canvas.text(0, 38, where, size=SMALL, colour="muted")
    x = 0.0
    sides = [("before", pair.before, "faint", 62.0)]
    if pair.after:
        sides.append(("after", pair.after, "muted", 82.0))
    for name, rows, colour, y in sides:
        written = launches(tuple(row for row in rows if row.written))
        canvas.box(x, y - 10, 10, 10, colour)
        words = f"{name}: {launches(rows)} {word}, {text.time(time_us(rows), 3)}"
        canvas.text(x + 16, y, words, size=SIZE)
        if written:
            beside = x + 16 + text_width(words, SIZE) + 16
            canvas.box(beside, y - 10, 10, 10, "kept")
            canvas.text(beside + 16, y, f"{written} of them written", size=SIZE, colour="kept")


def _bar(
    canvas: Canvas, rows: list[KernelRow], top: float, scale: float, colour: str, word: str
) -> None:
    if not rows:
        canvas.text(0, top + BAR - 1, "none: another kernel does it", size=SMALL, colour="muted")
        return
    x = 0.0
    for row in rows:
        width = max(1.0, row.time_us * scale)
        slit = min(SLIT, width / 3)
        canvas.box(x, top, width - slit, BAR, "kept" if row.written else colour)
        x += width
    words = f"{described(rows, word, WIDTH - x)}, {text.time(time_us(rows), 3)}"
    shown = "kept" if all(row.written for row in rows) else "muted"
    canvas.text(x + 6, top + BAR - 1, words, size=SMALL, colour=shown)
