"""Synthetic ledgers: one run on a CPU and one on a GPU, written through the real ledger."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.ledger import Ledger
from harness.records import (
    Attempt,
    Baseline,
    Ceilings,
    Environment,
    KernelRow,
    Latency,
    LayerMap,
    Paired,
    PointReport,
    Proposal,
    Status,
    Timing,
    UlpReport,
    Verdict,
)

CPU = Environment(
    device="cpu", device_name="Intel Xeon 8481C", gpu_uuid=None, driver=None, sm_clock_mhz=None,
    memory_clock_mhz=None, power_w=None, temperature_c=None, cpu_threads=2, python="3.11.2",
    torch="2.13.0", triton="3.9.0", cuda=None, git_commit="417aea4+dirty",
)  # fmt: skip
CUDA = replace(
    CPU, device="cuda", device_name="NVIDIA H200", gpu_uuid="GPU-5f0c", driver="580.82",
    sm_clock_mhz=1980, memory_clock_mhz=3201, power_w=118.5, temperature_c=34, cuda="13.0",
)  # fmt: skip
SCRIPT = "<script>alert('x')</script>"


def timing(us: float) -> Timing:
    return Timing(median_us=us, interval_us=(us * 0.99, us * 1.01), samples=40)


def paired(base: float, candidate: float) -> Paired:
    gain = base - candidate
    return Paired(
        base_us=base,
        candidate_us=candidate,
        candidate_interval_us=(candidate * 0.99, candidate * 1.01),
        gain_us=gain,
        gain_interval_us=(gain - 8.0, gain + 8.0),
        mde_us=12.5,
        pairs=40,
    )


def ulp(output: str, differing: float = 2.8e-6) -> UlpReport:
    elements = 65536
    changed = round(elements * differing)
    return UlpReport(
        output=output,
        numerics="reduction",
        elements=elements,
        bit_equal_share=1 - differing,
        one_ulp_share=differing,
        worst_scaled=0.5,
        histogram={"0": elements - changed, "1": changed, "2": 0, "3-4": 0, "5-8": 0, ">8": 0},
        worst_index=(3, 17),
        worst_values=(0.01226, 0.01221),
        noise_share=1.1e-6,
        allowed_share=4.4e-6,
        golden_error=0.00231,
        reference_golden_error=0.00231,
    )


def point(name: str, observed: str = "kept") -> PointReport:
    return PointReport(
        point=name,
        operator="aten.mul",
        source="reference/beam.py:153",
        declared="kept",
        observed=observed,
        visible_share=0.28,
        log_likelihood_ratio=912.0 if observed == "kept" else -1204.5,
    )


def verdict(scope: str = "region", reason: str | None = None, **changed) -> Verdict:
    fields = {"outputs": (ulp("h"), ulp("x")), "points": (point("post_norm"), point("x_scale"))}
    return Verdict(
        scope=scope, passed=reason is None, reason=reason, cases=12, seed=7, **(fields | changed)
    )


def attempt(index: int, name: str, status: Status, reason: str, **fields) -> Attempt:
    defaults = {
        "region": name.split(":")[-1],
        "backend": "inductor",
        "predicted_us": None,
        "bound_us": None,
        "knobs": {},
        "region_verdict": None,
        "model_verdict": None,
        "latency": None,
        "control": None,
        "parent": None,
        "seconds": 21.5,
    }
    return Attempt(index=index, name=name, status=status, reason=reason, **(defaults | fields))


def attempts(base: float, prefill: float) -> list[Attempt]:
    """Two controls, two kept, one slower, one wrong at a rounding point, one broken."""

    def latency(before: float, after: float, prefill_after: float) -> Latency:
        return Latency(decode=paired(before, after), prefill=paired(prefill, prefill_after))

    good = {"region_verdict": verdict(), "model_verdict": verdict("model", points=())}
    first, second = base - 150.0, base - 240.0
    none = "no gain beyond the smallest detectable effect"
    wrong = "rounds once where the reference rounds at post_norm"
    return [
        attempt(1, "control:identity", Status.REJECTED, none,
                control="identity", **good, latency=latency(base, base + 1.0, prefill)),
        attempt(2, "control:slowed", Status.REJECTED, "slower by 3%", control="slowed", **good,
                latency=latency(base, base * 1.03, prefill * 1.03)),
        attempt(3, "residual_boundary", Status.KEPT, "faster by 150.0 us, beyond 12.5 us", **good,
                predicted_us=130.0, bound_us=210.0, knobs={"D=64,T=1": {"BLOCK": 512}},
                latency=latency(base, first, prefill - 900.0)),
        attempt(4, "inductor:swiglu", Status.REJECTED, f"slower by 74.0 us {SCRIPT} | a", **good,
                predicted_us=55.0, bound_us=80.0, latency=latency(first, first + 74.0, prefill)),
        attempt(5, "qk_norm_rope", Status.REJECTED, wrong, predicted_us=61.0, bound_us=70.0,
                region_verdict=verdict(reason=wrong, outputs=(ulp("q", 0.32), ulp("k")),
                                       points=(point("post_norm", "elided"), point("rope")))),
        attempt(6, "inductor:router", Status.FAILED, "CompileError: no kernel for sort",
                predicted_us=20.0, bound_us=31.0),
        attempt(7, "parallel_projection", Status.KEPT, "faster by 90.0 us, beyond 12.5 us", **good,
                predicted_us=99.0, bound_us=110.0, latency=latency(first, second, prefill - 1100)),
    ]  # fmt: skip


def kernel(name: str, us: float, written: bool = False) -> KernelRow:
    return KernelRow(
        name=name, module="layers.3.boundary", region="residual_boundary",
        source="reference/beam.py:151", calls=1, time_us=us, bytes=20480, flops=1024,
        floor_us=us / 2, gap_us=0.4, written=written,
    )  # fmt: skip


def kernels(names: list[str], written: int = 0) -> tuple[KernelRow, ...]:
    return tuple(kernel(n, 6.0 - 0.5 * i, i < written) for i, n in enumerate(names))


BEFORE = kernels(["aten::pow", "aten::mean", "aten::rsqrt", "aten::mul", "aten::mm"])
AFTER = kernels(["residual_boundary_kernel", "aten::mm"], written=1)


def begin(directory: Path, environment: Environment, base: float, prefill: float) -> Ledger:
    """A ledger up to the proposals."""
    ledger = Ledger.create(directory)
    cuda = environment.device == "cuda"
    ledger.append("run", {
        "schema": 1, "target": "decode-bs1", "model": "beam",
        "preset": "tp8-rank" if cuda else "mini", "device": environment.device, "seed": 0,
        "proposer": "auto", "options": {"max_changes": None, "budget_minutes": 5.0},
        "workload": {"decode": "decode 1 x 1 token(s), context 250",
                     "prefill": "prefill 8 x 64 token(s), context 250"},
    })  # fmt: skip
    ledger.append("environment", environment)
    ledger.append("ceilings", Ceilings(
        device_name=environment.device_name, read_gb_per_s=4330.0, copy_gb_per_s=4280.0,
        bf16_tflop_per_s=793.0, fp32_tflop_per_s=67.0, launch_us=0.95,
    ))  # fmt: skip
    slow = 8.0 if cuda else 1.0
    ledger.append("baseline", Baseline(
        name="eager", decode=timing(base * slow), prefill=timing(prefill), absent=None,
    ))  # fmt: skip
    no_graph = "CUDA graphs need a GPU"
    ledger.append("baseline", Baseline(
        name="graph", decode=timing(base) if cuda else None,
        prefill=timing(prefill) if cuda else None, absent=None if cuda else no_graph,
    ))  # fmt: skip
    ledger.append("baseline", Baseline(
        name="compile", decode=timing(base * 0.7), prefill=timing(prefill * 0.6), absent=None,
        note="compiled by layer kind",
    ))  # fmt: skip
    ledger.append("effect", {"decode_us": 12.5, "prefill_us": 80.0})
    ledger.append("kernels", {
        "when": "before", "rows": [r.to_json() for r in BEFORE], "step_us": base,
        "profiled_step_us": base * 1.1, "attributed_share": 0.996,
    })  # fmt: skip
    maps = LayerMap(kind="moe_sliding", module="layers.3", kernels=BEFORE)
    ledger.append("layers", {"when": "before", "maps": [maps.to_json()]})
    proposal = Proposal(
        change="residual_boundary", region="residual_boundary", backend="inductor",
        hypothesis="nine launches become one", launches_saved=8, bytes_saved=81920,
        predicted_us=130.0, bound_us=210.0, node_count=104,
    )  # fmt: skip
    ledger.append("proposals", {"proposals": [proposal.to_json()]})
    return ledger


def write(directory: Path, environment: Environment, base: float, prefill: float) -> Path:
    ledger = begin(directory, environment, base, prefill)
    for tried in attempts(base, prefill):
        start = {"index": tried.index, "name": tried.name, "backend": tried.backend}
        ledger.append("started", start)
        ledger.append("attempt", tried)
        if tried.status is Status.KEPT and tried.latency is not None:
            decode, fill = tried.latency.decode.candidate_us, tried.latency.prefill.candidate_us
            ledger.append("measured", {
                "decode": timing(decode + 1.0).to_json(),
                "prefill": timing(fill).to_json(),
            })  # fmt: skip
    rows = [r.to_json() for r in AFTER]
    ledger.append("kernels", {
        "when": "after", "rows": rows, "step_us": base - 240.0,
        "profiled_step_us": base - 200.0, "attributed_share": 0.994,
    })  # fmt: skip
    after = LayerMap(kind="moe_sliding", module="layers.3", kernels=AFTER)
    ledger.append("layers", {"when": "after", "maps": [after.to_json()]})
    ledger.append("final", {
        "decode": timing(base - 240.0).to_json(), "prefill": timing(prefill - 1100.0).to_json(),
        "other_targets": {"decode-bs8": timing(2.0 * base).to_json()},
    })  # fmt: skip
    ledger.append("stopped", {"reason": "done"})
    return directory


@pytest.fixture
def cpu_run(tmp_path: Path) -> Path:
    """decode 1,000 -> 760 us, prefill 9 -> 7.9 ms, without a graph baseline."""
    return write(tmp_path / "cpu", CPU, 1000.0, 9000.0)


@pytest.fixture
def cuda_run(tmp_path: Path) -> Path:
    """decode 16 ms in a graph -> 15.76 ms, all three baselines."""
    return write(tmp_path / "cuda", CUDA, 16000.0, 1147000.0)


@pytest.fixture
def prefill_run(cpu_run: Path) -> Path:
    """`cpu_run` as a run for a prefill: what is kept gains 0.9 and 1.1 ms of it."""
    path = cpu_run / Ledger.NAME
    path.write_text(path.read_text().replace('"decode-bs1"', '"prefill-8x2048"'))
    return cpu_run


@pytest.fixture
def unfinished_run(tmp_path: Path) -> Path:
    """Killed while the third attempt was tried: two controls, nothing kept yet."""
    ledger = begin(tmp_path / "unfinished", CPU, 1000.0, 9000.0)
    for tried in attempts(1000.0, 9000.0)[:2]:
        ledger.append("attempt", tried)
    ledger.append("started", {"index": 3, "name": "residual_boundary", "backend": "inductor"})
    return ledger.directory
