"""Capturing on a CPU: every call's module, line, cost and time; nothing is left behind."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.errors import UserError
from tests.traces.toy_stack import WIDTH, Tower, line_of, tower
from traces.capture import capture
from traces.kernels import kernel_rows
from traces.trace import Trace, load


@pytest.fixture(scope="module")
def model_and_trace(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tower, Trace, Path]:
    torch.manual_seed(0)
    model, inputs = tower()
    path = tmp_path_factory.mktemp("trace") / "tower.json.gz"
    return model, capture(model, inputs, path=path, title="tower"), path


def test_all_time_has_a_module_and_a_line(model_and_trace: tuple[Tower, Trace, Path]) -> None:
    _, trace, _ = model_and_trace
    summary = trace.summary()
    assert summary["attributed_share"] == 1.0
    assert summary["ambiguous"] == 0
    assert summary["kernels"] == len(trace.kernels) == 39
    assert 0 < summary["kernel_us"] <= trace.profiled_step_us
    assert trace.step_us > 0


def test_an_operator_has_the_line_that_called_it(
    model_and_trace: tuple[Tower, Trace, Path],
) -> None:
    _, trace, _ = model_and_trace
    rsqrt = [k for k in trace.kernels if k.name == "aten::rsqrt"]
    assert [trace.module(k) for k in rsqrt] == ["storeys.0.squash", "storeys.1.squash"]
    assert {k.source for k in rsqrt} == {line_of("# norm line")}
    assert {trace.region(k) for k in rsqrt} == {"squash"}
    store = next(k for k in trace.kernels if k.name == "aten::copy_")
    assert (trace.module(store), store.source) == ("", line_of("self.store[2:3]"))


def test_a_product_has_its_bytes_and_operations(
    model_and_trace: tuple[Tower, Trace, Path],
) -> None:
    _, trace, _ = model_and_trace
    products = [k for k in trace.kernels if k.name == "aten::mm"]
    assert len(products) == 4
    weight, rows = WIDTH * WIDTH * 2, 4 * WIDTH * 2
    assert {k.bytes for k in products} == {weight + 2 * rows}
    assert {k.flops for k in products} == {2 * 4 * WIDTH * WIDTH}
    assert all(k.matmul and k.peak == "bf16" for k in products)


def test_compulsory_bytes_are_weights_input_and_nothing_made(
    model_and_trace: tuple[Tower, Trace, Path],
) -> None:
    _, trace, _ = model_and_trace
    per_storey = 2 * WIDTH * WIDTH * 2 + WIDTH * 2
    assert trace.compulsory_bytes == 2 * per_storey + 4 * WIDTH * 2


def test_hooks_are_gone_afterwards(model_and_trace: tuple[Tower, Trace, Path]) -> None:
    model, _, _ = model_and_trace
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_file_reads_back_and_opens_in_perfetto(
    model_and_trace: tuple[Tower, Trace, Path],
) -> None:
    _, trace, path = model_and_trace
    assert load(path) == trace
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    calls = [e for e in events if e.get("cat") == "call"]
    assert [e["args"]["module"] for e in calls] == [trace.module(k) for k in trace.kernels]


def test_a_damaged_file_is_bad_input(
    model_and_trace: tuple[Tower, Trace, Path], tmp_path: Path
) -> None:
    _, _, path = model_and_trace
    broken = tmp_path / "broken.json.gz"
    broken.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="neither JSON nor gzipped JSON"):
        load(broken)
    foreign = tmp_path / "foreign.json"
    foreign.write_text('{"traceEvents": []}')
    with pytest.raises(UserError, match="another tool wrote it"):
        load(foreign)


def test_a_replaced_forward_is_one_place_with_the_costs_of_its_class() -> None:
    model, inputs = tower(1)
    plain = capture(model, inputs)
    squash = model.storeys[0].squash

    def forward(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * scale

    squash.forward = forward
    replaced = capture(model, inputs)
    own = [k for k in replaced.kernels if replaced.module(k) == "storeys.0.squash"]
    assert [k.name for k in own] == ["aten::tanh", "aten::mul"]
    assert {k.source for k in own} == {line_of("def forward(self, x: Tensor, scale: Tensor)")}
    # x and scale are read once, the result is written once, whatever happens in between.
    assert sum(k.bytes or 0 for k in own) == 2 * 4 * WIDTH * 2 + WIDTH * 2
    assert replaced.summary()["attributed_share"] == 1.0
    assert len(replaced.kernels) < len(plain.kernels)
    assert replaced.compulsory_bytes == plain.compulsory_bytes


def test_a_graph_on_a_cpu_is_bad_input() -> None:
    model, inputs = tower(1)
    with pytest.raises(UserError, match="no CUDA graphs"):
        capture(model, inputs, mode="graph")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_gpu_step_is_attributed(mode: str, tmp_path: Path) -> None:
    model, (h,) = tower()
    model = model.cuda()
    trace = capture(model, (h.cuda(),), mode=mode, path=tmp_path / "t.json.gz")  # type: ignore[arg-type]
    assert trace.summary()["attributed_share"] >= 0.99
    assert len([k for k in trace.kernels if k.matmul]) == 4
    assert {trace.module(k) for k in trace.kernels if k.matmul} == {
        "storeys.0.twins",
        "storeys.1.twins",
    }
    assert load(tmp_path / "t.json.gz") == trace


@pytest.mark.gpu
def test_a_gpu_trace_knows_triton_kernels_as_written() -> None:
    from optimized.catalog import changes
    from optimized.change import apply_change, share
    from reference import beam

    config = beam.configs["mini"]
    model = beam.build(config, "cuda", 0)
    cache = beam.cache(config, 1, 40, "cuda")
    ids = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    inputs = (ids, torch.full_like(ids, 39), cache)
    change = next(c for c in changes().values() if c.implementations[0].backend == "triton")
    candidate: nn.Module = share(model)
    names = apply_change(candidate, change, "triton")
    trace = capture(candidate, inputs, mode="graph")
    written = [row for row in kernel_rows(trace) if row.written]
    assert {row.module for row in written} == set(names)
    assert all(row.source and row.source.startswith("optimized/") for row in written)
    assert all(row.bytes for row in written)
    assert trace.summary()["attributed_share"] >= 0.99
