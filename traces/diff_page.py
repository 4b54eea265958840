"""The difference of two traces as one self-contained HTML page: offline, light and dark, print.

Bars show every module's time before and after to one scale; what came and went is one click away.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from harness.errors import UserError
from traces.diff import UNKNOWN, Difference, Noise
from traces.short import short_name
from traces.trace import Trace

STYLE = """
:root { color-scheme: light dark; --paper: #fcfbf8; --ink: #1b1a17; --muted: #68645c;
        --rule: #e0dcd2; --before: #958f82; --faster: #17694a; --slower: #a32330; }
@media (prefers-color-scheme: dark) { :root { --paper: #151513; --ink: #ebe8e0; --muted: #a29d92;
        --rule: #34322d; --before: #6b675e; --faster: #6ac497; --slower: #f08581; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 60rem; background: var(--paper);
       color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums;
       overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 1rem; }
p { margin: .3rem 0; } .muted { color: var(--muted); }
article { border-top: 1px solid var(--rule); padding: .7rem 0; break-inside: avoid; }
h2 { font: 600 .95rem/1.4 ui-monospace, monospace; margin: 0; }
.line { display: flex; flex-wrap: wrap; gap: 0 1.2rem; font-size: .9rem; }
.faster, .vanished { color: var(--faster); } .slower, .appeared { color: var(--slower); }
svg { display: block; width: 100%; height: 18px; margin: .35rem 0; }
summary { cursor: pointer; color: var(--muted); font-size: .85rem; }
ul { margin: .3rem 0; padding-left: 1.2rem; font-size: .85rem; }
code { font-size: .95em; }
@media print { details::details-content { content-visibility: visible; block-size: auto; } }
"""


def page(before: Trace, after: Trace, found: Sequence[Difference], still: Noise | None) -> str:
    """The page: both steps in figures, then a module each, in the order of `found`; `still` is
    what they differ by where nothing changed."""
    longest = max((us for d in found for us in (d.before_us, d.after_us)), default=0.0) or 1.0
    title = "Two traces compared"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f"<p>Before: {_step(before)}</p>\n<p>After: {_step(after)}</p>\n"
        f"<p><b>Modules: {_counts(found)}.</b></p>\n"
        '<p class="muted">A kernel is one program on the GPU, or one call of an operator on a CPU. '
        "Each module is a sum over a step; * stands for a layer's number. What changed comes "
        "first, the upper bar is before, the lower after, all to one scale.</p>\n"
        f'<p class="muted">{escape(_capital(UNKNOWN if still is None else still.words))}.</p>\n'
        + "".join(_module(d, longest) for d in found)
        + "</body>\n</html>\n"
    )


def write(path: Path, text: str) -> Path:
    """Write the page whole or not at all; UserError where it cannot be."""
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another file") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
    return path


def _step(trace: Trace) -> str:
    figures = trace.summary()
    return (
        f"<b>{figures['step_us']:,.1f} µs</b> a step ({escape(trace.title)}), "
        f"{figures['kernels']:,} kernels in {figures['kernel_us']:,.1f} µs, "
        f"{figures['gap_us']:,.1f} µs of gaps"
    )


def _counts(found: Sequence[Difference]) -> str:
    order = "slower", "faster", "appeared", "vanished", "same"
    counts = [(word, sum(d.status == word for d in found)) for word in order]
    words = ", ".join(f"{n} {word}" for word, n in counts if n) or "no module"
    other = sum(d.status == "same" and d.changed for d in found)
    return words + (f", {other} of them with other kernels" if other else "")


def _module(d: Difference, longest: float) -> str:
    calls = f"{d.kernels_before} → {d.kernels_after} kernels"
    beyond = "" if d.shift == 1.0 else f", {d.beyond_us:+,.1f} beyond the shift of all"
    return (
        f"<article>\n<h2>{escape(d.module or '(the model)')}</h2>\n"
        f'<p class="line"><b class="{d.status}">{d.status}</b>'
        f"<span>{d.before_us:,.1f} → {d.after_us:,.1f} µs</span>"
        f'<span class="{d.status}">{d.delta_us:+,.1f} µs{beyond}</span><span>{calls}</span></p>\n'
        f"{_bars(d, longest)}{_names('appeared', d.appeared)}{_names('vanished', d.vanished)}"
        "</article>\n"
    )


def _bars(d: Difference, longest: float) -> str:
    colour = {"same": "muted", "vanished": "faster", "appeared": "slower"}.get(d.status, d.status)
    rows = (d.before_us, "before", 0), (d.after_us, colour, 9)
    boxes = "".join(
        f'<rect x="0" y="{y}" width="{1000 * us / longest:.1f}" height="8" fill="var(--{fill})"/>'
        for us, fill, y in rows
    )
    return f'<svg viewBox="0 0 1000 18" preserveAspectRatio="none" role="img">{boxes}</svg>\n'


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _name(name: str) -> str:
    short = short_name(name)
    whole = "" if short == name else f' title="{escape(name)}"'
    return f"<code{whole}>{escape(short)}</code>"


def _names(word: str, counts: Mapping[str, int]) -> str:
    if not counts:
        return ""
    total = sum(counts.values())
    lines = "".join(f"<li>{n} × {_name(name)}</li>" for name, n in counts.items())
    return f"<details><summary>{total} {word}</summary><ul>{lines}</ul></details>\n"
