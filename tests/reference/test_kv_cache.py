"""The KV cache: prefill, chunks and decode agree, rings wrap, windows have sharp edges."""

import pytest
import torch
from torch import Tensor

from reference import beam
from reference.cache import LayerCache, ring_positions, write_slots
from tests.reference import small
from tests.reference.layerwise import Trace, force, run_layers
from tests.reference.noise import assert_within, reorderings

BATCH, T, W = 2, 27, small.SMALL.window  # three wraps of the ring of 8
ORDERINGS = 16
CHUNKS = {
    "token-by-token": list(range(1, T + 1)),
    "chunks-of-5": [*range(5, T, 5), T],
    "chunks-of-window": [*range(W, T, W), T],
    "chunks-beyond-window": [11, 22, T],
    "prefill-then-decode": [W + 1, *range(W + 2, T + 1)],
}
EACH_CHUNKING = pytest.mark.parametrize("cuts", CHUNKS.values(), ids=CHUNKS.keys())


@pytest.fixture(scope="module")
def fp32() -> tuple[beam.Beam, Tensor, Tensor, list[Tensor]]:
    """A model, ids, the logits of a one-shot prefill, and those of reordered models."""
    model, ids = small.build(torch.float32), small.tokens(BATCH, T)
    reordered = [small.run(m, ids, [T]) for m, _ in reorderings(model, model.config, ORDERINGS)]
    return model, ids, small.run(model, ids, [T]), reordered


@pytest.fixture(scope="module")
def bf16() -> tuple[beam.Beam, Trace, list[Tensor], list[list[Tensor]]]:
    """A model with forced routes, its trace, its layers' outputs, and those of reordered models."""
    model = small.build(torch.bfloat16)
    trace = Trace().watch(model)
    small.run(model, small.tokens(BATCH, T), [T])
    model = force(model)
    every = [run_layers(m, trace, [T], o) for m, o in reorderings(model, model.config, ORDERINGS)]
    return model, trace, run_layers(model, trace, [T]), every


@EACH_CHUNKING
def test_fp32_steps_give_the_logits_of_one_prefill(fp32, cuts: list[int]) -> None:
    model, ids, whole, reordered = fp32
    assert_within(small.run(model, ids, cuts), whole, reordered)


@EACH_CHUNKING
def test_bf16_steps_give_each_layers_output_of_one_prefill(bf16, cuts: list[int]) -> None:
    model, trace, whole, reordered = bf16
    for i, output in enumerate(run_layers(model, trace, cuts)):
        assert_within(output, whole[i], (run[i] for run in reordered))


def padded(lengths: list[int]) -> Tensor:
    """Positions [B, T] of right-padded sequences of these lengths."""
    place = torch.arange(max(lengths)).expand(len(lengths), -1)
    return torch.where(place < torch.tensor(lengths)[:, None], place, -1)


def test_sequences_of_different_lengths_equal_each_alone() -> None:
    """A padded prefill, then decodes in which every sequence is at another position."""
    model, lengths, more = small.build(torch.float32), [T - 10, 3, W, T], 10
    ids = small.tokens(len(lengths), T + more, seed=4)

    def together(m: beam.Beam) -> Tensor:
        cache = beam.cache(m.config, len(lengths), T + more, "cpu")
        steps = [m(ids[:, :T], padded(lengths), cache)]
        for i in range(more):
            place = torch.tensor(lengths)[:, None] + i
            steps.append(m(ids.gather(1, place), place, cache))
        return torch.cat(steps, dim=1)

    alone = []
    for row, length in enumerate(lengths):
        cuts = [length, *range(length + 1, length + more + 1)]
        logits = small.run(model, ids[row : row + 1, : length + more], cuts)
        alone.append(logits[:, length - 1 :])
    reordered = (together(m) for m, _ in reorderings(model, model.config, ORDERINGS))
    assert_within(torch.cat(alone), together(model), reordered)


