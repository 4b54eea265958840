"""A decode step's fused attention against the reference: rings, whole caches, groups, padding."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optimized import attention_step
from optimized.attention_step import CHANGE, MAX_FUSED_SPLITS, StepKnobs, sizes
from reference.beam import Attend, Attention, BeamConfig, StepTables, configs
from reference.beam_attention import Step
from reference.cache import LayerCache
from tests.optimized.kernel_checks import (
    DEVICE,
    all_knobs,
    bf16,
    needs_kernels,
    refusal,
    run_triton,
    same_bits,
)
from tests.reference.noise import assert_within

pytestmark = needs_kernels

WINDOW, CAPACITY, HIDDEN = 24, 80, 64


def config(heads=6, kv_heads=1, dim=32, **more) -> BeamConfig:
    return replace(
        configs["mini"],
        hidden=HIDDEN,
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        window=WINDOW,
        **more,
    )


def layer_of(c: BeamConfig, full: bool) -> int:
    return next(i for i in range(c.layers) if c.is_full(i) == full)


def attention(c: BeamConfig, full: bool) -> Attention:
    node = Attention(c, layer_of(c, full)).to(DEVICE).requires_grad_(False)
    for seed, (name, tensor) in enumerate(node.state_dict().items()):
        drawn = bf16(*tensor.shape, seed=100 + seed)
        tensor.copy_(drawn.float() * 0.2 + 1 if "norm" in name else drawn * HIDDEN**-0.5)
    return node


def call(c: BeamConfig, full: bool, positions: list[int], seed: int = 0):
    """(x, step, cache) of a decode step at those positions, -1 for a padded row."""
    batch = len(positions)
    slots = (CAPACITY if full else WINDOW) + 1
    k, v = (bf16(batch, slots, c.kv_heads, c.head_dim, seed=seed + s) for s in (1, 2))
    cache = LayerCache(k, v, None if full else WINDOW)
    where = torch.tensor(positions, device=DEVICE)[:, None]
    extent = max(positions) + 1
    step = Step(where, *StepTables(c)(where, CAPACITY, extent, False), extent=extent)
    return bf16(batch, 1, c.hidden, seed=seed + 3), step, cache


class Shuffled(Attend):
    """The attention with its sums over positions and columns in another order."""

    def forward(self, q, k, v, mask):
        positions, columns = (torch.randperm(n, device=q.device) for n in (k.shape[1], q.shape[3]))
        found = super().forward(
            q[..., columns],
            k[:, positions][..., columns],
            v[:, positions],
            None if mask is None else mask[..., positions],
        )
        return found


class ShuffledLinear(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        columns = torch.randperm(x.shape[-1], device=x.device)
        return F.linear(x[..., columns], self.weight[:, columns])


def copied(args):
    x, step, cache = args
    return x, step, LayerCache(cache.k.clone(), cache.v.clone(), cache.window)


def noise(node, args, count=16):
    """The reference with the sums of attention and output projection in other orders."""
    found = []
    moved = copy.copy(node)
    moved._modules = dict(node._modules)
    moved.attend = Shuffled(node.attend.scale)
    moved.o_proj = ShuffledLinear(node.o_proj.weight)
    for seed in range(count):
        torch.manual_seed(seed)
        found.append(moved(*copied(args)))
    return found


def assert_matches(node, args, knobs=None, valid=None):
    ours, mine = copied(args), copied(args)
    expected = node(*ours)
    found = run_triton(CHANGE, node, *mine, knobs=knobs)
    rows = slice(None) if valid is None else valid
    assert_within(found[rows], expected[rows], [n[rows] for n in noise(node, args)])
    for ref, out in ((ours[2].k, mine[2].k), (ours[2].v, mine[2].v)):
        assert_within(out[rows], ref[rows], [ref[rows]] * 2)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "positions"),
    [(6, 1, 32, [37]), (4, 2, 64, [5]), (2, 1, 128, [79]), (4, 2, 32, [70, 3, 23])],
)
def test_matches_the_reference(full, heads, kv_heads, dim, positions):
    c = config(heads, kv_heads, dim)
    assert_matches(attention(c, full), call(c, full, positions))


@pytest.mark.parametrize("position", [0, WINDOW - 1, WINDOW, 2 * WINDOW])
def test_the_new_position_is_written_before_it_is_read(position):
    """Its slot may be in any share of the sequence."""
    c = config()
    node, args = attention(c, False), call(c, False, [position])
    knobs = StepKnobs(warps=2, block=16, stages=1, splits=2, rows=4, row_warps=4)
    assert_matches(node, args, knobs)
    args[2].k[:, position % WINDOW], args[2].v[:, position % WINDOW] = 1e4, -1e4
    assert_matches(node, args, knobs)


@pytest.mark.parametrize("full", [False, True])
def test_padding_goes_to_the_spare_slot(full):
    c = config()
    node, args = attention(c, full), call(c, full, [30, -1])
    before = args[2].k.clone()
    assert_matches(node, args, valid=slice(0, 1))
    mine = copied(args)
    run_triton(CHANGE, node, *mine)
    assert same_bits(mine[2].k[1, :-1], before[1, :-1])
    assert not same_bits(mine[2].k[1, -1], before[1, -1])


def test_many_shares_are_combined_in_a_kernel_of_their_own(monkeypatch):
    c = config()
    node, args = attention(c, True), call(c, True, [CAPACITY - 1])
    node_knobs = StepKnobs(warps=1, block=16, stages=1, splits=5, rows=4, row_warps=4)
    fused = run_triton(CHANGE, node, *copied(args), knobs=node_knobs)
    assert MAX_FUSED_SPLITS >= 5
    monkeypatch.setattr(attention_step, "MAX_FUSED_SPLITS", 1)
    apart = run_triton(CHANGE, node, *copied(args), knobs=node_knobs)
    assert_within(apart, node(*copied(args)), noise(node, args))
    assert_within(fused, node(*copied(args)), noise(node, args))


def test_every_knob():
    c = config(dim=64)
    node, args = attention(c, False), call(c, False, [40])
    tried = list(all_knobs(CHANGE, sizes(node, *args)))
    assert len(tried) > 8
    for knobs in tried:
        assert_matches(node, args, knobs)


def test_refuses_what_it_is_not_made_for():
    c = config()
    node, (x, step, cache) = attention(c, False), call(c, False, [9, 9])
    assert refusal(CHANGE, node, x, step, cache) == ""
    assert "more than one token" in refusal(CHANGE, node, x.view(1, 2, -1), step, cache)
    assert "torch.float32" in refusal(CHANGE, node, x.float(), step, cache)
    wide = step._replace(ring_mask=step.ring_mask.repeat(1, 1, 2))
    assert "mask is torch.bool (2, 1, 48)" in refusal(CHANGE, node, x, wide, cache)
    short = LayerCache(cache.k[:1], cache.v[:1], WINDOW)
    assert "k cache is (1, 25, 1, 32)" in refusal(CHANGE, node, x, step, short)
    slots = step._replace(ring_slots=step.ring_slots.int())
    assert "slots are torch.int32" in refusal(CHANGE, node, x, slots, cache)


def test_another_models_attention_is_refused():
    c = config()
    node, call_of = attention(c, False), call(c, False, [9])
    node.gate = nn.Identity()
    assert "other parts" in refusal(CHANGE, node, *call_of)


@pytest.mark.parametrize("positions", [[60], [60, 61, 3]])
def test_the_output_projection_is_called_as_the_reference_calls_it(positions):
    """So that a kernel in its place finds the call that it was tested on."""
    c = config()
    node, seen = attention(c, False), []
    node.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    node(*call(c, False, positions))
    run_triton(CHANGE, node, *call(c, False, positions))
    expected = torch.Size([len(positions), 1, c.query_heads * c.head_dim])
    # One row is projected by the kernel that gates it.
    assert seen == [expected] * min(2, len(positions))
