"""Compiled regions: the reference's bits, one compilation for all layers, and the direct calls."""

import copy

import pytest
import torch
from torch import Tensor, nn

from optimized.change import Contract, apply_change, share
from optimized.compiled import Region, compile_node, view_of
from optimized.inductor import (
    generated_source,
    inductor_change,
    inductor_implementation,
    numerics_options,
)
from reference import beam
from reference.beam import OutputGate, QKNormRope, ResidualBoundary
from reference.cache import LayerCache
from tests.optimized.kernel_checks import DEVICE, bf16, same_bits
from tests.reference.noise import assert_within, within

EPS = 1e-6
WIDTH = 64


def boundary_args(rows: int, seed: int = 0) -> tuple[Tensor, ...]:
    weights = bf16(WIDTH, seed=seed + 2), bf16(WIDTH, seed=seed + 3)
    return bf16(1, rows, WIDTH, seed=seed), bf16(1, rows, WIDTH, seed=seed + 1), *weights


def rope_args(rows: int, heads: int = 4, kv: int = 2, dim: int = 32, slots: int = 40):
    q, k, v = bf16(1, rows, heads, dim), bf16(1, rows, kv, dim, seed=1), bf16(1, rows, kv, dim)
    angles = torch.rand(1, rows, dim // 2, device=DEVICE)
    caches = (torch.zeros(1, slots + 1, kv, dim, dtype=torch.bfloat16, device=DEVICE) for _ in "kv")
    where = torch.arange(rows, device=DEVICE)[None] + 1
    return q, k, v, bf16(dim), bf16(dim, seed=1), angles.cos(), angles.sin(), *caches, where


@pytest.fixture
def graphs(monkeypatch):
    """Counts what Inductor compiles and what Dynamo serves; each test starts with no region."""
    counts = {"compiled": 0, "dispatched": 0}
    backend, call = Region._backend, Region.__call__

    def counted_backend(self, *args):
        counts["compiled"] += 1
        return backend(self, *args)

    def counted_call(self, *args):
        counts["dispatched"] += 1
        return call(self, *args)

    monkeypatch.setattr(Region, "_backend", counted_backend)
    monkeypatch.setattr(Region, "__call__", counted_call)
    return counts


def compiled(node: nn.Module):
    return inductor_implementation().build(node, None)


def fresh(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass, so that no graph of another test serves it."""
    return type(cls.__name__, (cls,), {})


def reordered(node, args, count=16):
    outputs = [], []
    for seed in range(count):
        order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        for output, y in zip(outputs, node(*(a[..., order] for a in args)), strict=True):
            output.append(y[..., order.argsort()])
    return outputs


def test_boundaries_of_all_layers_share_two_graphs(graphs):
    """One for a decode step, one for any prompt; 104 boundaries with a coefficient pair each."""
    cls = fresh(ResidualBoundary)
    nodes = [cls(n, EPS) for n in range(2, 106)]
    functions = [compiled(node) for node in nodes]
    for rows in (1, 37, 64):
        args = boundary_args(rows)
        for node, function in zip(nodes[:: 104 // 8], functions[:: 104 // 8], strict=True):
            noise = reordered(node, args)
            for ours, theirs, others in zip(function(*args), node(*args), noise, strict=True):
                assert_within(ours, theirs, others)
        for function in functions:
            function(*args)
    assert graphs["compiled"] == 2


def test_known_calls_skip_dynamo(graphs):
    node = fresh(ResidualBoundary)(5, EPS)
    function = compiled(node)
    first = function(*boundary_args(3))
    assert graphs == {"compiled": 1, "dispatched": 1}
    args = boundary_args(3, seed=7)
    second = function(*args)
    assert graphs == {"compiled": 1, "dispatched": 1}
    assert not torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(second, function(*args), strict=True))
    function(*boundary_args(4))
    assert graphs["dispatched"] == 2


class Scaled(nn.Module):
    """Called by names, as modules of other libraries call theirs."""

    def forward(self, x: Tensor, scale: Tensor, shift: float = 0.0, *, twice: bool = False):
        y = (x.float() * scale.float() + shift).to(x.dtype)
        return y + y if twice else y


def test_arguments_may_be_given_by_name(graphs):
    """By position they are the same call, which Dynamo serves once."""
    node = fresh(Scaled)()
    function, x, scale = compiled(node), bf16(3, WIDTH), bf16(WIDTH, seed=1)
    for _ in range(2):
        assert same_bits(function(scale=scale, x=x), node(x, scale))
    assert same_bits(function(x, scale), node(x, scale))
    assert graphs == {"compiled": 1, "dispatched": 1}
    assert same_bits(function(x, scale=scale, twice=True), node(x, scale, twice=True))
    assert same_bits(function(x, scale, shift=0.5), node(x, scale, 0.5))
    with pytest.raises(TypeError, match="missing a required argument: .scale."):
        function(x, scales=scale)


def test_no_rows():
    h, x = compiled(fresh(ResidualBoundary)(5, EPS))(*boundary_args(0))
    assert h.shape == x.shape == (1, 0, WIDTH)
    args = rope_args(0)
    q, k = compiled(fresh(QKNormRope)(EPS))(*args)
    assert (q.shape, k.shape) == ((1, 0, 4, 32), (1, 0, 2, 32))
    assert args[7].count_nonzero() == 0


def test_a_changed_layout_is_seen(graphs):
    node = fresh(OutputGate)()
    function = compiled(node)
    a, gate, bias = bf16(2, 3, 4, 8), bf16(2, 3, 4, 8, seed=1), bf16(4)
    turned = bf16(2, 4, 3, 8, seed=2).transpose(1, 2)
    for first in (a, turned, a, turned):
        assert same_bits(function(first, gate, bias), node(first, gate, bias))
    assert graphs["dispatched"] == 2


def test_repeated_arguments_are_not_mistaken_for_each_other():
    node = fresh(ResidualBoundary)(5, EPS)
    function = compiled(node)
    y, h, post, pre = boundary_args(2)
    for args in ((y, y, post, pre), (y, h, post, pre), (y, y, post, post), (h, y, pre, post)):
        for ours, theirs in zip(function(*args), node(*args), strict=True):
            assert same_bits(ours, theirs)


def test_caches_are_written_in_place():
    node = fresh(QKNormRope)(EPS)
    function = compiled(node)
    for rows in (1, 1, 5):
        args = rope_args(rows)
        ours, theirs = copy.deepcopy(args), copy.deepcopy(args)
        for a, b in zip(function(*ours), node(*theirs), strict=True):
            assert same_bits(a, b)
        assert same_bits(ours[7], theirs[7])
        assert same_bits(ours[8], theirs[8])
        assert ours[7].count_nonzero() == ours[8].count_nonzero() == rows * 2 * 32


def test_the_rounding_would_be_lost_without_the_option():
    """Inductor's default merges R(y * a) + R(h * b) into one rounding."""
    args = boundary_args(64)
    node = fresh(ResidualBoundary)(5, EPS)
    theirs, noise = node(*args), reordered(node, args)
    kept = compile_node(node, numerics_options())(*args)
    merged = compile_node(node, {"emulate_precision_casts": False})(*args)
    assert within(kept[0], theirs[0], noise[0])
    assert not within(merged[0], theirs[0], noise[0])


class Counting(nn.Module):
    """Not a function of its arguments alone: it counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.weight = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.weight


class Pairs(nn.Module):
    """Returns a dict, an argument and a view."""

    def forward(self, x: Tensor, factor: float) -> dict[str, Tensor]:
        return {"scaled": x * factor, "same": x, "first": x[0]}


def test_side_effects_stay_with_dynamo(graphs):
    function = compiled(Counting())
    for _ in range(3):
        assert torch.equal(function(torch.full((4,), 2.0)), torch.full((4,), 2.0))
    assert graphs["dispatched"] == 3


class ReadsCache(nn.Module):
    def forward(self, x: Tensor, cache: LayerCache) -> Tensor:
        return x * 2 + cache.k[:, -1, 0]


def test_arguments_that_hold_tensors_are_left_to_dynamo(graphs):
    x, k = bf16(1, 32), bf16(1, 4, 1, 32, seed=1)
    cache = LayerCache(k, k.clone(), None)
    node = ReadsCache()
    fast = compile_node(node, numerics_options())
    for _ in range(3):
        assert same_bits(fast(x, cache), node(x, cache))
        cache.k = cache.k + 1


def test_results_that_are_arguments_or_views(graphs):
    function = compiled(Pairs())
    for factor in (2.0, 2.0, 3.0):
        x = torch.randn(3, 4)
        result = function(x, factor)
        assert torch.equal(result["scaled"], x * factor)
        assert result["same"] is x
        assert torch.equal(result["first"], x[0])


def test_parameters_are_found_and_followed():
    node = beam.RMSNorm(8, EPS, torch.bfloat16).requires_grad_(False)
    node.weight.fill_(2.0)
    function = compiled(node)
    x = bf16(3, 8)
    for value in (2.0, 2.0, 0.5):
        node.weight.fill_(value)
        assert same_bits(function(x), node(x))
    node.weight.data = torch.full((8,), 4.0, dtype=torch.bfloat16)  # as weight packing does
    assert same_bits(function(x), node(x))


def test_view_reads_floats_from_tensors_and_shares_the_rest():
    node = ResidualBoundary(7, EPS)
    view = view_of(node)
    assert (view.n, view.eps, view.y_scale) == (7, EPS, node.y_scale)
    assert "y_scale" not in vars(view)
    assert "y_scale" in vars(node)


def test_any_region_of_a_model_can_be_compiled():
    config = beam.configs["mini"]
    model = beam.build(config, DEVICE, seed=0)
    candidate = share(model)
    change = inductor_change("router", Contract(numerics="transcendental"))
    assert change.name == "inductor:router"
    assert apply_change(candidate, change, "inductor") == [
        f"model.layers.{i}.mlp.gate" for i in range(2, 6)
    ]
    x = bf16(3, config.hidden)
    for path in ("model.layers.2.mlp.gate", "model.layers.5.mlp.gate"):
        experts = candidate.get_submodule(path)(x)[1]
        assert torch.equal(experts, model.get_submodule(path)(x)[1])


def test_generated_source_can_be_read():
    node = fresh(OutputGate)()
    args = bf16(1, 1, 4, 8), bf16(1, 1, 4, 8), bf16(4)
    source = generated_source(compiled(node), args)
    assert "sigmoid" in source
    with pytest.raises(ValueError, match="inductor_implementation"):
        generated_source(node.forward, args)


@pytest.mark.gpu
def test_kernels_on_cuda_have_no_fused_multiply_add():
    node = fresh(ResidualBoundary)(5, EPS)
    source = generated_source(compiled(node), boundary_args(8))
    assert "'enable_fp_fusion': False" in source


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 128], ids="bf16-T{}-D5120".format)
def test_calls_can_be_captured_in_a_graph(rows):
    node = fresh(ResidualBoundary)(5, EPS)
    function = compiled(node)
    args = tuple(a.expand(*a.shape[:-1], WIDTH).contiguous() for a in boundary_args(rows))
    expected = function(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = function(*args)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