def test_a_finished_sequence_disturbs_nobody() -> None:
    """Decoding with position -1 in one row: finite, and the other row and the cache unchanged."""
    model, ids = small.build(torch.float32), small.tokens(2, W + 1)
    caches = [beam.cache(model.config, 2, W + 1, "cpu") for _ in "ab"]
    for cache in caches:
        model(ids[:, :W], small.positions(2, 0, W), cache)
    both = model(ids[:, W:], torch.tensor([[W], [W]]), caches[0])
    one = model(ids[:, W:], torch.tensor([[W], [-1]]), caches[1])
    assert torch.equal(one[0], both[0])
    assert one.isfinite().all()
    for i, layer in enumerate(caches[1].layers):
        assert torch.equal(layer.k[0, :-1], caches[0].layers[i].k[0, :-1])
    for layer in caches[1].layers:
        assert (layer.k[1, W:-1] == 0).all()  # nothing of the padding is in a slot that is read


@pytest.mark.parametrize(
    "steps", [[1] * 30, [3] * 10, [W] * 4, [W + 3, 1, 20, 6], [1, 2 * W + 5, 1]]
)
def test_a_ring_holds_the_last_window_whatever_the_steps(steps: list[int]) -> None:
    """Against a plain list: after each step, slot s holds the newest position p with p % W == s."""
    layer = LayerCache(*torch.full((2, 1, W + 1, 1, 1), -1.0), window=W)
    end = 0
    for count in steps:
        place = torch.arange(end, end + count)[None]
        values = place[..., None, None].float()
        layer.write(values, values, write_slots(place, capacity=10**6, window=W))
        end += count
        newest = [max((p for p in range(end) if p % W == s), default=-1) for s in range(W)]
        assert layer.k[0, :W, 0, 0].tolist() == newest
        held = ring_positions(torch.tensor([end]), W)[0].tolist()
        assert [p if p >= 0 else -1 for p in held] == newest


def test_padding_is_written_to_the_spare_slot_only() -> None:
    place = padded([2, 0, 3])
    assert write_slots(place, capacity=10, window=None).tolist() == [
        [0, 1, 10],
        [10, 10, 10],
        [0, 1, 2],
    ]
    assert write_slots(place, capacity=10, window=2).tolist() == [[0, 1, 2], [2, 2, 2], [2, 1, 0]]


@pytest.mark.parametrize("cuts", [[T], CHUNKS["token-by-token"]], ids=["prefill", "decode"])
@pytest.mark.parametrize("position", [0, W - 2, W - 1, W, W + 1, 2 * W, T - 1])
@pytest.mark.parametrize("layer", [0, 1], ids=["sliding", "full"])
def test_a_query_sees_exactly_its_window(layer: int, position: int, cuts: list[int]) -> None:
    """Change the input of one token at a time: the attention output moves iff the query sees it."""
    model = small.build(torch.float32)
    attention = model.model.layers[layer].self_attn
    generator = torch.Generator().manual_seed(9)
    plain = torch.randn(1, T, small.SMALL.hidden, generator=generator)
    x = plain.repeat(T + 1, 1, 1)
    x[torch.arange(T), torch.arange(T)] += 1.0  # row j differs at token j, the last row nowhere
    cache = beam.cache(model.config, T + 1, T, "cpu")
    outputs = []
    for first, end in zip([0, *cuts], cuts, strict=False):
        step = model.step(small.positions(T + 1, first, end), cache)
        outputs.append(attention(x[:, first:end], step, cache.layers[layer]))
    seen = torch.cat(outputs, dim=1)[:, position]
    moved = (seen[:-1] != seen[-1]).any(dim=-1).nonzero().flatten().tolist()
    first = max(0, position - W + 1) if layer == 0 else 0
    assert moved == list(range(first, position + 1))


def test_extent_bounds_what_full_layers_read(fp32) -> None:
    """Slots beyond `extent` are never looked at, whatever they hold."""
    model, ids, whole, reordered = fp32
    cache = beam.cache(model.config, BATCH, 4 * T, "cpu")
    cache.extent = T
    for layer in cache.layers:
        if layer.window is None:
            layer.k[:, T:], layer.v[:, T:] = torch.nan, torch.nan
    assert_within(small.run(model, ids, [T], cache), whole, reordered)


def test_bytes() -> None:
    c = small.small(torch.bfloat16)
    cache = beam.cache(c, 3, 100, "cpu")
    slots = 2 * (100 + 1) + 2 * (W + 1)  # two full and two sliding layers, a spare slot in each
    assert cache.nbytes == 3 * slots * 2 * c.kv_heads * c.head_dim * 2
