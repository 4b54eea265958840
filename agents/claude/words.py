"""The judge's findings in words for whoever wrote the change. Torch-free."""

from collections.abc import Iterable, Sequence
from typing import Any

from harness.records import Attempt, Baseline, Ceilings, Environment, Paired, UlpReport, Verdict
from traces.opportunities import Opportunity

ROWS = 40


def verdict(v: Verdict) -> str:
    """What was decided, which output differs where and by how much, and what each rounding point
    was declared and seen to be."""
    said = "passed" if v.passed else f"rejected: {v.reason}"
    lines = [f"{v.scope} verdict: {said}", f"{v.cases} cases, seed {v.seed}"]
    lines += [output(report) for report in v.outputs]
    for p in v.points:
        told = f"declared {p.declared}, seen {p.observed}"
        lines.append(f"rounding point `{p.point}` ({p.operator}, {p.source}): {told}")
    return "\n".join([*lines, *(f"note: {note}" for note in v.notes)])


def output(r: UlpReport) -> str:
    words = (
        f"output {r.output} ({r.numerics}): {1 - r.bit_equal_share:.3g} of {r.elements:,} elements "
        f"differ from the contract's replay, {r.allowed_share:.3g} may"
    )
    if r.worst_index is not None and r.worst_values is not None:
        ours, theirs = r.worst_values
        words += (
            f"; the worst, {r.worst_scaled:.3g} BF16 ULP of its row's largest value, at "
            f"{list(r.worst_index)}: {ours:.6g} for {theirs:.6g}"
        )
    return (
        f"{words}; error against FP64 {r.golden_error:.3g}, the reference's own "
        f"{r.reference_golden_error:.3g}"
    )


def pair(what: str, p: Paired) -> str:
    low, high = p.gain_interval_us
    return (
        f"{what}: {p.base_us:.1f} us without, {p.candidate_us:.1f} us with it; gain "
        f"{p.gain_us:.1f} us [{low:.1f}, {high:.1f}], smallest detectable {p.mde_us:.1f} us"
    )


def attempt(a: Attempt) -> str:
    """The decision first, then all that led to it."""
    lines = [f"{a.status}: {a.reason}"]
    for found in (a.region_verdict, a.model_verdict):
        if found is not None:
            lines.append(verdict(found))
    if a.latency is not None:
        lines += [pair("decode", a.latency.decode), pair("prefill", a.latency.prefill)]
    if a.audit is not None and a.audit.reason is not None:
        lines.append(f"audit: {a.audit.reason}")
    return "\n".join(lines)


def attempts(found: Sequence[Attempt]) -> str:
    lines = [
        f"{a.index}. {a.name.rpartition('/')[2]} ({a.backend}), {a.region}: {a.status}: {a.reason}"
        for a in found
        if a.control is None
    ]
    return "\n".join([f"{len(lines)} attempts so far", *lines])


def opportunities(found: Iterable[Opportunity]) -> str:
    head = (
        "region | modules | launches | to save | bytes to save | kernels, us | gaps, us | floor, us"
        " | predicted gain, us | gain at the floor, us | contains | inside"
    )
    lines = [
        f"{o.region} | {o.node_count} | {o.launches} | {o.launches_saved} | {o.bytes_saved} | "
        f"{o.time_us:.1f} | {o.gap_us:.1f} | {o.floor_us:.1f} | {o.predicted_us:.1f} | "
        f"{o.bound_us:.1f} | {', '.join(o.contains) or '-'} | {', '.join(o.inside) or '-'}"
        for o in found
    ]
    return "\n".join([head, *lines])


def kernels(event: dict[str, Any] | None, region: str | None) -> str:
    """The ledger's kernel table, most time first."""
    if event is None:
        return "no step was traced"
    rows = [r for r in event["rows"] if region is None or r["region"] == region]
    rows.sort(key=lambda r: -r["time_us"])
    lines = [kernel(row) for row in rows[:ROWS]]
    total = sum(r["time_us"] for r in rows)
    head = f"{len(rows)} lines that launch kernels, {total:.1f} us in all"
    left = f", the first {ROWS}" if len(rows) > ROWS else ""
    return "\n".join([f"{head}{left}: us | calls | bytes | flops | floor, us | what", *lines])


def kernel(r: dict[str, Any]) -> str:
    def shown(value: float | None, form: str = "g") -> str:
        return "?" if value is None else f"{value:{form}}"

    where = f"{r['region'] or r['module'] or 'model'} {r['source'] or ''}"
    return (
        f"{r['time_us']:.1f} | {r['calls']} | {shown(r['bytes'])} | {shown(r['flops'])} | "
        f"{shown(r['floor_us'], '.1f')} | {r['name'][:80]} | {where}"
    )


def layers(event: dict[str, Any] | None) -> str:
    if event is None:
        return "no step was traced"
    lines = [f"{len(event['maps'])} kinds of layers: us | calls | bytes | flops | floor, us | what"]
    for one in event["maps"]:
        lines.append(f"{one['kind']} ({one['module']}), {len(one['kernels'])} kernels")
        lines += [f"  {kernel(row)}" for row in one["kernels"]]
    return "\n".join(lines)


def machine(e: Environment, c: Ceilings | None) -> str:
    what = f"{e.device_name} ({e.device}), {e.cpu_threads} CPU thread(s)"
    lines = [f"{what}; PyTorch {e.torch}, Triton {e.triton}, CUDA {e.cuda}"]
    if c is not None:
        lines.append(
            f"measured: {c.read_gb_per_s:.0f} GB/s read, {c.copy_gb_per_s:.0f} GB/s copied, "
            f"{c.bf16_tflop_per_s:.3g} TFLOP/s in BF16, {c.fp32_tflop_per_s:.3g} in FP32, "
            f"{c.launch_us:.2f} us for the smallest kernel or operator call"
        )
    return "\n".join(lines)


def baselines(found: Iterable[Baseline]) -> str:
    lines = []
    for b in found:
        pairs = ("decode", b.decode), ("prefill", b.prefill)
        times = [f"{kind} {t.median_us:.1f} us" for kind, t in pairs if t is not None]
        lines.append(f"{b.name}: {', '.join(times) or b.absent}")
    return "\n".join(lines)
