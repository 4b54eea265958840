"""The grouped experts' products against the reference: roundings, ragged tiles, empty experts."""

from dataclasses import replace

import pytest
import torch

from optimized.change import shape_key
from optimized.expert_sort import sort_pairs
from optimized.grouped_experts import GroupedKnobs, down_product, grouped_experts, up_product
from optimized.routed_experts import CHANGE, MAX_PAIRS
from tests.optimized.kernel_checks import (
    DEVICE,
    all_knobs,
    bf16,
    needs_kernels,
    run_triton,
    same_bits,
)
from tests.optimized.test_routed_experts import choices, node, reordered, shares
from tests.reference.noise import assert_within, distance

pytestmark = needs_kernels
SMALL = GroupedKnobs(
    row_tile=32,
    up_columns=16,
    up_block=32,
    up_stages=2,
    up_warps=4,
    up_span=2,
    down_columns=32,
    down_block=16,
    down_stages=2,
    down_warps=4,
    down_span=2,
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Of the sort, which the interpreter runs slowly and which has tests of its own."""
    monkeypatch.setattr("optimized.expert_sort.PAIRS", 32)


def assert_matches(reference, x, experts, knobs=None, count=8):
    assert experts.numel() > MAX_PAIRS
    arguments = x, shares(experts), experts
    found = run_triton(CHANGE, reference, *arguments, knobs=knobs)
    assert found.shape == x.shape
    assert_within(found, reference(*arguments), reordered(reference, x, experts, count))


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "width", "inner"),
    [(40, 2, 8, 64, 32), (33, 3, 5, 72, 40), (70, 1, 2, 24, 8)],
    ids=str,
)
def test_matches_the_reference(tokens, top_k, experts, width, inner):
    reference = node(experts, width, inner)
    assert_matches(reference, bf16(tokens, width), choices(tokens, top_k, experts), SMALL)
    assert_matches(reference, bf16(tokens, width), choices(tokens, top_k, experts))


def test_columns_that_are_no_power_of_two():
    """48 are made as 32 and 16 beside them, of the same rows: the same sums, so the same bits."""
    x, experts = bf16(20, 72), choices(20, 2, 3)
    order = sort_pairs(experts, 3, SMALL.row_tile)
    wide = replace(SMALL, up_columns=48, up_span=1)
    for inner in (40, 48, 50, 96):
        assert wide.is_valid({"D": 72, "F": inner})
        assert not replace(wide, up_span=2).is_valid({"D": 72, "F": inner})
        experts_node = node(3, 72, inner)
        found, others = (up_product(experts_node, x, order, knobs) for knobs in (wide, SMALL))
        assert same_bits(found, others)
        if inner != 50:  # by the copy engine, rows have to be multiples of 16 bytes apart
            for bulk in (replace(wide, up_bulk=True), replace(SMALL, up_bulk=True)):
                assert bulk.is_valid({"D": 72, "F": inner})
                assert same_bits(up_product(experts_node, x, order, bulk), others)


@pytest.mark.parametrize(("width", "inner"), [(72, 40), (64, 24)], ids=str)
def test_full_tiles_by_the_copy_engine(width, inner):
    """The same bits, of full tiles and of what is left; nothing of the next expert's is written."""
    experts = torch.arange(75, device=DEVICE).remainder(3).clamp_max(1)[:, None]
    order = sort_pairs(experts, 3, 16)  # 25, 50 and no pairs
    # Backwards, so that what a tile wrote beyond its expert would not be overwritten by the next's.
    order.tiles[: order.used.item()] = order.tiles[: order.used.item()].flip(0)
    hidden, reference = bf16(75, inner), node(3, width, inner)
    plain = replace(SMALL, row_tile=16)
    bulk = replace(plain, down_bulk=True)
    assert bulk.is_valid({"D": width, "F": inner})
    assert not bulk.is_valid({"D": width, "F": inner + 1})
    y = down_product(reference, hidden, order, bulk)
    assert same_bits(y, down_product(reference, hidden, order, plain))
    parts = zip(hidden.split((25, 50)), reference.down_proj[:2], strict=True)
    expected = torch.cat([rows @ weight.T for rows, weight in parts])
    assert distance(y, expected).count <= 0.01 * y.numel()


def test_one_expert_has_all_pairs_and_others_none():
    reference, x = node(4, 64, 32), bf16(70, 64)
    assert_matches(reference, x, torch.full((70, 1), 2, device=DEVICE), SMALL)


def test_rows_of_a_larger_tensor():
    assert_matches(node(8, 64, 32), bf16(40, 192)[:, 64:128], choices(40, 2, 8), SMALL)


def test_every_pair_is_rounded_where_the_reference_rounds():
    """Pair by pair, before the weighted sum hides it, against FP32 with the same roundings."""
    reference, x, experts = node(4, 64, 32), bf16(40, 64), choices(40, 2, 4)
    y, order = grouped_experts(reference, x, experts, SMALL)
    expected = reference.each(x, experts).flatten(0, 1)
    found = y[order.places.long()]
    assert distance(found, expected).size <= torch.finfo(torch.bfloat16).eps
    assert distance(found, expected).count <= 0.01 * found.numel()


def test_every_knob_gives_the_same_function():
    """With one expert a token its weight is 1, so the weighted sum is the scaled output."""
    reference, x, experts = node(2, 32, 32), bf16(70, 32), choices(70, 1, 2)
    expected = reference(x, shares(experts), experts)
    others, seen = list(reordered(reference, x, experts, 4)), 0
    for knobs in all_knobs(CHANGE, {"P": 70, "K": 1, "E": 2, "D": 32, "F": 32}):
        y, order = grouped_experts(reference, x, experts, knobs)
        found = (y[order.places.long()].float() * reference.combine.scale).bfloat16()
        assert_within(found, expected, others)
        seen += 1
    assert seen >= 8


def test_run_to_run():
    reference, x, experts = node(8, 64, 32), bf16(40, 64), choices(40, 2, 8)
    arguments = x, shares(experts), experts
    first = run_triton(CHANGE, reference, *arguments, knobs=SMALL)
    assert same_bits(first, run_triton(CHANGE, reference, *arguments, knobs=SMALL))


def test_tuned_by_the_number_of_pairs():
    """Few pairs have knobs of their own, many have these."""
    kind = CHANGE.implementation("triton").knobs
    assert kind is not None
    for pairs, columns in ((64, False), (1024, True), (131072, True)):
        shape = {"P": pairs, "K": 8, "E": 256, "D": 5120, "F": 320}
        chosen = kind.heuristic(shape)
        assert isinstance(chosen, GroupedKnobs) is columns
        assert chosen.is_valid(shape), shape_key(shape)
        values = {name: options[0] for name, options in kind.candidates(shape).items()}
        assert type(kind(**values)) is type(chosen)


def test_heuristic_is_what_was_fastest_on_an_h200():
    """131072 pairs of a TP8 rank of Beam: the first product without the copy engine, the second
    with it; rows that it cannot address stay without."""
    chosen = GroupedKnobs.heuristic({"P": 131072, "E": 256, "D": 5120, "F": 320})
    assert (chosen.up_columns, chosen.up_bulk) == (128, False)
    assert (chosen.down_bulk, chosen.down_span) == (True, 10)
    assert not GroupedKnobs.heuristic({"P": 131072, "E": 256, "D": 5120, "F": 324}).down_bulk


@pytest.mark.parametrize("inner", [24, 64, 320, 1280, 2560])
def test_heuristic_is_valid(inner):
    for pairs in (65, 1024, 16384, 131072):
        shape = {"P": pairs, "E": 256, "D": 5120, "F": inner}
        assert GroupedKnobs.heuristic(shape).is_valid(shape), shape
    assert not replace(SMALL, up_stages=5, up_columns=256, up_block=128).is_valid(shape)


@pytest.mark.gpu
@pytest.mark.parametrize("inner", [320, 1280], ids="bf16-D5120-F{}".format)
@pytest.mark.parametrize("tokens", [128, 4096], ids="N{}".format)
def test_matches_on_cuda(tokens, inner):
    assert_matches(node(16, 5120, inner), bf16(tokens, 5120), choices(tokens, 8, 16), count=4)
