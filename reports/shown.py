"""What notebooks show: pictures in the product's own style, and sources side by side."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.records import Ceilings
from harness.stats import median, median_interval
from reports import text
from reports.chart import FAILED, INK, KEPT, MUTED, REJECTED, RULE, inline
from reports.svg import STYLE

if TYPE_CHECKING:
    import pandas as pd

LINES = INK, KEPT, REJECTED, FAILED  # of the sides of a comparison, in order
SIZE = 5.4, 3.2  # inches
WIDTH = 560  # px


class Picture:
    """An SVG that notebooks draw; its colours follow the reader's, light or dark."""

    def __init__(self, svg: str, title: str) -> None:
        self.svg, self.title = svg, title

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<{self.title}>"


class Page:
    """HTML that notebooks draw."""

    def __init__(self, html: str, title: str) -> None:
        self.html, self.title = html, title

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return f"<{self.title}>"


def sources(by_name: Mapping[str, str]) -> Page:
    """Source texts in columns beside each other; long ones scroll."""
    columns = "".join(
        '<div style="flex:1 1 24em;min-width:0;max-height:40em;overflow:auto">'
        f"<b>{escape(name)}</b><pre>{escape(source)}</pre></div>"
        for name, source in by_name.items()
    )
    style = "display:flex;flex-wrap:wrap;gap:1.5em;font-size:12px;text-align:left"
    return Page(f'<div style="{style}">{columns}</div>', f"sources of {', '.join(by_name)}")


def standalone(svg: str, title: str) -> Picture:
    """An <svg> element of the page (`reports.chart`) with its colours and its background."""
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    paper = '<rect width="100%" height="100%" fill="var(--paper)"/>'
    head, _, rest = svg.partition(">")
    head = head.replace("<svg", f'<svg {names} width="{WIDTH}"', 1)
    return Picture(f"{head}><title>{escape(title)}</title><style>{STYLE}</style>{paper}{rest}",
                   title)  # fmt: skip


def times(samples_us: Mapping[str, Sequence[float] | np.ndarray]) -> Picture:
    """The distribution of each side's times: what share of the samples took at most so long."""
    figure, axes = _figure("time", "share of samples")
    quantiles = [np.quantile(values, (0.5, 0.99)) for values in samples_us.values()]
    middle, high = np.max(quantiles, axis=0)
    largest = min(high, 3 * middle)
    scale, unit = (1e3, "ms") if largest >= 1e3 else (1.0, "µs")
    for (name, values), colour in zip(samples_us.items(), LINES, strict=False):
        ordered = np.sort(np.asarray(values, dtype=float)) / scale
        share = np.arange(1, len(ordered) + 1) / len(ordered)
        middle = float(np.median(ordered))
        label = f"{name}: median {text.number(middle, 3)} {unit}"
        axes.step(ordered, share, where="post", color=colour, linewidth=1.6, label=label)
        axes.plot(middle, 0.5, "o", color=colour, markersize=5)
    lowest = min(float(np.min(values)) for values in samples_us.values()) / scale
    axes.set_xlim(0.95 * lowest, 1.02 * largest / scale)  # the few slowest may lie outside
    axes.set_xlabel(f"time, {unit}", color=MUTED, fontsize=9)
    _legend(axes)
    return _picture(figure, "latency", f"times of {', '.join(samples_us)}")


def latency_table(samples_us: Mapping[str, np.ndarray]) -> "pd.DataFrame":
    """Of each side the median and its 95% interval, in us, and how far the reference, the first of
    them, is behind: the median of what it took longer in the same rounds."""
    import pandas as pd  # pages are built without it

    first = next(iter(samples_us.values()))
    rows = []
    for name, samples in samples_us.items():
        low, high = median_interval(samples)
        ahead = first - samples
        rows.append({
            "side": name, "rounds": len(samples), "median_us": median(samples), "low_us": low,
            "high_us": high, "gain_us": median(ahead), "gain_low_us": median_interval(ahead)[0],
            "gain_high_us": median_interval(ahead)[1],
        })  # fmt: skip
    return pd.DataFrame(rows)


