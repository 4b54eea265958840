"""The tables of `python -m harness verify`: a verdict, its routing and drift, and times."""

from typing import Any

from harness import cli
from harness.command_bench import interval
from harness.records import Drift, Latency, Paired, Routing, Verdict

FLIPS_SHOWN = 8


def print_verdict(name: str, verdict: Verdict) -> None:
    outcome = "passed" if verdict.passed else f"REJECTED: {verdict.reason}"
    print(f"{name}, {verdict.scope}: {outcome} ({verdict.cases} cases, seed {verdict.seed})")
    cli.print_table(
        "outputs",
        ("output", "class", "elements", "bit-equal", "differ", "allowed", "worst, ULP", "at"),
        (
            (
                o.output,
                o.numerics,
                f"{o.elements:,}",
                f"{o.bit_equal_share:.5%}",
                f"{1 - o.bit_equal_share:.2e}",
                f"{o.allowed_share:.2e}",
                f"{o.worst_scaled:.3g}",
                worst(o.worst_index, o.worst_values),
            )
            for o in verdict.outputs
        ),
        left=2,
    )
    if verdict.points:
        cli.print_table(
            "interior rounding points",
            ("point", "operator", "source", "declared", "observed", "visible", "log likelihood"),
            (
                (
                    p.point,
                    p.operator,
                    p.source,
                    p.declared,
                    p.observed,
                    f"{p.visible_share:.2%}",
                    f"{p.log_likelihood_ratio:+.1f}",
                )
                for p in verdict.points
            ),
            left=5,
        )
    if verdict.routing is not None:
        print_routing(verdict.routing)
    if verdict.drift is not None:
        print_drift(verdict.drift)
    if verdict.domain is not None:
        title = "tested on; outside it the reference runs"
        cli.print_table(title, ("argument", "as"), verdict.domain.lines(), left=2)
    for note in verdict.notes:
        print(f"note: {note}")


def print_routing(found: Routing) -> None:
    """How many choices were compared, and those that differ, the furthest from a tie first."""
    if not found.flips:
        print(f"{found.rows:,} rows of choices compared, none differs")
        return
    shown = found.flips[:FLIPS_SHOWN]
    cli.print_table(
        f"{found.flipped:,} of {found.rows:,} rows of choices differ; the largest margins",
        ("call", "output", "row", "margin", "noise explains"),
        (
            (
                flip.where,
                flip.output,
                flip.row,
                "masked out" if flip.margin is None else f"{flip.margin:.3g}",
                f"{flip.limit:.3g}",
            )
            for flip in shown
        ),
        left=2,
    )


def print_drift(drift: Drift) -> None:
    cli.print_table(
        "free-running drift from the reference, no gate",
        ("of", "routes", "step", "first layer", "last layer", "KL mean", "KL max", "top-1 flips"),
        (
            (
                "reference under noise" if row.of == "reference" else row.of,
                row.routes,
                row.step,
                error(row.layers[0] if row.layers else None),
                error(row.layers[-1] if row.layers else None),
                f"{row.kl_mean:.2g}",
                f"{row.kl_max:.2g}",
                f"{row.flips} of {row.tokens}",
            )
            for row in drift.rows
        ),
        left=3,
    )
    if drift.unforced is not None:
        print(f"note: routes were not forced: {drift.unforced}")


def error(relative: float | None) -> str:
    return "-" if relative is None else f"{relative:.2g}"


def worst(index: tuple[int, ...] | None, values: tuple[float, float] | None) -> str:
    if index is None or values is None:
        return "-"
    return f"{list(index)}: {values[0]:.6g} for {values[1]:.6g}"


def print_latency(latency: Latency) -> None:
    def row(kind: str, pair: Paired) -> tuple[Any, ...]:
        gain = f"{pair.gain_us:.1f} {interval(pair.gain_interval_us)}"
        times = f"{pair.base_us:.1f}", f"{pair.candidate_us:.1f}"
        return kind, *times, gain, f"{pair.mde_us:.1f}", pair.pairs

    cli.print_table(
        "times, us",
        ("step", "without", "with", "gain [95% interval]", "detectable", "pairs"),
        (row("decode", latency.decode), row("prefill", latency.prefill)),
    )
