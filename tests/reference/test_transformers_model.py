"""The whole model against transformers: prefill, then decode across the window's wrap, batch 2.

In FP32 end to end. In BF16 layer by layer: a random MoE model is chaotic (one flipped bit sends a
token to other experts), so each layer gets the published model's own input and routes.
"""

import pytest
import torch
from torch import Tensor

from reference.beam import Beam
from tests.reference import oracle, small
from tests.reference.noise import assert_within, reorderings, undo, within
from tests.reference.oracle import Recorder, transformers
from tests.reference.published_rounding import ForcedRouter, as_published

CUTS = [13, *range(14, 19)]  # a prefill longer than the window of 8, and decodes past slot 16
BATCH = 2
ORDERINGS = 16


def run_published(model, ids: Tensor) -> tuple[Tensor, Recorder]:
    """Logits [B, T, V] of the published model in the steps of CUTS, and what its layers did."""
    cache = transformers.DynamicCache(config=model.config)
    record, logits = Recorder(model), []
    for first, end in zip([0, *CUTS], CUTS, strict=False):
        record.step()
        place = small.positions(BATCH, first, end)
        result = model(ids[:, first:end], position_ids=place, cache=cache, use_cache=True)
        logits.append(result.logits)
    return torch.cat(logits, dim=1), record


def test_fp32_prefill_and_decode() -> None:
    model = small.build(torch.float32)
    ids = small.tokens(BATCH, CUTS[-1])
    theirs, record = run_published(oracle.published(model), ids)
    assert len(record.routes) == len(CUTS)
    reordered = (small.run(m, ids, CUTS) for m, _ in reorderings(model, model.config, ORDERINGS))
    assert_within(theirs, small.run(model, ids, CUTS), reordered)


def run_layers(model: Beam, record: Recorder, order: Tensor | None = None) -> list[list[Tensor]]:
    """The output [B, T, D] of every layer at every step, each fed what the published layer got."""
    cache = small.beam.cache(model.config, BATCH, CUTS[-1], "cpu")
    outputs = []
    for step_index, (first, end) in enumerate(zip([0, *CUTS], CUTS, strict=False)):
        step = model.step(small.positions(BATCH, first, end), cache)
        outputs.append([])
        for i, layer in enumerate(model.model.layers):
            h = record.inputs[step_index][i]
            h = h if order is None else h[..., order]
            for module in layer.modules():
                if isinstance(module, ForcedRouter):
                    module.experts = record.routes[step_index][i]
            h, _ = layer(
                h, layer.input_layernorm(h), step, cache.layers[i], model.model.norm.weight
            )
            outputs[-1].append(h if order is None else undo(h, order))
    return outputs


def by_layer(outputs: list[list[Tensor]], layer: int) -> Tensor:
    return torch.cat([step[layer] for step in outputs], dim=1)


@pytest.fixture(scope="module")
def bf16() -> tuple[Beam, Recorder]:
    model = small.build(torch.bfloat16)
    ids = small.tokens(BATCH, CUTS[-1])
    return model, run_published(oracle.published(model), ids)[1]


def reordered_layers(model: Beam, record: Recorder) -> list[list[list[Tensor]]]:
    return [run_layers(m, record, o) for m, o in reorderings(model, model.config, 2 * ORDERINGS)]


def test_bf16_layer_by_layer_with_both_differences_emulated(bf16: tuple[Beam, Recorder]) -> None:
    model, record = bf16
    emulated = as_published(model)
    ours = run_layers(emulated, record)
    noise = reordered_layers(emulated, record)
    for i in range(model.config.layers):
        theirs = by_layer(record.outputs, i)
        assert_within(theirs, by_layer(ours, i), (by_layer(run, i) for run in noise))


@pytest.mark.parametrize("left_out", ["combine", "attention"])
def test_bf16_neither_difference_can_be_left_out(
    bf16: tuple[Beam, Recorder], left_out: str
) -> None:
    """With one of them missing, exactly the layers that have it are outside the noise."""
    model, record = bf16
    partial = as_published(model, **{left_out: False})
    ours = run_layers(partial, record)
    noise = reordered_layers(partial, record)
    outside = [
        i
        for i in range(model.config.layers)
        if not within(
            by_layer(record.outputs, i), by_layer(ours, i), [by_layer(r, i) for r in noise]
        )
    ]
    moe = [i for i in range(model.config.layers) if not model.config.is_dense(i)]
    assert outside == (moe if left_out == "combine" else list(range(model.config.layers)))


def test_bf16_routes_agree(bf16: tuple[Beam, Recorder]) -> None:
    """Given the published router's own input, ours chooses the same experts in the same order."""
    model, record = bf16
    other = oracle.published(model)
    inputs: dict[int, list[Tensor]] = {}

    def hook(i: int):
        return lambda _, args: inputs.setdefault(i, []).append(args[0].flatten(0, -2))

    for i, layer in enumerate(other.model.layers):
        if not model.config.is_dense(i):
            layer.mlp.gate.register_forward_pre_hook(hook(i))
    _, again = run_published(other, small.tokens(BATCH, CUTS[-1]))
    for i, rows in inputs.items():
        ours = torch.cat([model.model.layers[i].mlp.gate(x)[1] for x in rows])
        assert torch.equal(ours, torch.cat([routes[i] for routes in again.routes]))
