"""Our kernels beside peers: what is recorded, what it has to move, what is reported."""

import dataclasses
import json
import time

import pytest
import torch

from harness.__main__ import main
from harness.bench_jobs import (
    distinct_bytes,
    ends_first,
    moved_bytes,
    record_jobs,
    target_of,
)
from harness.bench_peers import PeerBench, PeerRow
from harness.bench_verdicts import verdicts
from harness.command_peers import show
from harness.records import Ceilings
from harness.workload import Workload
from optimized.change import nodes, region_of
from optimized.peers.peer import Bound, Peer, peers
from optimized.plan import Enabled, Plan

BF16 = 2
CEILINGS = Ceilings(
    device_name="a machine",
    read_gb_per_s=10.0,
    copy_gb_per_s=9.0,
    bf16_tflop_per_s=1.0,
    fp32_tflop_per_s=1.0,
    launch_us=1.0,
)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload.load("beam", "mini", "cpu")


@pytest.fixture(scope="module")
def jobs(workload):
    regions = ["qk_norm_scale", "linear", "swiglu", "experts"]
    inputs = workload.inputs(workload.target("decode-bs8"))
    return record_jobs(workload.model, regions, inputs, cache=1 << 20)


def test_calls_of_one_kind_are_one_job(workload, jobs):
    found = {(j.region, j.label): len(j.names) for j in jobs}
    assert found["linear", "model.layers.*.self_attn.o_proj"] == len(workload.model.model.layers)
    assert found["linear", "model.layers.*.mlp.down_proj"] == 2
    assert found["qk_norm_scale", "model.layers.*.self_attn.prepare"] == 2
    assert {label for region, label in found if region == "swiglu"} == {
        "model.layers.*.mlp.activate",
        "model.layers.*.mlp.experts.activate",
    }


def test_a_product_moves_rows_weight_and_result(jobs):
    (job,) = [j for j in jobs if j.label.endswith("o_proj")]
    assert job.nbytes == BF16 * (8 * 256 + 256 * 256 + 8 * 256)


def test_of_a_cache_only_what_is_written_counts(jobs):
    (job,) = [j for j in jobs if j.region == "qk_norm_scale"]
    heads, kv_heads, dim, tokens = 4, 2, 64, 8
    values = BF16 * tokens * dim * (2 * heads + 5 * kv_heads)
    others = 2 * BF16 * dim + tokens * (4 + 8)  # weights, factors, slots
    assert job.nbytes == values + others


def test_of_experts_only_the_chosen_count(workload):
    node = workload.model.get_submodule(nodes(workload.model, "experts")[0])
    x = torch.randn(1, 256).bfloat16()
    weights, experts = torch.ones(1, 4), torch.tensor([[3, 1, 2, 3]])
    a_expert = BF16 * (3 * 64 * 256)
    moved = moved_bytes(node, (x, weights, experts))
    assert 3 * a_expert <= moved < 3.1 * a_expert


def test_repeated_elements_are_one():
    assert distinct_bytes(torch.zeros(1, 8).expand(100, 8)) == 8 * 4
    assert distinct_bytes(torch.zeros(0, 8)) == 0


