"""The whole decoder against transformers: prefill, then decode across the window's wrap, batch 2.

In FP32 end to end, in BF16 layer by layer on the published model's own inputs and routes.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from reference import muse_spark
from reference.muse_spark import MuseSpark
from tests.reference import muse_spark_oracle as oracle
from tests.reference import muse_spark_toy as toy
from tests.reference import small
from tests.reference.layerwise import Trace, run_layers
from tests.reference.muse_spark_oracle import transformers
from tests.reference.muse_spark_toy import SMALL, PublishedMoE, as_published, reorderings
from tests.reference.noise import assert_within, within

CUTS = [13, *range(14, 19)]  # a prefill longer than the window of 8, and decodes past slot 16
BATCH = 2
ORDERINGS = 16
EVERY = list(range(SMALL.layers))


def run_published(model: Any, ids: Tensor, cuts: list[int] = CUTS) -> Tensor:
    """Logits [B, T, V] of the published model in the steps that end at `cuts`."""
    cache = transformers.DynamicCache(config=model.config.text_config)
    logits = []
    for first, end in zip([0, *cuts], cuts, strict=False):
        place = small.positions(len(ids), first, end)
        result = model(input_ids=ids[:, first:end], position_ids=place, cache=cache, use_cache=True)
        logits.append(result.logits)
    return torch.cat(logits, dim=1)


def test_fp32_prefill_and_decode() -> None:
    model = toy.build(torch.float32)
    ids = small.tokens(BATCH, CUTS[-1])
    theirs = run_published(oracle.published(model), ids)
    reordered = (toy.run(m, ids, CUTS) for m, _ in reorderings(model, model.config, ORDERINGS))
    assert_within(theirs, toy.run(model, ids, CUTS), reordered)


def test_decodes_across_the_released_window() -> None:
    """In FP32: 2045 positions, then one by one past 2048, where a ring of that length wraps."""
    sizes = {"layers": 2, "hidden": 32, "vocabulary": 32, "query_heads": 2, "kv_heads": 1}
    sizes |= {"head_dim": 16, "experts": 4, "top_k": 2, "expert_width": 16, "expert_ff": 16}
    cuts = [2045, *range(2046, 2052)]
    model, ids = toy.build(torch.float32, window=2048, **sizes), small.tokens(1, cuts[-1]) % 32
    twins = [m for m, _ in reorderings(model, model.config, 4)]
    reordered = [toy.run(m, ids, cuts)[:, -7:] for m in twins]
    found = toy.run(model, ids, cuts)[:, -7:]
    assert_within(run_published(oracle.published(model), ids, cuts)[:, -7:], found, reordered)
    shorter = toy.run(toy.build(torch.float32, window=2047, **sizes), ids, cuts)[:, -7:]
    assert within(shorter[:, :3], found[:, :3], [r[:, :3] for r in reordered])
    assert not within(shorter, found, reordered)


def test_token_by_token_equals_one_prefill() -> None:
    """In FP32, across the window's wrap; chunks too."""
    model = toy.build(torch.float32)
    ids = small.tokens(BATCH, CUTS[-1])
    end = CUTS[-1]
    whole = toy.run(model, ids, [end])
    reordered = [toy.run(m, ids, [end]) for m, _ in reorderings(model, model.config, ORDERINGS)]
    for cuts in (list(range(1, end + 1)), [5, 6, 17, 18]):
        assert_within(toy.run(model, ids, cuts), whole, reordered)


def test_the_library_prefill_is_the_same_function() -> None:
    """PyTorch's attention kernel, as the GPU presets use it, in FP32; ends aligned and not."""
    model, ids = toy.build(torch.float32), small.tokens(BATCH, CUTS[-1])
    library = toy.build(torch.float32, prefill_attention="sdpa")
    whole = toy.run(model, ids, CUTS)
    reordered = [toy.run(m, ids, CUTS) for m, _ in reorderings(model, model.config, ORDERINGS)]
    for aligned in (False, True):
        cache = muse_spark.cache(library.config, BATCH, CUTS[0], "cpu")
        cache.ends_aligned = aligned
        got = toy.run(library, ids[:, : CUTS[0]], CUTS[:1], cache)
        assert_within(got, whole[:, : CUTS[0]], [other[:, : CUTS[0]] for other in reordered])


@pytest.fixture(scope="module")
def bf16() -> tuple[MuseSpark, Trace]:
    """A model, and what the layers of the published one did with its weights."""
    model = toy.build(torch.bfloat16)
    other = oracle.published(model)
    trace = Trace().watch(other)
    run_published(other, small.tokens(BATCH, CUTS[-1]))
    return model, trace


def layers_outside_noise(model: MuseSpark, trace: Trace) -> list[int]:
    """The published run's layers that `model`, on the same inputs, misses by more than noise."""

    def run(m: Any, order: Tensor | None = None) -> list[Tensor]:
        cache = muse_spark.cache(m.config, BATCH, CUTS[-1], "cpu")
        return run_layers(m, trace, CUTS, order, cache)

    ours = run(model)
    noise = [run(m, order) for m, order in reorderings(model, model.config, ORDERINGS)]
    return [
        i
        for i, output in trace.outputs.items()
        if not within(output, ours[i], [seen[i] for seen in noise])
    ]


def test_bf16_layers_with_both_differences_emulated(bf16: tuple[MuseSpark, Trace]) -> None:
    model, trace = bf16
    assert len(trace.outputs) == model.config.layers
    assert layers_outside_noise(as_published(model), trace) == []


@pytest.mark.parametrize("left_out", ["combine", "attention"])
def test_bf16_neither_difference_can_be_left_out(
    bf16: tuple[MuseSpark, Trace], left_out: str
) -> None:
    """With one of them missing, every layer is outside the noise."""
    model, trace = bf16
    assert layers_outside_noise(as_published(model, **{left_out: False}), trace) == EVERY


def test_combine_in_expert_order_gives_transformers_bits() -> None:
    """On our own expert outputs: bit-equal; without it, most rows differ."""
    model = toy.build(torch.bfloat16)
    moe = model.model.language_model.layers[0].mlp
    x = torch.randn(1, 32, SMALL.hidden, generator=torch.Generator().manual_seed(5)).bfloat16()
    theirs = oracle.published(model).model.language_model.layers[0].mlp(x)
    assert torch.equal(PublishedMoE(moe)(x), theirs)
    assert (moe(x) != theirs).any(dim=-1).all()


def test_bf16_routes_agree(bf16: tuple[MuseSpark, Trace]) -> None:
    """Given the published router's own input, ours chooses the same experts."""
    model, trace = bf16
    other = oracle.published(model)
    for i, routes in trace.routes.items():
        seen: list[Tensor] = []
        other.model.language_model.layers[i].mlp.gate.register_forward_hook(
            lambda _, args, out, seen=seen: seen.append(args[0].flatten(0, -2))
        )
        run_published(other, small.tokens(BATCH, CUTS[-1]))
        gate = model.model.language_model.layers[i].mlp.gate
        chosen = torch.cat([gate(x)[1].unflatten(0, (BATCH, -1)) for x in seen], dim=1)
        assert torch.equal(chosen.sort(dim=-1).values, routes.sort(dim=-1).values)
