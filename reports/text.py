"""Figures as text: units, significant digits, intervals."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime

NONE = "–"
MINUS = "−"
UNITS = ((1e6, "s"), (1e3, "ms"), (0.0, "µs"))


def _unit(us: float) -> tuple[float, str]:
    return next((scale or 1.0, name) for scale, name in UNITS if abs(us) >= scale)


def number(value: float, digits: int = 4, like: float | None = None) -> str:
    """`value` with that many significant digits and never an exponent: 16.02, 823.4, 0.03100.

    With `like` it gets the decimal places that `like` would get, so that pairs line up.
    """
    model = value if like is None else like
    if not math.isfinite(value) or not math.isfinite(model):
        return str(value)
    if model == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(model))))
    rounded = f"{abs(value):,.{places}f}"
    return (MINUS if value < 0 else "") + rounded


def time(us: float | None, digits: int = 4) -> str:
    """16.02 ms; an absent time is a dash."""
    if us is None:
        return NONE
    scale, unit = _unit(us)
    return f"{number(us / scale, digits)} {unit}"


def interval(bounds: tuple[float, float] | None, digits: int = 4, like: float | None = None) -> str:
    """[15.98, 16.06] ms, both ends in one unit, or in the unit and places that `like` would get."""
    if bounds is None:
        return NONE
    largest = abs(like) if like else max(abs(b) for b in bounds)
    scale, unit = _unit(largest)
    low, high = (number(b / scale, digits, largest / scale) for b in bounds)
    return f"[{low}, {high}] {unit}"


def estimate(us: float, bounds: tuple[float, float], digits: int = 3) -> str:
    """0.998 ms [0.959, 1.103] ms: a figure and its interval, all in one unit and as precise."""
    largest = max(abs(us), *(abs(b) for b in bounds))
    scale, unit = _unit(largest)
    middle, low, high = (number(v / scale, digits, largest / scale) for v in (us, *bounds))
    return f"{middle} {unit} [{low}, {high}] {unit}"


def path(before: float, after: float, digits: int = 4) -> str:
    """1.000 → 0.760 ms, both in one unit."""
    largest = max(abs(before), abs(after))
    scale, unit = _unit(largest)
    first, second = (number(us / scale, digits, largest / scale) for us in (before, after))
    return f"{first} → {second} {unit}"


def factor(value: float | None) -> str:
    return NONE if value is None else f"{number(value, 3)}×"


def factor_interval(bounds: tuple[float, float] | None) -> str:
    if bounds is None:
        return NONE
    low, high = (number(b, 3, max(bounds)) for b in bounds)
    return f"[{low}, {high}]"


def share(value: float | None) -> str:
    """A share of 1 with two digits, small ones in powers of ten: 0.31, 2.8e-6."""
    if value is None:
        return NONE
    mantissa, _, exponent = f"{value:.2g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f}%"


def count(value: int | None, noun: str | None = None) -> str:
    """12,288; with a noun also its plural: 1 case, 12 cases."""
    if value is None:
        return NONE
    return f"{value:,}" if noun is None else f"{value:,} {noun}{'' if value == 1 else 's'}"


def size(value: int | None) -> str:
    """Bytes in powers of 1024."""
    if value is None:
        return NONE
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value >= 1024**power:
            return f"{number(value / 1024**power, 3)} {unit}"
    return f"{value} B"


def nbytes(value: int | None) -> str:
    """768 B, 18.4 MB: in powers of 1000, as bandwidths are."""
    if value is None:
        return NONE
    for power, unit in ((3, "GB"), (2, "MB"), (1, "kB")):
        if value >= 1000**power:
            return f"{number(value / 1000**power, 3)} {unit}"
    return f"{value} B"


def date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def settings(values: Mapping[str, object]) -> str:
    """name=value pairs, or a dash."""
    return ", ".join(f"{name}={value}" for name, value in values.items()) or NONE


def knobs(by_shape: Mapping[str, Mapping[str, object]]) -> str:
    """Launch knobs per shape: "D=5120,T=1: BLOCK=512"."""
    return "; ".join(f"{shape}: {settings(chosen)}" for shape, chosen in by_shape.items()) or NONE


def device(kind: str, name: str | None, threads: int | None = None) -> str:
    """Says plainly whether a GPU was used."""
    if kind == "cuda":
        return f"Ran on the GPU: {name or 'CUDA device'}."
    where = f"{name or 'this machine'}" + (f", {count(threads, 'thread')}" if threads else "")
    return f"Ran on the CPU: {where}. No GPU was used."
