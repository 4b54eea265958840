"""The whole model against transformers: prefill, then decode across the window's wrap, batch 2.

In FP32 end to end, in BF16 layer by layer on the published model's own inputs and routes.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from reference.beam import Beam
from tests.reference import oracle, small
from tests.reference.layerwise import Trace, run_layers
from tests.reference.noise import assert_within, reorderings, within
from tests.reference.oracle import transformers
from tests.reference.published_rounding import as_published

CUTS = [13, *range(14, 19)]  # a prefill longer than the window of 8, and decodes past slot 16
BATCH = 2
ORDERINGS = 32


def run_published(model: Any, ids: Tensor) -> Tensor:
    """Logits [B, T, V] of the published model in the steps of CUTS."""
    cache = transformers.DynamicCache(config=model.config)
    logits = []
    for first, end in zip([0, *CUTS], CUTS, strict=False):
        place = small.positions(BATCH, first, end)
        result = model(ids[:, first:end], position_ids=place, cache=cache, use_cache=True)
        logits.append(result.logits)
    return torch.cat(logits, dim=1)


def test_fp32_prefill_and_decode() -> None:
    model = small.build(torch.float32)
    ids = small.tokens(BATCH, CUTS[-1])
    theirs = run_published(oracle.published(model), ids)
    reordered = (small.run(m, ids, CUTS) for m, _ in reorderings(model, model.config, ORDERINGS))
    assert_within(theirs, small.run(model, ids, CUTS), reordered)


@pytest.fixture(scope="module")
def bf16() -> tuple[Beam, Trace]:
    """A model, and what the layers of the published one did with its weights."""
    model = small.build(torch.bfloat16)
    other = oracle.published(model)
    trace = Trace().watch(other)
    run_published(other, small.tokens(BATCH, CUTS[-1]))
    return model, trace


def layers_outside_noise(model: Beam, trace: Trace) -> list[int]:
    """The published run's layers that `model`, on the same inputs, misses by more than noise."""
    ours = run_layers(model, trace, CUTS)
    noise = [run_layers(m, trace, CUTS, o) for m, o in reorderings(model, model.config, ORDERINGS)]
    return [
        i
        for i, output in trace.outputs.items()
        if not within(output, ours[i], [run[i] for run in noise])
    ]


def test_bf16_layers_with_both_differences_emulated(bf16: tuple[Beam, Trace]) -> None:
    model, trace = bf16
    assert len(trace.outputs) == model.config.layers
    assert layers_outside_noise(as_published(model), trace) == []


@pytest.mark.parametrize(
    ("left_out", "outside"), [("combine", [2, 3]), ("attention", [0, 1, 2, 3])]
)
def test_bf16_neither_difference_can_be_left_out(
    bf16: tuple[Beam, Trace], left_out: str, outside: list[int]
) -> None:
    """With one of them missing, exactly the layers that have it are outside the noise."""
    model, trace = bf16
    assert layers_outside_noise(as_published(model, **{left_out: False}), trace) == outside


def test_bf16_routes_agree(bf16: tuple[Beam, Trace]) -> None:
    """Given the published router's own input, ours chooses the same experts in the same order."""
    model, trace = bf16
    other = oracle.published(model)
    for i, routes in trace.routes.items():
        seen: list[Tensor] = []
        other.model.layers[i].mlp.gate.register_forward_hook(
            lambda _, args, out, seen=seen: seen.append(args[0].flatten(0, -2))
        )
        run_published(other, small.tokens(BATCH, CUTS[-1]))
        chosen = [model.model.layers[i].mlp.gate(x)[1].unflatten(0, (BATCH, -1)) for x in seen]
        assert torch.equal(torch.cat(chosen, dim=1), routes)
