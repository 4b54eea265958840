"""Packed projections: the weights in one buffer, the products within the reference's own noise."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optimized import gemv, linear_decode
from optimized.change import apply_change, share
from optimized.gemv import GemvKnobs, held_blocks
from optimized.packing import are_adjacent, pack, packed
from optimized.parallel_projection import CHANGE
from reference import beam
from tests.optimized.kernel_checks import (
    DEVICE,
    all_knobs,
    bf16,
    needs_kernels,
    refusal,
    run_triton,
    same_bits,
)
from tests.reference.noise import assert_within, within

MINI = beam.configs["mini"]


def weight(outputs, width, seed=3):
    return bf16(outputs, width, scale=width**-0.5, seed=seed)


def reordered(x, w, count=16):
    """The product with the reduced dimension in other orders."""
    for seed in range(count):
        order = torch.randperm(w.shape[1], generator=torch.Generator().manual_seed(seed))
        yield F.linear(x[..., order.to(DEVICE)], w[:, order.to(DEVICE)])


def assert_product(found, x, w, count=16):
    if found.numel() == 0:
        assert found.shape == F.linear(x, w).shape
        return
    assert_within(found, F.linear(x, w), list(reordered(x, w, count)))


def attention(candidate=None) -> nn.Module:
    model = beam.build(MINI, DEVICE, seed=0) if candidate is None else candidate
    return model.get_submodule("model.layers.0.self_attn")


def call(module, x):
    weights = [getattr(module, name).weight for name in module.project.names]
    return module.project(x, *weights)


def test_packing_leaves_the_state_dict_as_it_was():
    model = beam.build(MINI, DEVICE, seed=0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    apply_change(model, CHANGE, "torch")
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(same_bits(after[n], before[n]) for n in before if before[n].dtype == torch.bfloat16)
    weights = [getattr(attention(model), f"{n}_proj").weight for n in ("q", "k", "v", "gate")]
    assert are_adjacent(tuple(weights))
    assert len({w.untyped_storage().data_ptr() for w in weights}) == 1
    width = 2 * MINI.query_heads + 2 * MINI.kv_heads
    size = width * MINI.head_dim * MINI.hidden * 2
    assert weights[0].untyped_storage().nbytes() == size


def test_no_second_copy_stays_behind():
    parameters = tuple(nn.Parameter(weight(8, 16, seed), requires_grad=False) for seed in range(3))
    storages = [weakref.ref(p.untyped_storage()) for p in parameters]
    tensors = [weakref.ref(p.data) for p in parameters]
    pack(parameters)
    gc.collect()
    assert all(ref() is None for ref in (*storages, *tensors))
    place = parameters[0].data_ptr()
    pack(parameters)
    assert parameters[0].data_ptr() == place


def test_weights_that_do_not_fit_together_are_refused():
    parameters = nn.Parameter(torch.zeros(2, 4)), nn.Parameter(torch.zeros(2, 8))
    with pytest.raises(ValueError, match="several widths"):
        pack(parameters)


def test_the_reference_tree_shares_the_packed_weights():
    model = beam.build(MINI, DEVICE, seed=0)
    x = bf16(1, 3, MINI.hidden)
    before = call(attention(model), x)
    candidate = share(model)
    assert len(apply_change(candidate, CHANGE, "torch")) == MINI.layers + MINI.dense_layers
    ours, theirs = attention(candidate), attention(model)
    assert ours.q_proj.weight is theirs.q_proj.weight
    for a, b in zip(call(theirs, x), before, strict=True):
        assert same_bits(a, b)
    for name, found in zip(ours.project.names, call(ours, x), strict=True):
        assert_product(found, x, getattr(theirs, name).weight)


def test_applying_it_to_two_trees_packs_once():
    model = beam.build(MINI, DEVICE, seed=0)
    places = []
    for _ in range(2):
        apply_change(share(model), CHANGE, "torch")
        places.append(attention(model).q_proj.weight.data_ptr())
    assert places[0] == places[1]


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize(
    "backend", ["torch", "inductor", pytest.param("triton", marks=needs_kernels)]
)
def test_slices_match_the_separate_products(backend, rows):
    node = beam.ParallelProjection(("a", "b", "c"))
    parameters = tuple(nn.Parameter(weight(n, 48, n), requires_grad=False) for n in (16, 8, 40))
    pack(parameters)
    x = bf16(1, rows, 48)
    found = CHANGE.implementation(backend).build(node, None)(x, *parameters)
    assert [y.shape for y in found] == [(1, rows, n) for n in (16, 8, 40)]
    assert found[0].stride(1) == (16 if backend == "inductor" else 64) or rows < 2
    for y, w in zip(found, parameters, strict=True):
        assert_product(y, x, w)


def test_weights_that_moved_are_found_again():
    node = beam.ParallelProjection(("a", "b"))
    parameters = tuple(nn.Parameter(weight(8, 16, n), requires_grad=False) for n in (1, 2))
    implementation = CHANGE.implementation("torch")
    assert implementation.guard is not None
    x = bf16(1, 2, 16)
    assert "not packed" in (implementation.guard(node, x, *parameters) or "")
    pack(parameters)
    forward = implementation.build(node, None)
    assert implementation.guard(node, x, *parameters) is None
    for y, w in zip(forward(x, *parameters), parameters, strict=True):
        assert_product(y, x, w)
    for parameter in parameters:
        parameter.data = parameter.data * 2
    assert "not packed" in (implementation.guard(node, x, *parameters) or "")
    pack(parameters)
    assert implementation.guard(node, x, *parameters) is None
    for y, w in zip(forward(x, *parameters), parameters, strict=True):
        assert_product(y, x, w)


@needs_kernels
@pytest.mark.parametrize(
    ("rows", "outputs", "width"),
    [(1, 64, 256), (1, 37, 640), (1, 5, 72), (2, 37, 200), (8, 64, 256), (16, 16, 64)],
)
def test_product_matches_the_library(rows, outputs, width):
    x, w = bf16(1, rows, width), weight(outputs, width)
    assert_product(gemv.multiply(x, w), x, w)


@needs_kernels
@pytest.mark.parametrize("rows", [1, 4])
def test_every_knob_gives_the_same_function(rows):
    x, w = bf16(1, rows, 520), weight(20, 520)
    seen = 0
    for knobs in all_knobs(linear_decode.CHANGE, {"M": rows, "O": 20, "D": 520}):
        assert_product(gemv.multiply(x, w, knobs), x, w, count=4)
        seen += 1
    assert seen >= 8


@needs_kernels
def test_a_bf16_partial_sum_would_be_noticed():
    """Two halves of the reduction, each rounded: a rounding that the contract does not add."""
    x, w = bf16(1, 8, 256), weight(64, 256)
    halves = F.linear(x[..., :128], w[:, :128]), F.linear(x[..., 128:], w[:, 128:])
    noise = list(reordered(x, w))
    assert not within(halves[0] + halves[1], F.linear(x, w), noise)
    assert within(gemv.multiply(x, w), F.linear(x, w), noise)


@pytest.mark.parametrize("rows", [1, 5])
def test_compiled_linear_serves_any_number_of_rows(rows):
    for outputs, width in ((24, 64), (40, 96)):
        node = beam.Linear(width, outputs, torch.bfloat16).to(DEVICE).requires_grad_(False)
        node.weight.copy_(weight(outputs, width))
        x = bf16(1, rows, width)
        found = linear_decode.CHANGE.implementation("inductor").build(node, None)(x)
        assert_product(found, x, node.weight)


@needs_kernels
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_linear_serves_any_number_of_rows(rows):
    node = beam.Linear(64, 24, torch.bfloat16).to(DEVICE).requires_grad_(False)
    node.weight.copy_(weight(24, 64))
    x = bf16(2, 3, rows, 128)[0, :1, :, 64:]
    assert x.stride(1) == 128
    assert_product(run_triton(linear_decode.CHANGE, node, x), x, node.weight)


@needs_kernels
def test_guard_says_why():
    node = beam.Linear(64, 24, torch.bfloat16).to(DEVICE).requires_grad_(False)
    x = bf16(1, 2, 64)
    assert refusal(linear_decode.CHANGE, node, x) == ""
    assert "torch.float32" in refusal(linear_decode.CHANGE, node, x.float())
    assert "strides" in refusal(linear_decode.CHANGE, node, bf16(1, 2, 128)[..., ::2])
    assert "aligned" in refusal(linear_decode.CHANGE, node, bf16(1, 1, 72)[..., 3:67])
    assert "aligned" in refusal(linear_decode.CHANGE, node, bf16(1, 1, 60))


def test_heuristic_is_valid_for_any_shape():
    for rows in (1, 2, 16):
        for outputs in (1, 37, 1792, 18992):
            for width in (8, 72, 768, 2560, 5120, 8192):
                shape = {"M": rows, "O": outputs, "D": width}
                assert GemvKnobs.heuristic(shape).is_valid(shape), shape
                assert GemvKnobs.own(shape).is_valid(shape), shape


def test_packed_is_the_concatenation():
    parts = tuple(nn.Parameter(weight(n, 16, n), requires_grad=False) for n in (3, 5))
    expected = torch.cat([p.detach().clone() for p in parts])
    pack(parts)
    assert same_bits(packed(parts), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 16, 128], ids="M{}".format)
@pytest.mark.parametrize("outputs", [1792, 18992], ids="O{}-D5120".format)
def test_full_size_on_cuda(rows, outputs):
    node = beam.Linear(5120, outputs, torch.bfloat16).to(DEVICE).requires_grad_(False)
    node.weight.copy_(weight(outputs, 5120))
    x = bf16(rows, 1, 5120)
    assert_product(run_triton(linear_decode.CHANGE, node, x), x, node.weight, count=8)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8])
def test_every_knob_on_cuda(rows):
    x, w = bf16(1, rows, 5120), weight(1792, 5120)
    for knobs in all_knobs(linear_decode.CHANGE, {"M": rows, "O": 1792, "D": 5120}):
        assert_product(gemv.multiply(x, w, knobs), x, w, count=4)


@pytest.mark.parametrize(
    ("outputs", "width"), [(1792, 5120), (2304, 8192), (25256, 8192), (8192, 1024)], ids=str
)
def test_a_block_holds_all_weights_of_its_rows(outputs, width):
    """So that all are asked for before the previous kernel is done."""
    knobs = GemvKnobs.own({"M": 1, "O": outputs, "D": width})
    assert knobs.is_valid({"M": 1, "O": outputs, "D": width})
    assert held_blocks(knobs, width) * knobs.block >= width
