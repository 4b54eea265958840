"""How the result drifts when it runs free: a table, and a chart by layer as inline SVG."""

from dataclasses import dataclass

from harness.drift_record import DriftRow
from harness.records import Verdict
from reports import text
from reports.chart import INK, KEPT, MUTED, RULE, inline

SHOWN = 8  # flips in a table
WHO = {"result": "the result", "reference": "the reference under noise"}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One row of the table, as text."""

    of: str
    routes: str
    step: str
    first: str  # relative error after the first layer
    last: str
    kl_mean: str
    kl_max: str
    flips: str


def lines(verdict: Verdict | None) -> list[Line]:
    if verdict is None or verdict.drift is None:
        return []
    return [
        Line(
            of=WHO.get(row.of, row.of),
            routes=row.routes,
            step=row.step,
            first=text.share(row.layers[0] if row.layers else None),
            last=text.share(row.layers[-1] if row.layers else None),
            kl_mean=text.share(row.kl_mean),
            kl_max=text.share(row.kl_max),
            flips=f"{text.count(row.flips)} of {text.count(row.tokens)}",
        )
        for row in verdict.drift.rows
    ]


def routing(verdict: Verdict | None) -> str | None:
    """What became of the choices, in a sentence; None if the model makes none."""
    if verdict is None or (found := verdict.routing) is None:
        return None
    said = (
        f"{text.count(found.rows, 'row')} of choices compared, {text.count(found.flipped)} differ"
    )
    most = found.largest
    if most is None:
        return f"{said}."
    margin = "masked out by the reference" if most.margin is None else text.share(most.margin)
    return (
        f"{said}; the largest margin is {margin}, {text.share(most.limit)} is noise "
        f"({most.where}, {most.output}, row {most.row})."
    )


def flips(verdict: Verdict) -> list[tuple[str, str, int, str, str]]:
    """The choices furthest from a near-tie: call, output, row, margin, what noise explains."""
    found = verdict.routing.flips[:SHOWN] if verdict.routing is not None else ()
    return [
        (
            flip.where,
            flip.output,
            flip.row,
            "masked out" if flip.margin is None else text.share(flip.margin),
            text.share(flip.limit),
        )
        for flip in found
    ]


def chart(verdict: Verdict | None) -> str | None:
    """The hidden state's relative error after each layer of the prefill, logarithmic, as an <svg>
    element; None if there is nothing above zero to draw."""
    rows = verdict.drift.rows if verdict is not None and verdict.drift is not None else ()
    rows = [r for r in rows if r.step == "prefill"]
    if not any(error for row in rows for error in row.layers):
        return None
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4, 2.9), layout="constrained")
    FigureCanvasSVG(figure)
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    for row in rows:
        _draw(axes, row)
    axes.set_yscale("log")
    axes.tick_params(colors=MUTED, labelsize=9, length=0, which="both")
    axes.set_xlabel("layer", color=MUTED, fontsize=9)
    axes.set_ylabel("relative error", color=MUTED, fontsize=9)
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.patch.set_alpha(0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return inline(figure, "drift-")


def _draw(axes, row: DriftRow) -> None:
    """The result in the colour of what was kept, the reference in ink; dashed on forced routes."""
    colour = KEPT if row.of == "result" else INK
    dashes = (3, 2) if row.routes == "forced" else (None, None)
    drawn = [(i, error) for i, error in enumerate(row.layers, start=1) if error]
    axes.plot(*zip(*drawn, strict=True), color=colour, linewidth=1.4, dashes=dashes)
