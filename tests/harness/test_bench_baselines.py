"""Layers of one kind are compiled once, whatever their numbers; baselines say what they lack."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from harness import baselines
from harness.errors import UserError
from harness.layer_compile import LayerCompiler, outermost_layers
from harness.records import Baseline
from harness.workload import StepInputs, Workload
from optimized.change import share

WIDTH = 16


class Scale(nn.Module):
    """R(x / sqrt(n)): what depth-scaled residuals do, with another constant in every layer."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n
        self.by = 1 / math.sqrt(n)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


class Layer(nn.Module):
    def __init__(self, n: int, wide: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH if wide else WIDTH, dtype=torch.bfloat16)
        self.scale = Scale(n)

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        cache[:, -1] = x[:, -1]
        return self.scale(torch.tanh(self.up(x))[..., :WIDTH]) + x


class Model(nn.Module):
    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.layers = nn.ModuleList(Layer(n + 1, wide=n >= 5) for n in range(layers))
        self.requires_grad_(False)

    def forward(self, ids: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
        x = torch.nn.functional.one_hot(ids, WIDTH).to(torch.bfloat16)
        for layer in cast(nn.ModuleList, self.inner.layers):
            x = layer(x, cache)
        return x


def inputs(tokens: int) -> StepInputs:
    ids = torch.arange(tokens)[None]
    cache = torch.zeros(1, 4, WIDTH, dtype=torch.bfloat16)
    return StepInputs(ids=ids, positions=ids, cache=cache)


def workload(model: nn.Module) -> Workload:
    return cast(Workload, SimpleNamespace(model=model, device=torch.device("cpu")))


class Counting:
    """A torch.compile backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        self.graphs += 1
        return graph.forward


def test_layers_of_a_kind_share_one_graph():
    torch.compiler.reset()
    reference = Model()
    model, backend = share(reference), Counting()
    compiler = LayerCompiler(model, backend=backend)
    with torch.no_grad():
        for call, tokens in (("decode", 1), ("prefill", 3)):
            compiler.call = call
            args = inputs(tokens).args
            assert torch.equal(model(*args), reference(*args))
    assert compiler.kinds == 4  # two kinds of layer, two shapes of call
    assert backend.graphs == 4


def test_layers_with_the_same_numbers_keep_them_constant():
    torch.compiler.reset()
    model, backend = Model(), Counting()
    for layer in cast(nn.ModuleList, model.inner.layers):
        cast(Scale, layer.scale).by = 0.5
    LayerCompiler(model, backend=backend)
    with torch.no_grad():
        model(*inputs(1).args)
    assert backend.graphs == 2


def test_the_reference_stays_as_it_was():
    reference = Model()
    LayerCompiler(share(reference), backend=Counting())
    assert all("forward" not in vars(m) for m in reference.modules())


def test_only_outermost_lists_hold_layers():
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), nn.Identity()])
    assert [type(m) for m in outermost_layers(model)] == [nn.ModuleList, nn.Identity]
    assert outermost_layers(nn.Linear(2, 2)) == []


def test_eager_and_graph_on_a_cpu():
    found = list(
        baselines.run_baselines(workload(Model()), inputs(1), inputs(3), budget_s=2, only="eager")
    )
    assert [b.name for b in found] == ["eager"]
    eager = found[0]
    assert eager.decode is not None and eager.prefill is not None
    assert eager.decode.median_us > 0
    (graph,) = baselines.run_baselines(workload(Model()), inputs(1), inputs(3), only="graph")
    assert (graph.decode, graph.absent) == (None, "a CPU has no CUDA graphs")


@pytest.mark.slow
def test_compiled_layers_are_a_baseline(monkeypatch):
    def compiled() -> tuple[Baseline, str]:
        (baseline,) = baselines.run_baselines(
            workload(Model(layers=2)), inputs(1), inputs(3), budget_s=200, only="compile"
        )
        assert baseline.decode is not None and baseline.note is not None
        return baseline, baseline.note

    whole, note = compiled()
    assert whole.prefill is not None
    assert note.startswith("layers compiled as 1 kind(s): decode, mode 'default', in ")
    assert "; prefill, mode 'default', in " in note
    monkeypatch.setitem(baselines.PREFILL_COMPILE_FACTOR, "cpu", float("inf"))
    half, note = compiled()
    assert half.prefill is None
    assert "no prefill: it takes about inf s to compile" in note


def test_no_compiler_is_a_reason(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    (compiled,) = baselines.run_baselines(workload(Model()), inputs(1), inputs(3), only="compile")
    assert compiled.absent is not None
    assert compiled.absent.startswith("no C++ compiler (no-such-compiler) on this machine; install")


def test_an_unknown_baseline_is_named():
    with pytest.raises(UserError, match="unknown baseline 'fast'; choose one of eager, graph"):
        next(baselines.run_baselines(workload(Model()), inputs(1), inputs(3), only="fast"))
