"""`python -m reports html|md|pictures|pr RUN`: a run's reports and pull requests again, from its
ledger alone; `curve FILE`: what `harness bench --curve` wrote, as a
figure; `notebook NAME`: an executed notebook."""

import argparse
import sys
from pathlib import Path

from harness import cli
from harness.arguments import count
from harness.certificate import ROOT
from harness.errors import ExitCode, UserError

try:
    from reports import ci, curves, markdown, notebook, page, pr_notebook, pr_open, pr_page
    from reports.files import write_text
    from reports.run import Run
    from reports.write import write_pictures
except ModuleNotFoundError as missing:
    cli.end_without(missing, __name__)

NAMES = {"html": page.NAME, "md": markdown.NAME}


def parser() -> argparse.ArgumentParser:
    p = cli.Parser(
        prog="python -m reports", description="Write the report of a run from its ledger."
    )
    commands = p.add_subparsers(dest="command", required=True)
    for command, name in NAMES.items():
        sub = commands.add_parser(command, help=f"write {name}")
        sub.add_argument("run", type=Path, metavar="RUN", help="a run directory of agents.run")
        sub.add_argument(
            "-o",
            "--output",
            type=Path,
            metavar="FILE",
            help=f"default: {name} in the run directory",
        )
    pictures = commands.add_parser("pictures", help="write latency.svg and layer.svg")
    pictures.add_argument("run", type=Path, metavar="RUN", help="a run directory of agents.run")
    pictures.add_argument("-o", "--output", type=Path, metavar="DIR", help="default: the run's")
    pr = commands.add_parser("pr", help="write prs/: a patch and a page for each kept change")
    pr.add_argument("run", type=Path, metavar="RUN", help="a run directory of agents.run")
    pr.add_argument("--change", type=count, metavar="N", help="the change of that number alone")
    pr.add_argument("--open", action="store_true", help="push branches and open them with gh")
    pr.add_argument("--remote", default="origin", help="where branches go; default origin")
    pr.add_argument(
        "--notebooks", action="store_true", help="execute compare.ipynb into each (some seconds)"
    )
    pr.add_argument("-o", "--output", type=Path, metavar="DIR", help="default: the run's")
    figure = commands.add_parser("curve", help="draw what harness bench --curve wrote")
    figure.add_argument("file", type=Path, metavar="FILE", help="a curve-*.json")
    figure.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: the same name with .svg"
    )
    execute = commands.add_parser("notebook", help="execute one of the notebooks with parameters")
    notebook.add_arguments(execute)
    check = commands.add_parser("ci", help="the current run against a baseline; 1 on a regression")
    ci.add_arguments(check)
    return p


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if arguments.command == "curve":
        svg = curves.figure(curves.load(arguments.file))
        print(write_text(arguments.output or arguments.file.with_suffix(".svg"), svg))
        return ExitCode.DONE
    if arguments.command == "notebook":
        return notebook.run(arguments)
    if arguments.command == "ci":
        return ci.run(arguments)
    if arguments.command == "pr":
        return pull_requests(arguments)
    run = Run.load(arguments.run)
    if arguments.command == "pictures":
        paths = write_pictures(run, arguments.output or arguments.run)
        if not paths:
            raise UserError(f"{arguments.run} has neither times nor traced layers to draw yet")
        print(*paths, sep="\n")
        return ExitCode.DONE
    output = arguments.output or arguments.run / NAMES[arguments.command]
    html = arguments.command == "html"
    print(write_text(output, page.page(run, output.parent) if html else markdown.markdown(run)))
    return ExitCode.DONE


def pull_requests(a: argparse.Namespace) -> int:
    """Write the bundles, then open them, or say how."""
    written = pr_page.write(a.run, a.output, compiling=True, chosen=a.change)
    if a.notebooks:
        pr_notebook.write(folder for b, folder in written if a.change in (None, b.index))
    made = pr_open.requests(written, a.run.resolve().name)
    requests = pr_open.chosen(made, written, a.change)
    for bundle, folder in written[len(made) :]:
        print(f"{folder}: cannot be opened: {pr_open.why_not(bundle)}", file=sys.stderr)
    if not a.open or pr_open.gh() is None:
        for request in requests:
            print(f"# {request.page.parent}", *pr_open.commands(request, a.remote), sep="\n")
    if not a.open:
        return ExitCode.DONE
    git = pr_open.require(ROOT, a.remote)
    for request in requests:
        print(pr_open.open_request(git, request, a.remote), flush=True)
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(cli.run(main))
