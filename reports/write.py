"""All that a run leaves for its readers, written from the ledger alone."""

from pathlib import Path

from harness.certificate import FOLDER
from reports import latency, layer, markdown, page, pr_page
from reports.files import make_folder, write_text
from reports.run import Run
from reports.summary import write_summary


def write_reports(run_dir: Path) -> list[Path]:
    """Write summary.json, report.md, report.html, what can be drawn of latency.svg and layer.svg,
    and prs/ with what was kept, into `run_dir`; returns their paths."""
    run_dir = Path(run_dir)
    run = Run.load(run_dir)
    return [
        write_summary(run_dir),
        write_text(run_dir / markdown.NAME, markdown.markdown(run)),
        write_text(run_dir / page.NAME, page.page(run)),
        *write_pictures(run, run_dir),
        *([run_dir / FOLDER] if pr_page.write(run_dir) else []),
    ]


def write_pictures(run: Run, folder: Path) -> list[Path]:
    """The two pictures of a run, as standalone SVG, in a folder that is made; what was not measured
    is not drawn."""
    drawn = {latency.NAME: latency.latency(run), layer.NAME: layer.layer(run)}
    made = {name: svg for name, svg in drawn.items() if svg is not None}
    if made:
        make_folder(folder)
    return [write_text(folder / name, svg) for name, svg in made.items()]
