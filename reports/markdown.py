"""report.md: the run as Markdown, for reviews and terminals."""

import re

from reports.render import context, environment
from reports.run import Run

NAME = "report.md"


def markdown(run: Run) -> str:
    """The report as GitHub-flavoured Markdown with the same facts as the page."""
    template = environment(autoescape=False).get_template("report.md.j2")
    text = template.render(context(run))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
