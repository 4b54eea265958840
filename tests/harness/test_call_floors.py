"""The least time of one call, against counts made by hand; what is below it is refused in words."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.bench import ImpossibleTimeError
from harness.bench_jobs import Job, record_jobs
from harness.bench_peers import PeerBench
from harness.call_floors import CallFloors, call_work
from harness.records import Ceilings, Paired
from optimized.change import nodes
from optimized.plan import Enabled, Plan
from tests.harness.judged import mini

BF16 = 2
CARD = torch.device("cuda")
CEILINGS = Ceilings(
    device_name="a card",
    read_gb_per_s=1.0,  # a byte takes a nanosecond
    copy_gb_per_s=1.0,
    bf16_tflop_per_s=1e3,
    fp32_tflop_per_s=1e3,
    launch_us=1.0,
)


def jobs_of(region: str) -> list[Job]:
    inputs = mini().inputs(mini().target("decode-bs8"))
    return record_jobs(mini().model, [region], inputs, cache=1 << 20)


def test_a_product_reads_its_weight_and_its_rows() -> None:
    job = next(j for j in jobs_of("linear") if j.label.endswith("o_proj"))
    node = mini().model.get_submodule(job.names[0])
    nbytes, flops = call_work(node, job.calls[0], job.rows)
    assert nbytes == BF16 * (256 * 256 + 8 * 256)  # what it writes may stay in an L2
    assert flops == 2 * 8 * 256 * 256


def test_of_caches_and_masks_nothing_counts() -> None:
    (job, *_) = jobs_of("attend")
    node = mini().model.get_submodule(nodes(mini().model, "attend")[0])
    nbytes, flops = call_work(node, job.calls[0], job.rows)
    query = next(t for t in job.calls[0] if isinstance(t, torch.Tensor))
    assert nbytes == query.nbytes and flops == 0


def test_a_cold_call_below_its_bytes_is_an_error_and_a_cpu_s_has_no_floor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("harness.call_floors.last_cache_bytes", lambda device: 100_000)
    job = next(j for j in jobs_of("linear") if j.label.endswith("o_proj"))
    node = mini().model.get_submodule(job.names[0])
    cold_us = BF16 * (256 * 256 + 8 * 256) / 1e3
    floors = CallFloors(CARD, CEILINGS)
    floors.require(node, job, "a call", 1.01 * cold_us, cached=0)
    with pytest.raises(ImpossibleTimeError, match="a call took .* need 135.2 us on a card"):
        floors.require(node, job, "a call", 0.99 * cold_us, cached=0)
    floors.require(node, job, "a call", 0.99 * cold_us)  # a cache may hold a part of it
    with pytest.raises(ImpossibleTimeError):
        floors.require(node, job, "a call", 0.99 * (cold_us - 100))
    CallFloors(torch.device("cpu"), CEILINGS).require(node, job, "a call", 1e-9, cached=0)


def test_a_peer_faster_than_its_bytes_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(
        model="beam",
        device="cpu",
        changes=(Enabled(name="parallel_projection", backend="torch"),),
    )
    options: Any = {"plan": plan, "cold_l2": True, "against": ("PyTorch",)}
    bench = PeerBench(mini(), deadline=time.monotonic() + 100, **options)
    bench.floors = CallFloors(CARD, CEILINGS)
    us = {"candidate_us": 1e6, "base_us": 1e-3}
    monkeypatch.setattr(bench, "_compare", lambda *_: paired(**us))
    monkeypatch.setattr("harness.bench_peers.smallest_effect", lambda *_, **__: 1.0)
    rows = list(bench.rows([1]))
    assert rows and all(r.ratio is None and r.ours_us is None for r in rows)
    assert all((r.absent or "").startswith("impossible time: PyTorch, one call") for r in rows)
    us["base_us"] = 1e6
    assert all(r.absent is None for r in bench.rows([1]))


def paired(**us: float) -> Paired:
    around: Any = {"candidate_interval_us": (1.0, 2.0), "gain_interval_us": (0.0, 1.0)}
    return Paired(**us, **around, gain_us=1.0, mde_us=1.0, pairs=5)


def test_a_region_s_time_below_its_operations_refuses_the_candidate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from harness import region_bench
    from harness.records import Verdict

    good = Verdict(scope="region", passed=True, reason=None, cases=1, seed=0, outputs=(), points=())

    def judged(verdict: Verdict) -> Verdict:
        found = "; ".join(worker.findings) or None
        return good if found is None else region_bench.broken(found, 0)

    def impossible(*_: Any) -> None:
        raise ImpossibleTimeError("one call took 1.0 us, but it needs 2.0 us")

    worker: Any = SimpleNamespace(findings={}, judged=judged, close=lambda: None)
    sandbox: Any = SimpleNamespace(open=lambda change, backend: worker)
    monkeypatch.setattr(region_bench, "region_time", impossible)
    bench = region_bench.RegionBench(mini(), sandbox)
    found = region_bench.Found(region="linear", backend="torch", verdict=good)
    refused = bench._timed(found, "a_change", jobs_of("linear")[0])
    assert refused.time is None and not refused.verdict.passed
    assert refused.verdict.reason == "while timed: one call took 1.0 us, but it needs 2.0 us"
