"""The closing table of a run on the terminal: one line per change, then the headline."""

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.records import Attempt, Status
from reports import figures, text
from reports.render import context
from reports.run import Run

STYLES = {Status.KEPT: "green", Status.REJECTED: "yellow", Status.FAILED: "red"}
HEADINGS = ("", "change", "backend", "predicted", "realised", "decode", "prefill")
NUMERIC = frozenset(HEADINGS[3:])
REASON = "reason"
PLAIN = str.maketrans({"µ": "u", "→": "->", "×": "x", text.NONE: "-", text.MINUS: "-"})
GAP = 2  # columns between two


def print_run(run: Run | Path, console: Console | None = None) -> None:
    """Print the changes of `run` (a run, or its directory): a table on a terminal, plain columns
    with one line per change elsewhere. Colours follow the console, and so NO_COLOR."""
    console = console or Console()
    run = run if isinstance(run, Run) else Run.load(run)
    if console.is_terminal:
        _print_table(run, console)
    else:
        _print_columns(run, console)
    for line in headline(run):
        _print(console, line)


def cells(run: Run, attempt: Attempt) -> list[str]:
    """One change as words, in the order of HEADINGS; what it realised is of the target."""
    latency, gain = attempt.latency, run.pair(attempt)
    realised = decode = prefill = text.NONE
    if latency is not None and gain is not None:
        realised = text.estimate(gain.gain_us, gain.gain_interval_us)
        decode = text.time(latency.decode.candidate_us)
        prefill = text.time(latency.prefill.candidate_us)
    predicted = text.time(attempt.predicted_us, 3)
    return [attempt.status, attempt.name, attempt.backend, predicted, realised, decode, prefill]


def headline(run: Run) -> list[str]:
    """Where and what ran, then the target and the other kind before, after, over each baseline."""
    facts = context(run)
    lines = [f"{facts['title']}. {facts['device']}"]
    for kind in run.kinds:
        start, end = figures.ends(run, kind)
        if start is None:
            lines.append(f"{kind}: not measured")
            continue
        if end is None:
            lines.append(f"{kind}: {text.time(start.median_us)}, nothing kept")
            continue
        moved = text.path(start.median_us, end.median_us)
        if run.unchanged:
            moved = (
                f"{text.time(start.median_us)}, nothing kept; {text.time(end.median_us)} at the end"
            )
        like = max(start.median_us, end.median_us)  # all three in one unit
        within = text.interval(end.interval_us, 4, like)
        lines.append(f"{kind}: {moved} {within}; {_versus(run, kind)}")
    if (error := figures.median_error_us(run)) is not None:
        each = f"{text.time(error, 3)} a {run.header.kind} step"
        lines.append(f"median of |predicted - realised|: {each}")
    refused = sum(c.status is Status.REJECTED for c in run.controls)
    if (closing := run.closing_verdict) is not None:
        said = "passed" if closing.passed else f"failed: {closing.reason}"
        lines.append(f"{closing.layers} of the result judged: {said}")
    if (spent := facts["spent"]) is not None:
        lines.append(f"the language model used up {spent.words}")
    lines.append(f"controls: {refused} of {len(run.controls)} refused")
    if facts["state"]:
        lines.append(facts["state"])
    return lines


def _versus(run: Run, kind: str) -> str:
    parts = []
    for row in figures.baseline_rows(run):
        name, ratio = row.baseline.name, getattr(row, kind)
        if ratio is not None:
            bounds = text.factor_interval(ratio.interval)
            timed = figures.alone(run, row.baseline, kind)
            by_itself = run.after is not None and run.after.pairs is not None and timed
            of = f" (of {text.time(by_itself.median_us)} alone)" if by_itself else ""
            parts.append(f"{text.factor(ratio.value)} {bounds} {name}{of}")
        else:
            parts.append(f"no {name} ({row.baseline.absent or row.baseline.note or 'not timed'})")
    return "against the baselines " + ", ".join(parts)


def _print_table(run: Run, console: Console) -> None:
    rows = [[*cells(run, a), _line(a.reason)] for a in run.changes()]
    wide = _width([[*HEADINGS, REASON], *rows]) <= console.width  # else reasons stand below
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for heading in HEADINGS:
        justify = "right" if heading in NUMERIC else "left"
        table.add_column(heading, justify=justify, no_wrap=heading != "realised")
    if wide:
        table.add_column(REASON, no_wrap=True)
    for attempt, row in zip(run.changes(), rows, strict=True):
        words = row if wide else row[:-1]
        shown = [Text(_encodable(console, word)) for word in words]
        shown[0].stylize(STYLES[attempt.status])
        table.add_row(*shown)
    console.print(table)
    if not wide:
        for attempt in run.changes():
            line = _encodable(console, f"{attempt.name}: {_line(attempt.reason)}")
            console.print(Text(line, style=STYLES[attempt.status]), soft_wrap=True)


def _width(rows: list[list[str]]) -> int:
    """Columns that a table of these rows takes."""
    return sum(max(map(len, column)) + GAP for column in zip(*rows, strict=True))


def _print_columns(run: Run, console: Console) -> None:
    rows = [[*HEADINGS, REASON]]
    rows += [[*cells(run, a), _line(a.reason)] for a in run.changes()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    for row in rows:
        padded = [
            word.rjust(width) if heading in NUMERIC else word.ljust(width)
            for word, width, heading in zip(row, widths, HEADINGS, strict=False)
        ]
        _print(console, "  ".join([*padded, row[-1]]))


def _print(console: Console, line: str) -> None:
    """As it is: no markup, no highlighting, and no wrapping at a width that nobody has."""
    line = _encodable(console, line)
    console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _encodable(console: Console, words: str) -> str:
    """`words` in what the terminal can show: "us" and "->" where it knows no Unicode."""
    if console.encoding.startswith("utf"):
        return words
    return words.translate(PLAIN).encode(console.encoding, "replace").decode(console.encoding)


def _line(words: str) -> str:
    return " ".join(words.split())
