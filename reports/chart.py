"""The stepped chart: a timed target after every change, as inline SVG that follows the page."""

import re
from io import StringIO

from harness.records import Status
from reports import text
from reports.figures import Step, baseline_rows, steps
from reports.run import Run

# Stand-ins that the page's own colours replace, so that the chart follows dark mode and print.
COLOURS = {
    "#010101": "var(--ink)",
    "#020202": "var(--muted)",
    "#030303": "var(--rule)",
    "#040404": "var(--kept)",
    "#050505": "var(--rejected)",
    "#060606": "var(--failed)",
    "#070707": "var(--paper)",
}
INK, MUTED, RULE, KEPT, REJECTED, FAILED, PAPER = COLOURS
HEADROOM = 1.12  # of the largest value
LABEL = 0.15  # of the panel's height: a line of text and its distance from the step
OFF_SCALE = 1.6  # baselines slower than this times the slowest step would flatten the steps


def step_chart(run: Run, kind: str) -> str | None:
    """One panel ("decode" or "prefill") as an <svg> element, or None without a figure to draw."""
    path = steps(run, kind)
    if not path or path[0].level is None:
        return None
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # Small on purpose: at 390 px wide its 9 pt text is still 10 px high.
    figure = Figure(figsize=(4.4, 2.9), layout="constrained")
    FigureCanvasSVG(figure)
    figure.patch.set_alpha(0)
    _draw(figure.add_subplot(), path, visible_baselines(run, kind, path))
    return inline(figure, f"{kind}-")


def levels(path: list[Step]) -> list[float]:
    """Microseconds after each step: a change that was not kept leaves the level as it was."""
    levels: list[float] = []
    for step in path:
        levels.append(step.level.median_us if step.level else levels[-1])
    return levels


def visible_baselines(run: Run, kind: str, path: list[Step]) -> list[tuple[str, float]]:
    shown = []
    for row in baseline_rows(run):
        timing = getattr(row.baseline, kind)
        if timing is None or row.baseline is run.before(kind):
            continue
        if timing.median_us <= OFF_SCALE * max(levels(path)):
            shown.append((row.baseline.name, timing.median_us))
    return shown


def _draw(axes, path: list[Step], baselines: list[tuple[str, float]]) -> None:
    level_us = levels(path)
    tried = [s.tried_us for s in path if s.tried_us is not None]
    largest = max([*level_us, *tried, *(us for _, us in baselines)])
    scale, unit = next((s, u) for s, u in ((1e6, "s"), (1e3, "ms"), (1.0, "µs")) if largest >= s)
    last = len(path) - 0.5
    edges = [i - 0.5 for i in range(len(path) + 1)]
    for name, us in baselines:
        axes.axhline(us / scale, color=MUTED, linewidth=0.8, dashes=(3, 3))
        axes.annotate(
            name,
            (last, us / scale),
            (4, 0),
            textcoords="offset points",
            ha="left",
            va="center",
            color=MUTED,
            fontsize=9,
        )
    axes.step(
        edges,
        [level / scale for level in [level_us[0], *level_us]],
        where="pre",
        color=INK,
        linewidth=1.6,
        solid_joinstyle="miter",
    )
    for at, (step, level) in enumerate(zip(path, level_us, strict=True)):
        _mark(axes, at, step, level, scale)
    # Inside the frame's edges, so that they never cover an axis label.
    for at, level, side, above in (
        (-0.5, level_us[0], "left", 1),
        (last, level_us[-1], "right", _side(path[-1], level_us[-1], HEADROOM * largest, baselines)),
    ):
        axes.annotate(
            text.number(level / scale),
            (at, level / scale),
            (0, 7 * above),
            textcoords="offset points",
            ha=side,
            va="bottom" if above > 0 else "top",
            color=INK,
            fontsize=9,
            fontweight="bold",
        )
    _frame(axes, path, [v / scale for v in [*level_us, *tried, *(us for _, us in baselines)]], unit)


def _side(step: Step, level_us: float, top_us: float, baselines: list[tuple[str, float]]) -> int:
    """1 for a label above the last level, -1 below it: away from what was refused last and from a
    baseline's line."""
    under = [us for _, us in baselines] + [step.tried_us or 0.0] * (step.level is None)
    return 1 if any(level_us - LABEL * top_us < us < level_us for us in under) else -1


def _mark(axes, at: int, step: Step, level: float, scale: float) -> None:
    """A filled dot with its interval where the level was measured; a hollow one at what a refused
    candidate took; a cross on the line for a change that was never timed."""
    if step.status is not None and step.tried_us is None:
        colour = FAILED if step.status is Status.FAILED else REJECTED
        axes.plot(at, level / scale, "x", color=colour, markersize=6, markeredgewidth=1.5)
    elif step.level is not None:
        low, high = (bound / scale for bound in step.level.interval_us)
        colour = INK if step.status is None else KEPT
        axes.vlines(at, low, high, color=colour, linewidth=3, alpha=0.35)
        axes.plot(at, level / scale, "o", color=colour, markersize=5)
    elif step.tried_us is not None:
        tried = step.tried_us / scale
        axes.vlines(at, *sorted((level / scale, tried)), color=REJECTED, linewidth=0.8)
        axes.plot(at, tried, "o", color=REJECTED, markerfacecolor=PAPER, markersize=5, zorder=3)


def _frame(axes, path: list[Step], values: list[float], unit: str) -> None:
    axes.set_ylim(0.0, HEADROOM * max(values))  # from zero: a step down is as tall as it is worth
    axes.set_xlim(-0.5, len(path) - 0.5)
    every = -(-len(path) // 16)  # at most sixteen labels, so that they stay apart
    axes.set_xticks(range(0, len(path), every), [s.label for s in path[::every]])
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.set_ylabel(unit, color=MUTED, fontsize=9)
    axes.set_xlabel("change", color=MUTED, fontsize=9)
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.patch.set_alpha(0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def inline(figure, prefix: str) -> str:
    """The figure as an <svg> element: text as text, no links out, ids of its own, page colours."""
    import matplotlib

    out = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=nothing)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg)  # HTML knows the namespace of <svg>
    svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg, flags=re.DOTALL)  # styles leak in HTML
    svg = re.sub(r" font-family: [^;]*;", "", svg)  # the page's own font
    svg = svg.replace("\n", " ")
    used = set(re.findall(r"#([\w-]+)[\")]", svg))

    def own_id(match: re.Match[str]) -> str:
        return f' id="{prefix}{match[1]}"' if match[1] in used else ""

    svg = re.sub(r' id="([^"]*)"', own_id, svg)
    svg = re.sub(r"(href=\"|url\()#([\w-]+)", rf"\g<1>#{prefix}\g<2>", svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"([^>]*?) width="[^"]*"', r"\1\2", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"([^>]*?) height="[^"]*"', r"\1\2", svg, count=1)
    for stand_in, colour in COLOURS.items():
        svg = svg.replace(stand_in, colour)
    return svg