def test_a_small_call_is_repeated_and_a_large_one_is_not(jobs):
    job = next(j for j in jobs if j.label.endswith("o_proj"))
    count = len(job.names)
    assert job.chain(cache=1 << 40) == count * -(-16 // count)
    assert job.chain(cache=1) == count


def test_the_ends_come_first():
    assert ends_first([8, 1, 128, 16384, 8]) == [1, 16384, 128, 8]
    assert ends_first([4]) == [4] and ends_first([]) == []


def test_rows_are_tokens_of_a_targets_step(workload):
    assert target_of(16384, workload).tokens > 1
    assert target_of(8, workload).name == "decode-bs8"
    other = target_of(3, workload)
    assert (other.batch, other.tokens) == (3, 1)


def row(ratio: float, interval: tuple[float, float], mde: float) -> PeerRow:
    given = {"region": "r", "job": "j", "shapes": "1", "rows": 1, "change": "c", "peer": "p"}
    figures = {"ours_us": 1.0, "peer_us": ratio, "ratio": ratio, "ratio_interval": interval}
    rest = {"mde": mde, "bytes": 1, "read_share": 0.1, "calls": 16, "absent": None}
    return PeerRow(**given, **figures, **rest)


@pytest.mark.parametrize(
    ("made", "outcome"),
    [
        (row(1.2, (1.1, 1.3), 0.05), "faster"),
        (row(0.8, (0.7, 0.9), 0.05), "slower"),
        (row(0.97, (0.95, 0.99), 0.05), "equal"),
        (row(1.2, (0.9, 1.4), 0.05), "equal"),
    ],
)
def test_a_difference_counts_beyond_the_smallest_effect(made, outcome):
    assert made.outcome == outcome


def test_a_row_has_figures_or_a_reason():
    with pytest.raises(ValueError, match="either a ratio or a reason"):
        dataclasses.replace(row(1.2, (1.1, 1.3), 0.05), absent="not there")


def gate_in_one_rounding(node, a, gate, bias):
    def run():
        wide = torch.sigmoid(gate.float() + bias.float()[:, None])
        return (a.float() * wide).to(a.dtype)

    return Bound(run=run)


def test_a_peer_that_elides_a_rounding_is_told_where(workload):
    line = Enabled(name="output_gate", backend="inductor")
    plan = Plan(model="beam", device="cpu", changes=(line,))
    bench = PeerBench(workload, deadline=time.monotonic() + 100, plan=plan, pair_s=0.02)
    elides = Peer(
        name="elides",
        region="output_gate",
        library="torch",
        bind=gate_in_one_rounding,
        devices=("cpu",),
    )
    bench.peers = [elides]
    told = next(verdicts(bench, lambda _: None))
    assert (told.peer, told.contract, told.passed) == ("elides", "output_gate", False)
    assert any("gate + bias" in p and p.endswith("declared kept, elided") for p in told.points)
    assert told.differing is not None and told.differing > 0.1


class OddError(Exception):
    """What a library of its own kind raises."""


def raises_at_once(node, *args):
    raise OddError("no such card\nmore")


def raises_when_called(node, *args):
    return Bound(run=lambda: raises_at_once(node))


def test_a_peer_that_breaks_costs_its_own_row_only(workload):
    line = Enabled(name="parallel_projection", backend="torch")
    plan = Plan(model="beam", device="cpu", changes=(line,))
    region = "parallel_projection"
    broken = Peer(name="at once", region=region, library="torch", bind=raises_at_once)
    late = dataclasses.replace(broken, name="late", bind=raises_when_called)
    shy = dataclasses.replace(broken, name="shy", guard=lambda node, *args: "too small")
    against = "PyTorch", "at once", "late", "shy"
    options = {"plan": plan, "pair_s": 0.02, "against": against}
    bench = PeerBench(workload, deadline=time.monotonic() + 100, **options)
    bench.peers = [broken, late, shy]
    bench.ceilings = CEILINGS
    reasons = {(row.peer, row.absent) for row in bench.rows([1])}
    wrong = "OddError: no such card"
    assert reasons == {("PyTorch", None)} | {
        ("at once", wrong),
        ("late", wrong),
        ("shy", "declines: too small"),
    }


def test_what_has_to_be_compiled_is_called_once_before_anything_is_timed(workload, jobs):
    line = Enabled(name="parallel_projection", backend="torch")
    plan = Plan(model="beam", device="cpu", changes=(line,))
    called: list[str] = []

    def bind(node, *args):
        return Bound(run=lambda: called.append(region_of(node)))

    linear = Peer(name="library", region="linear", library="torch", bind=bind)
    broken = dataclasses.replace(linear, name="broken", bind=raises_at_once)
    bench = PeerBench(workload, deadline=time.monotonic() + 100, plan=plan)
    bench.peers, bench.absent = [broken, linear], {}
    bench.compile(jobs)
    kinds = [j.region for j in jobs]
    assert bench.compiled and called == ["linear"] * kinds.count("linear") and called


def test_what_was_timed_is_kept_whatever_comes(tmp_path, monkeypatch):
    def hangs(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.command_peers.verdicts", hangs)
    line = Enabled(name="parallel_projection", backend="torch")
    Plan(model="beam", device="cpu", changes=(line,)).save(tmp_path / "plan.toml")
    words = ["bench", "--peers", "--preset", "mini", "--device", "cpu", "--rows", "1,2"]
    words += ["--plan", str(tmp_path), "--out", str(tmp_path), "--seconds", "0.02"]
    words += ["--against", "PyTorch"]
    with pytest.raises(KeyboardInterrupt):
        main(words)
    found = json.loads((tmp_path / "peers.json").read_text())
    assert {r["rows"] for r in found["rows"]} == {1, 2} and found["verdicts"] == []


def test_where_no_library_was_timed_that_is_said(workload, capsys):
    show(PeerBench(workload, deadline=time.monotonic()), [], [])
    assert capsys.readouterr().out.splitlines()[-1] == "no library's kernel was timed"


def test_what_the_budget_does_not_reach_is_said(workload):
    bench = PeerBench(workload, deadline=time.monotonic() - 1)
    said: list[str] = []
    bench.note = said.append
    assert list(bench.rows([1, 8])) == []
    assert all(line.endswith("left out, the budget is spent") for line in said) and len(said) == 2
    judged = list(verdicts(bench, said.append))
    assert judged and {v.reason for v in judged} == {"the budget was spent before"}


def test_the_command_prints_every_peer_and_writes_the_figures(tmp_path, capsys):
    plan = Plan(
        model="beam",
        device="cpu",
        changes=(Enabled(name="parallel_projection", backend="torch"),),
    )
    plan.save(tmp_path / "plan.toml")
    words = ["bench", "--peers", "--preset", "mini", "--device", "cpu", "--rows", "1"]
    words += ["--plan", str(tmp_path), "--out", str(tmp_path), "--seconds", "0.02"]
    words += ["--against", "PyTorch", "torch linear"]
    assert main(words) in (0, 1)  # timings of a busy machine may show either
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "peers.json").read_text())
    compared = {r["peer"] for r in found["rows"] if r["absent"] is None}
    assert compared == {"PyTorch", "torch linear, packed"}
    assert all(r["ours_us"] > 0 and r["peer_us"] > 0 for r in found["rows"])
    assert {v["peer"]: v["passed"] for v in found["verdicts"]}["torch linear, packed"] is True
    absent = {p.name for p in peers() if p.devices == ("cuda",)}
    assert set(found["absent"]) == absent
    assert all(f"absent: {name}: runs on cuda" in printed for name in absent)


@pytest.mark.gpu
def test_on_a_card_chains_are_graphs_and_libraries_are_judged():
    card = Workload.load("beam", "mini", "cuda")
    bench = PeerBench(card, deadline=time.monotonic() + 200, pair_s=0.05, against=("Py", "vLLM"))
    bench.ours = [o for o in bench.ours if o.change.region in ("output_gate", "swiglu")]
    rows = list(bench.rows([1, 8]))
    timed = [r for r in rows if r.absent is None]
    assert {r.peer for r in timed} >= {"PyTorch"} and all(r.calls >= 16 for r in timed)
    assert all(r.ours_us and r.ours_us > 0.2 for r in timed)  # less than any kernel takes
    present = {p.name for p in bench.peers if bench.absent[p.name] is None}
    judged = {v.peer: v for v in verdicts(bench, print)}
    for name in present & {"vLLM 0.33 beam_output_gate", "vLLM 0.33 beam_silu_mul"}:
        assert judged[name].passed is not None
        assert {r.rows for r in timed if r.peer == name} == {1, 8}
