"""report.html: the run on one self-contained page that reads on a phone, in the dark, on paper."""

from reports import drift
from reports.chart import step_chart
from reports.render import context, environment
from reports.run import Run

NAME = "report.html"


def page(run: Run) -> str:
    """The page as HTML; it loads nothing, so it can be mailed or kept beside the ledger."""
    template = environment(autoescape=True).get_template("report.html.j2")
    charts = {kind: step_chart(run, kind) for kind in run.kinds}
    drifted = drift.chart(run.closing_verdict)
    return template.render(context(run), charts=charts, drift_chart=drifted)
