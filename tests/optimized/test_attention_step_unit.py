"""The fused attention of a decode step with weightless norms, q's factor and an output norm."""

from dataclasses import replace

import pytest
import torch

from optimized import attention_step
from optimized.attention_step import CHANGE, StepKnobs, shares_at_once
from reference.cache import LayerCache
from reference.muse_spark import StepTables
from reference.muse_spark_attention import Attention, Step
from reference.muse_spark_config import PRESETS, MuseSparkConfig
from tests.optimized.kernel_checks import DEVICE, bf16, needs_kernels, refusal, run_triton
from tests.optimized.test_attention_step import assert_matches, copied, noise
from tests.reference.noise import within

pytestmark = needs_kernels
WINDOW, CAPACITY, HIDDEN = 24, 80, 64


def config(heads=4, kv_heads=2, dim=32) -> MuseSparkConfig:
    sizes = {"query_heads": heads, "kv_heads": kv_heads, "head_dim": dim}
    return replace(PRESETS["mini"], hidden=HIDDEN, window=WINDOW, **sizes)


def attention(c: MuseSparkConfig, full: bool) -> Attention:
    layer = next(i for i in range(c.layers) if c.is_full(i) == full)
    node = Attention(c, layer).to(DEVICE).requires_grad_(False)
    for seed, tensor in enumerate(node.state_dict().values()):
        tensor.copy_(bf16(*tensor.shape, seed=100 + seed) * HIDDEN**-0.5)
    return node


def call(c: MuseSparkConfig, full: bool, positions: list[int], seed: int = 0):
    """(x, step, cache) of a decode step at those positions."""
    slots = (CAPACITY if full else WINDOW) + 1
    shape = len(positions), slots, c.kv_heads, c.head_dim
    cache = LayerCache(*(bf16(*shape, seed=seed + s) for s in (1, 2)), None if full else WINDOW)
    where = torch.tensor(positions, device=DEVICE)[:, None]
    extent = max(positions) + 1
    step = Step(where, *StepTables(c)(where, CAPACITY, extent, False), extent=extent)
    return bf16(len(positions), 1, HIDDEN, seed=seed + 3), step, cache


@pytest.mark.parametrize("full", [False, True], ids=["sliding", "full"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "positions"),
    [(4, 2, 32, [37]), (16, 2, 64, [79]), (3, 1, 32, [5]), (4, 2, 32, [70, 3, 23])],
    ids=str,
)
def test_matches_the_reference(full, heads, kv_heads, dim, positions):
    c = config(heads, kv_heads, dim)
    assert_matches(attention(c, full), call(c, full, positions))


def test_other_knobs_and_many_shares(monkeypatch):
    c = config()
    node, args = attention(c, False), call(c, False, [40])
    knobs = StepKnobs(warps=1, block=16, stages=1, splits=2, rows=2, row_warps=4)
    assert_matches(node, args, knobs)
    monkeypatch.setattr(attention_step, "MAX_FUSED_SPLITS", 1)
    assert_matches(node, args, knobs)


def test_shares_are_combined_a_few_at_a_time(monkeypatch):
    """Five shares, four at once: the last one alone."""
    monkeypatch.setattr(attention_step, "MAX_COMBINED", 4096)
    c = config(16, 2, 64)
    node, args = attention(c, True), call(c, True, [79])
    assert shares_at_once(5, 16 * 64) == 4
    knobs = StepKnobs(warps=1, block=16, stages=1, splits=5, rows=4, row_warps=4)
    assert_matches(node, args, knobs)


def test_a_rank_of_muse_spark_projects_from_its_windows_shares():
    """2048 positions on 2 KV heads of 64: no more shares than the projection combines itself."""
    window = {"B": 1, "H": 16, "Hkv": 2, "d": 64, "S": 2048}
    assert StepKnobs.heuristic(window).splits == attention_step.MAX_FUSED_SPLITS == 16


@pytest.mark.parametrize("part", ["q_factor", "eps of the output norm"])
def test_each_part_shows(part):
    """With another factor or another norm the kernels would not match."""
    c = config()
    node, args = attention(c, True), call(c, True, [30])
    expected = node(*copied(args))
    others = noise(node, args)
    assert within(run_triton(CHANGE, node, *copied(args)), expected, others)
    if part == "q_factor":
        node.prepare.q_factor *= 1.5
    else:
        node.gate.eps = 1.0
    assert not within(run_triton(CHANGE, node, *copied(args)), expected, others)


def test_refuses_other_tables():
    c = config()
    node, (x, step, cache) = attention(c, False), call(c, False, [9])
    assert refusal(CHANGE, node, x, step, cache) == ""
    wide = step._replace(cos=step.cos.float())
    assert "position tables are not contiguous torch.bfloat16" in refusal(
        CHANGE, node, x, wide, cache
    )
