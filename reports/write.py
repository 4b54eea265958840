"""All that a run leaves for its readers, written from the ledger alone."""

from pathlib import Path

from reports import markdown, page
from reports.files import write_text
from reports.run import Run
from reports.summary import write_summary


def write_reports(run_dir: Path) -> list[Path]:
    """Write summary.json, report.md and report.html into `run_dir`; returns their paths."""
    run_dir = Path(run_dir)
    run = Run.load(run_dir)
    return [
        write_summary(run_dir),
        write_text(run_dir / markdown.NAME, markdown.markdown(run)),
        write_text(run_dir / page.NAME, page.page(run)),
    ]
