"""report.html: the run on one self-contained page that reads on a phone, in the dark, on paper."""

import os
from pathlib import Path

from reports import drift, fit, headline, numerics
from reports.chart import step_chart
from reports.render import context, environment
from reports.run import Run

NAME = "report.html"
BESIDE = "ledger.jsonl", "summary.json", "report.md", "plan.toml"


def page(run: Run, folder: Path | None = None) -> str:
    """The page as HTML; it loads nothing, so it can be mailed or kept beside the ledger. Its links
    to the run's files are for a page in `folder`, by default the run's own."""
    template = environment(autoescape=True).get_template("report.html.j2")
    charts = {kind: step_chart(run, kind) for kind in run.kinds}
    shown = context(run)
    return template.render(
        shown,
        charts=charts,
        drift_chart=drift.chart(run.closing_verdict),
        bars={
            kind: headline.bar(line, unchanged=run.unchanged)
            for kind, line in shown["headlines"].items()
        },
        ulp_picture=numerics.histograms(run),
        ulp_counts=numerics.counts,
        ulp_bins=" / ".join(numerics.BINS),
        fit_picture=fit.fit(run),
        budget_picture=fit.budget(shown["step_parts"]),
        files=files(run),
        traced=any((run.directory / "traces").glob("*.json.gz")),
        where="" if folder is None else relative(run.directory, folder),
    )


def relative(directory: Path, folder: Path) -> str:
    """The way from `folder` to `directory` in front of a link, "" for the same."""
    way = Path(os.path.relpath(directory, folder)).as_posix()
    return "" if way == "." else f"{way}/"


def files(run: Run) -> list[str]:
    """What lies beside the ledger for a closer look, as paths from the run's directory."""
    found = [name for name in BESIDE if (run.directory / name).is_file()]
    traces = sorted((run.directory / "traces").glob("*.json.gz"))
    return found + [path.relative_to(run.directory).as_posix() for path in traces]
