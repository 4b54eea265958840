"""`python -m traces`: capture a step, and read what a trace says.

Reading a trace file needs no torch; capturing does.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import cli
from harness.arguments import count, require_file, seed
from harness.errors import UserError
from traces import diff_page, tables
from traces.diff import diff, noise
from traces.kernels import BY, KernelTable, aggregate, kernel_rows
from traces.layers import layer_map
from traces.trace import Trace, load

if TYPE_CHECKING:
    from torch import nn

    from harness.workload import Workload


def parser() -> argparse.ArgumentParser:
    p = cli.Parser(prog="python -m traces", description=__doc__)
    commands = p.add_subparsers(dest="command", required=True)

    capture = commands.add_parser("capture", help="trace one step of a model into a file")
    add_model(capture, required=True)
    capture.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.json.gz")
    capture.add_argument(
        "--no-ceilings", action="store_true", help="do not measure the machine: no floors"
    )

    table = commands.add_parser("table", help="kernels with time, bytes, floor and gaps")
    add_source(table)
    table.add_argument("--by", choices=BY, help="sum the kernels; without it, in launch order")
    table.add_argument("--top", type=count, metavar="N", help="only the first N rows")

    layers = commands.add_parser("layer-map", help="the kernels of one layer of each kind")
    add_source(layers)

    candidates = commands.add_parser("candidates", help="regions to fuse, by predicted gain")
    add_source(candidates)

    changes = commands.add_parser("diff", help="what changed from trace A to trace B, by module")
    changes.add_argument("before", type=Path, metavar="A")
    changes.add_argument("after", type=Path, metavar="B")
    changes.add_argument("--top", type=count, metavar="N", help="only the first N rows")
    changes.add_argument("--html", type=Path, metavar="FILE", help="write a page, too")

    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print JSON")
    return p


def add_source(p: argparse.ArgumentParser) -> None:
    p.add_argument("file", nargs="?", type=Path, metavar="FILE", help="a file that capture wrote")
    add_model(p, required=False)


def add_model(p: argparse.ArgumentParser, *, required: bool) -> None:
    p.add_argument("--model", required=required, help="a known model, or a model file (.py)")
    p.add_argument("--preset", default="auto", help="a size of the model; auto picks by the device")
    p.add_argument(
        "--target", default="decode-bs1", help="the step: decode-bs1, prefill-8x2048, ..."
    )
    p.add_argument("--device", default="auto", help="auto, cpu or cuda")
    p.add_argument("--mode", choices=("eager", "graph"), help="graph on CUDA, else eager")
    p.add_argument(
        "--change",
        action="append",
        default=[],
        metavar="NAME[:BACKEND]",
        help="apply a change first, also inductor:REGION; may be repeated",
    )
    p.add_argument("--seed", type=seed, default=0, help="seed of weights and inputs")


def main(argv: Sequence[str] | None = None) -> int:
    def run() -> None:
        options = parser().parse_args(argv)
        COMMANDS[options.command](options)

    return cli.run(run)


def run_capture(options: argparse.Namespace) -> None:
    require_file(options.output)
    trace = traced(options, path=options.output)
    if options.json:
        print_json({"file": str(options.output), **trace.summary()})
    else:
        tables.print_summary(trace)
        then = f"python -m traces table {options.output}"
        print(f"written to {options.output}; open it in Perfetto, or: {then}")


def run_table(options: argparse.Namespace) -> None:
    rows = rows_of(options)
    shown = rows if options.by is None else aggregate(rows, options.by)
    if options.json:
        shown = shown[: options.top]
        print_json({**rows.summary(), "rows": [row.to_json() for row in shown]})
    else:
        tables.print_rows(rows, shown, options.top, regions=options.by == "region")


def run_layer_map(options: argparse.Namespace) -> None:
    rows = rows_of(options)
    maps = layer_map(rows, rows.trace.outline)
    if options.json:
        print_json([m.to_json() for m in maps])
    else:
        tables.print_layers(maps)


def run_candidates(options: argparse.Namespace) -> None:
    from traces.opportunities import opportunities

    rows = rows_of(options)
    if rows.trace.ceilings is None:
        raise UserError(
            f"{options.file} was captured with --no-ceilings, so gains cannot be predicted; "
            "capture it again without"
        )
    found = opportunities(rows, rows.trace.ceilings, rows.trace.outline)
    if options.json:
        print_json([o.to_json() for o in found])
    else:
        tables.print_candidates(found)


def run_diff(options: argparse.Namespace) -> None:
    require_file(options.html, "--html")
    before, after = load(options.before), load(options.after)
    sides = kernel_rows(before), kernel_rows(after)
    found, still = diff(*sides), noise(*sides)
    if options.html is not None:
        page = diff_page.page(before, after, found[: options.top], still)
        diff_page.write(options.html, page)
    if options.json:
        print_json(
            {
                "before": before.summary(),
                "after": after.summary(),
                "noise": None if still is None else still.to_json(),
                "modules": [d.to_json() for d in found[: options.top]],
            }
        )
    else:
        tables.print_diff(before, after, found[: options.top], still)


COMMANDS = {
    "capture": run_capture,
    "table": run_table,
    "layer-map": run_layer_map,
    "candidates": run_candidates,
    "diff": run_diff,
}


def rows_of(options: argparse.Namespace) -> KernelTable:
    """The rows of the file, or of the model that is traced now."""
    if (options.file is None) == (options.model is None):
        raise UserError(
            "give either a trace file or --model NAME; see python -m traces table --help"
        )
    trace = load(options.file) if options.file is not None else traced(options, path=None)
    return kernel_rows(trace)


def traced(options: argparse.Namespace, path: Path | None) -> Trace:
    from harness.ceilings import measure_ceilings
    from harness.step import default_mode
    from harness.workload import Workload
    from traces.capture import capture

    workload = Workload.load(options.model, options.preset, options.device, options.seed)
    target = workload.target(options.target)
    model = changed(workload, options.change)
    ceilings = None
    if not getattr(options, "no_ceilings", False):
        ceilings = measure_ceilings(workload.device)
    return capture(
        model,
        workload.inputs(target),
        path=path,
        mode=options.mode or default_mode(workload.device),
        title=f"{workload.name} {workload.preset}, {target.describe()}",
        ceilings=ceilings,
    )


def changed(workload: "Workload", changes: Sequence[str]) -> "nn.Module":
    """The workload's model with the named changes applied."""
    if not changes:
        return workload.model
    from optimized.catalog import load_change
    from optimized.change import apply_change, share
    from optimized.inductor import PREFIX, inductor_change

    model = share(workload.model)
    for text in changes:
        compiled = text.startswith(PREFIX)  # the only name that holds a colon itself
        name, _, backend = (text, "", "") if compiled else text.partition(":")
        try:
            change = inductor_change(name[len(PREFIX) :]) if compiled else load_change(name)
            device = workload.device.type
            fitting = [i.backend for i in change.implementations if device in i.devices]
            if not fitting:
                raise ValueError(f"change {name} has no implementation for {device}")
            apply_change(model, change, backend or fitting[0])
        except ValueError as error:
            raise UserError(str(error)) from error
    return model


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=1))


if __name__ == "__main__":
    sys.exit(main())
