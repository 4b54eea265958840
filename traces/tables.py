"""Traces as tables on the terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.cli import print_table
from harness.records import Ceilings, KernelRow, LayerMap
from traces.diff import UNKNOWN, Difference, Noise
from traces.kernels import BEYOND_MEMORY, KernelTable, beyond_memory, headroom
from traces.short import short_name
from traces.trace import Trace

if TYPE_CHECKING:
    from traces.opportunities import Opportunity

NAME_WIDTH = 44  # characters of a kernel's name that are shown


def print_summary(trace: Trace) -> None:
    s = trace.summary()
    print(f"{trace.title}, {trace.mode} on {trace.device}, median of {trace.steps} steps")
    print(
        f"step {s['step_us']:,.0f} us, profiled {s['profiled_step_us']:,.0f} us; "
        f"{s['kernels']} kernels take {s['kernel_us']:,.0f} us, gaps {s['gap_us']:,.0f} us"
    )
    doubt = f", {s['ambiguous']} ambiguous" if s["ambiguous"] else ""
    print(f"{s['attributed_share']:.2%} of kernel time attributed to module and line{doubt}")


def print_budget(table: KernelTable) -> None:
    """The step's time, each microsecond once."""
    found = table.budget
    parts = (
        ("bytes and operations at the ceilings", found.bound_us),
        ("launch gaps: nothing ran", found.gap_us),
        ("ramp, dependency, beyond the floor", found.rest_us),
        ("kernels whose bytes are not known", found.unknown_us),
        ("from the first kernel's start to the last one's end", found.step_us),
        ("and hidden behind other kernels", found.hidden_us),
    )
    share = found.step_us or 1.0
    print_table(
        "where the step's time goes",
        ("part", "us", "share"),
        [(words, f"{us:,.1f}", f"{us / share:.1%}") for words, us in parts],
    )


def print_rows(
    table: KernelTable, shown: Sequence[KernelRow], top: int | None, *, regions: bool = False
) -> None:
    """`shown` are the rows, or their sums, with the region in place of the module if `regions`."""
    print_summary(table.trace)
    total = sum(row.time_us for row in shown)
    rows = list(shown)[:top]
    print_table(
        "",
        (
            "kernel",
            "region" if regions else "module",
            "source",
            "calls",
            "us",
            "exposed us",
            "share",
            "MB",
            "of read bw",
            "MFLOP",
            "floor us",
        )
        + ("x floor", "gap us"),
        [
            (
                cut(row.name) + ("?" if row.ambiguous else "") + ("*" if row.written else ""),
                (row.region or "(the model)") if regions else row.module,
                row.source or "-",
                row.calls,
                f"{row.time_us:.1f}",
                number(row.exposed_us, 1.0),
                f"{row.time_us / total:.1%}" if total else "-",
                number(row.bytes, 1e6),
                percent(row, table.trace.ceilings),
                number(row.flops, 1e6),
                number(row.floor_us, 1.0),
                number(headroom(row), 1.0),
                number(row.gap_us, 1.0),
            )
            for row in rows
        ],
        left=3,
    )
    if len(rows) < len(shown):
        print(f"{len(shown) - len(rows)} more rows; --top shows as many as you ask for")
    if any(row.written for row in rows):
        print("* a kernel from optimized/ or a change file")
    if any(row.ambiguous for row in rows):
        print("? its module or line is not certain")
    if beyond_memory(rows, table.trace.ceilings):
        print(BEYOND_MEMORY)
    print_budget(table)


def print_layers(maps: Sequence[LayerMap]) -> None:
    if not maps:
        print("the model has no nn.ModuleList, so it has no layers")
    for m in maps:
        total = sum(row.time_us for row in m.kernels)
        print_table(
            f"{m.kind} ({m.module}): {len(m.kernels)} kernels, {total:.1f} us",
            ("kernel", "module", "source", "us", "gap us"),
            [
                (
                    cut(row.name),
                    row.module[len(m.module) + 1 :],
                    row.source or "-",
                    f"{row.time_us:.1f}",
                    number(row.gap_us, 1.0),
                )
                for row in m.kernels
            ],
            left=3,
        )


def print_candidates(found: "Sequence[Opportunity]") -> None:
    print_table(
        "regions by predicted gain a step",
        ("region", "nodes", "launches", "saved", "MB saved", "us", "floor us", "predicted us")
        + ("bound us",),
        [
            (
                o.region,
                o.node_count,
                o.launches,
                o.launches_saved,
                f"{o.bytes_saved / 1e6:.2f}",
                f"{o.time_us + o.gap_us:.1f}",
                f"{o.floor_us:.1f}",
                f"{o.predicted_us:.1f}",
                f"{o.bound_us:.1f}",
            )
            for o in found
        ],
    )


def print_diff(
    before: Trace, after: Trace, found: Sequence[Difference], still: Noise | None
) -> None:
    print("before: ", end="")
    print_summary(before)
    print("after: ", end="")
    print_summary(after)
    print(UNKNOWN if still is None else still.words)
    print_table(
        "",
        ("module", "change", "before us", "after us", "difference", "beyond shift", "kernels")
        + ("appeared", "vanished"),
        [
            (
                d.module or "(the model)",
                d.status,
                f"{d.before_us:.1f}",
                f"{d.after_us:.1f}",
                f"{d.delta_us:+.1f}",
                f"{d.beyond_us:+.1f}",
                f"{d.kernels_before} -> {d.kernels_after}",
                names(d.appeared),
                names(d.vanished),
            )
            for d in found
        ],
        left=2,
    )


def names(counts: dict[str, int]) -> str:
    """The commonest kernel of `counts` and how many others there are: "3 mul, 4 more"."""
    if not counts:
        return "-"
    name, count = max(counts.items(), key=lambda item: item[1])
    others = sum(counts.values()) - count
    return f"{count} {cut(name)}" + (f", {others} more" if others else "")


def percent(row: KernelRow, ceilings: Ceilings | None) -> str:
    """The share of the read bandwidth; a dash where it is unknown."""
    share = None if ceilings is None else row.read_share(ceilings)
    return "-" if share is None else f"{share:.0%}"


def cut(name: str) -> str:
    name = short_name(name)
    return name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 3]}..."


def number(value: float | None, unit: float) -> str:
    """`value` in `unit`s to three digits; a dash where it is unknown."""
    if value is None:
        return "-"
    scaled = value / unit
    return "0" if scaled == 0 else f"{scaled:.3g}" if abs(scaled) < 1000 else f"{scaled:,.0f}"
