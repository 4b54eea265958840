"""A decode step's attention with a stream for each warp: shares of several blocks."""

import numpy as np
import pytest
import torch

from optimized import attention_step
from optimized.attention_step import CHANGE, StepKnobs, form, is_dense
from reference.cache import LayerCache
from tests.optimized import test_attention_step as weighted
from tests.optimized import test_attention_step_unit as weightless
from tests.optimized.kernel_checks import needs_kernels, run_triton, same_bits
from tests.optimized.test_attention_step import assert_matches, copied

RANK = {"B": 1, "S": 100_000, "H": 6, "Hkv": 1, "d": 128}
MUSE_RANK = {"B": 1, "S": 100_000, "H": 16, "Hkv": 2, "d": 64}
STREAM = StepKnobs(
    warps=2, block=32, stages=3, splits=2, rows=4, row_warps=4, stream=True, ahead=2, columns=8
)


def case(model, full: bool, positions: list[int]):
    """A node and a call of it: 3 blocks of 32 in a whole cache of 80, in two shares."""
    c = model.config(12, 2, 32)
    return model.attention(c, full), model.call(c, full, positions)


@needs_kernels
@pytest.mark.parametrize("model", [weighted, weightless], ids=["beam", "muse-spark"])
@pytest.mark.parametrize("position", [0, 63, 79])
def test_matches_the_reference_wherever_the_new_position_is(model, position):
    """What the caches hold in its slot before shows nowhere, also where that is no number."""
    node, args = case(model, True, [position, 79])
    for kept in (args[2].k, args[2].v):
        kept[0, position] = torch.nan
    assert_matches(node, args, STREAM)


@needs_kernels
@pytest.mark.parametrize("warps", [1, 4])
def test_other_warps_and_a_window(warps, monkeypatch):
    monkeypatch.setattr(weighted, "WINDOW", 72)
    node, args = case(weighted, False, [40, 100])
    knobs = StepKnobs(**{**vars(STREAM), "warps": warps, "block": 16 * warps, "splits": 1})
    assert_matches(node, args, knobs)


@needs_kernels
def test_padding_goes_to_the_spare_slot():
    node, args = case(weighted, True, [79, -1])
    mine = copied(args)
    run_triton(CHANGE, node, *mine, knobs=STREAM)
    assert same_bits(mine[2].k[1, :-1], args[2].k[1, :-1])
    assert not same_bits(mine[2].k[1, -1], args[2].k[1, -1])


@needs_kernels
def test_no_bit_of_a_probability_is_lost():
    """Values of one: numerators are the denominator but for 16 FP32 roundings."""
    node, (x, step, cache) = case(weighted, True, [79])
    cache.v.fill_(1.0)
    weights = (p.weight for p in (node.q_proj, node.k_proj, node.v_proj, node.gate_proj))
    q, k, v, _ = node.project(x, *weights)
    shape = attention_step.sizes(node, x, step, cache)
    given = q, k, torch.ones_like(v), step, cache, STREAM, shape
    with np.errstate(over="ignore", invalid="ignore"):  # of exp(-3e38)
        sums, stats, splits = attention_step.attend(node, *given)
    assert splits == 2 and float(stats[..., 1].min()) > 1
    lost = 1 - sums.double() / stats[..., 1:].double()
    assert float(lost.abs().max()) < 16 * 2**-24


def test_only_dense_caches_are_called_ahead():
    k = torch.empty(1, 81, 2, 32)
    assert is_dense(k) and not is_dense(k.expand(1, 81, 2, 32)[..., :16])
    cache = LayerCache(k, torch.empty(1, 81, 4, 32)[:, :, ::2], None)
    assert not is_dense(cache.v)
    assert form(STREAM, 3, dense=True) == {"WARPS": 2, "AHEAD": 2}
    assert form(STREAM, 3, dense=False)["AHEAD"] == 0
    assert form(STREAM, 1, dense=True) == {"MORE": False}


def test_a_rank_of_beam_streams_its_whole_context_and_no_window():
    knobs = StepKnobs.heuristic(RANK)
    assert (knobs.stream, knobs.splits, knobs.stages, knobs.ahead) == (True, 264, 3, 1)
    assert (knobs.columns, knobs.column_warps) == (16, 4) and knobs.is_valid(RANK)
    whole_heads = StepKnobs.heuristic(MUSE_RANK)
    assert (whole_heads.stages, whole_heads.column_warps) == (3, 8)
    assert whole_heads.is_valid(MUSE_RANK)
    assert not StepKnobs.heuristic({**RANK, "S": 512}).stream
    assert not StepKnobs.heuristic({**RANK, "H": 64}).stream  # too many numerators for a warp


@pytest.mark.parametrize(
    ("changed", "fits"),
    [
        ({}, True),
        ({"warps": 8}, False),  # 8 positions of a warp
        ({"stages": 5, "splits": 132}, True),
        ({"warps": 8, "block": 128, "stages": 4, "splits": 132}, True),  # 213 KB
        ({"warps": 8, "block": 128, "stages": 5, "splits": 132}, False),
        ({"stream": False, "stages": 5}, False),
    ],
    ids=str,
)
def test_a_stream_fits_shared_memory(changed, fits):
    knobs = StepKnobs(**{**vars(StepKnobs.heuristic(RANK)), **changed})
    assert knobs.is_valid(RANK) is fits


def test_what_was_the_heuristic_can_be_tried():
    plain = {"stages": 2, "splits": 396, "stream": False, "ahead": 0}
    candidates = StepKnobs.candidates(RANK)
    for before in (plain, {"stages": 4, "columns": 8, "column_warps": 8}):
        assert all(value in candidates[name] for name, value in before.items())
        assert StepKnobs(**{**vars(StepKnobs.heuristic(RANK)), **before}).is_valid(RANK)