def roofline(
    ceilings: Ceilings, *, nbytes: int, flops: int, times_us: Mapping[str, float]
) -> Picture:
    """What each side reaches of what this machine can do, for work of `nbytes` and `flops`."""
    intensity = flops / nbytes
    figure, axes = _figure("operations per byte", "TFLOP/s")
    ends = np.geomspace(min(0.1, intensity / 4), max(1e3, intensity * 4), 200)
    memory = ends * ceilings.read_gb_per_s / 1e3
    for name, peak in (("BF16", ceilings.bf16_tflop_per_s), ("FP32", ceilings.fp32_tflop_per_s)):
        axes.plot(ends, np.minimum(memory, peak), color=MUTED, linewidth=1.0)
        axes.annotate(name, (ends[-1], peak), (-4, 4), textcoords="offset points", ha="right",
                      color=MUTED, fontsize=8)  # fmt: skip
    for (name, us), colour in zip(times_us.items(), LINES, strict=False):
        reached = flops / us / 1e6
        label = f"{name}: {text.number(nbytes / us / 1e3, 3)} GB/s"
        axes.plot(intensity, reached, "o", color=colour, markersize=6, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _legend(axes)
    return _picture(figure, "roofline", f"roofline of {', '.join(times_us)}")


def gains(by_run: Mapping[str, Mapping[str, tuple[float, float, float]]]) -> Picture:
    """A row for each change: its gain with its interval (us: gain, low, high) in every run."""
    changes = list(dict.fromkeys(name for found in by_run.values() for name in found))
    figure, axes = _figure("gain of a step, µs", "", height=1.2 + 0.42 * len(changes))
    for at, ((run, found), colour) in enumerate(zip(by_run.items(), LINES, strict=False)):
        rows = [(changes.index(name) + 0.22 * at, *gain) for name, gain in found.items()]
        if not rows:
            continue
        y, middle, low, high = zip(*rows, strict=True)
        axes.hlines(y, low, high, color=colour, linewidth=3, alpha=0.4)
        axes.plot(middle, y, "o", color=colour, markersize=5, label=run)
    axes.axvline(0, color=MUTED, linewidth=0.8)
    axes.set_yticks([i + 0.11 for i in range(len(changes))], changes)
    axes.invert_yaxis()
    _legend(axes)
    return _picture(figure, "gains", f"gains in {', '.join(by_run)}")


def relative(rows: Sequence[Mapping[str, Any]]) -> Picture:
    """Of each step the gain and its interval, as shares of the step without the change; the grey
    band is what could not be told from none."""
    figure, axes = _figure("gain, % of the step", "", height=1.0 + 0.5 * len(rows))
    for at, row in enumerate(rows):
        middle, low, high, effect = (
            100 * row[name] / row["without_us"]
            for name in ("gain_us", "gain_low_us", "gain_high_us", "mde_us")
        )
        axes.barh(at, 2 * effect, left=-effect, height=0.7, color=RULE)
        axes.hlines(at, low, high, color=KEPT, linewidth=3, alpha=0.5)
        axes.plot(middle, at, "o", color=KEPT, markersize=6)
    axes.axvline(0, color=MUTED, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["step"] for row in rows])
    axes.invert_yaxis()
    return _picture(figure, "relative", f"gain of {', '.join(row['step'] for row in rows)}")


def gaps(gaps_us: Sequence[float]) -> Picture:
    """The idle time before each kernel, in launch order."""
    figure, axes = _figure("kernel, in launch order", "idle before it, µs")
    at = np.arange(1, len(gaps_us) + 1)
    axes.fill_between(at, gaps_us, step="mid", color=REJECTED, linewidth=0)
    return _picture(figure, "gaps", "idle time before each kernel")


def shares(parts_us: Mapping[str, float], title: str) -> Picture:
    """Parts of one whole, the largest first, as bars with their times."""
    ordered = sorted(parts_us.items(), key=lambda part: -part[1])
    figure, axes = _figure("µs", "", height=1.0 + 0.3 * len(ordered))
    axes.barh(range(len(ordered)), [us for _, us in ordered], color=KEPT, height=0.6)
    axes.set_yticks(range(len(ordered)), [f"{name}: {text.time(us, 3)}" for name, us in ordered])
    axes.invert_yaxis()
    return _picture(figure, "shares", title)


def _figure(across: str, up: str, height: float = SIZE[1]) -> tuple[Any, Any]:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(SIZE[0], height), layout="constrained")
    FigureCanvasSVG(figure)
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.set_xlabel(across, color=MUTED, fontsize=9)
    axes.set_ylabel(up, color=MUTED, fontsize=9)
    axes.tick_params(colors=MUTED, labelsize=9, length=0, which="both")
    axes.grid(color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure, axes


def _legend(axes: Any) -> None:
    axes.legend(frameon=False, fontsize=8, labelcolor=MUTED)


def _picture(figure: Any, prefix: str, title: str) -> Picture:
    return standalone(inline(figure, f"{prefix}-"), title)
