"""Prefill attention against the reference's function with its one added rounding: causal ends,
windows, rings, hidden blocks, groups, strides."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.prefill_attention import CHANGE, WORD, PrefillKnobs, live_blocks
from reference.beam import PrefillAttend
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

pytestmark = needs_kernels
SMALL = PrefillKnobs(rows=64, block=32, stages=2, warps=4)


def arguments(batch, steps, heads, kv_heads, dim, length, scale=1.0):
    """q, k, v: caches with one slot more than is read, as the reference's have."""
    q = bf16(batch, steps, heads, dim, scale=scale)
    k, v = (bf16(batch, length + 1, kv_heads, dim, seed=s)[:, :-1] for s in (1, 2))
    return q, k, v


def causal(batch, steps, length) -> Tensor:
    position = torch.arange(length, device=DEVICE)
    return (position <= position[length - steps :, None]).expand(batch, -1, -1)


def ring(batch, steps, window, start) -> Tensor:
    """The reference's mask of a prefill: a ring of the last `window` positions before `start`, in
    the order of its slots, and the step's own keys."""
    slots = torch.arange(window, device=DEVICE)
    held = start - 1 - (start - 1 - slots) % window
    query = start + torch.arange(steps, device=DEVICE)
    held = torch.cat((held, query))
    mask = (held >= 0) & (held <= query[:, None]) & (held > query[:, None] - window)
    return mask.expand(batch, -1, -1).contiguous()


def rounded(q, k, v, mask, scale, at=1.0, exact=False) -> Tensor:
    """softmax in FP32, its numerators rounded to BF16 at the scale `at`; zeros where nothing is
    seen."""
    group = q.shape[2] // k.shape[2]
    k, v = (y.float().repeat_interleave(group, 2).transpose(1, 2) for y in (k, v))
    scores = q.float().transpose(1, 2) @ k.transpose(-1, -2) * scale
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    p = torch.exp(scores - scores.amax(-1, keepdim=True).clamp_min(-1e30)) * at
    total = p.sum(-1, keepdim=True)
    y = (p if exact else p.bfloat16().float()) @ v
    return (y / torch.where(total == 0, 1.0, total)).transpose(1, 2).to(q.dtype)


def assert_matches(args, mask, knobs=None, count=12):
    q, k, v = args
    node = PrefillAttend(q.shape[3] ** -0.5)
    found = run_triton(CHANGE, node, q, k, v, mask, knobs=knobs)
    seen = causal(q.shape[0], q.shape[1], k.shape[1]) if mask is None else mask
    scales = torch.linspace(1.0, 2.0, count + 1).tolist()[1:]
    others = [rounded(q, k, v, seen, node.scale, at) for at in scales]
    assert_within(found, rounded(q, k, v, seen, node.scale), others)
    return found


@pytest.mark.parametrize(
    ("batch", "steps", "heads", "kv_heads", "dim", "length", "scale"),
    [
        (1, 40, 6, 1, 32, 100, 1.0),
        (2, 33, 4, 2, 16, 33, 4.0),
        (1, 2, 3, 3, 64, 65, 1.0),
        (1, 70, 2, 1, 16, 71, 1e-3),
    ],
)
def test_causal_at_the_end_of_the_cache(batch, steps, heads, kv_heads, dim, length, scale):
    args = arguments(batch, steps, heads, kv_heads, dim, length, scale)
    assert_matches(args, None, SMALL)
    assert_matches(args, None)


@pytest.mark.parametrize("start", [0, 7, 40, 1000])
def test_the_window_of_a_ring(start):
    args = arguments(2, 50, 6, 1, 32, 82)
    assert_matches(args, ring(2, 50, 32, start))


def test_masks_and_causal_rows_agree():
    args = arguments(2, 30, 4, 1, 32, 150)
    mask = causal(2, 30, 150)
    assert_matches(args, mask)
    assert_matches(args, mask[:1].expand(2, -1, -1))


def test_hidden_blocks_are_not_read():
    """Not even NaN there matters: whole blocks that no query of a program sees are skipped."""
    q, k, v = arguments(1, 20, 6, 1, 32, 4 * WORD)
    mask = torch.zeros(1, 20, 4 * WORD, dtype=torch.bool, device=DEVICE)
    mask[..., WORD + 3 : WORD + 40] = True
    before = assert_matches((q, k, v), mask)
    k[:, 2 * WORD :], v[:, 2 * WORD :] = torch.nan, torch.nan
    assert same_bits(run_triton(CHANGE, PrefillAttend(32**-0.5), q, k, v, mask), before)


@pytest.mark.parametrize("length", [9 * WORD, 5 * WORD + 8, 3 * WORD + 13])
def test_the_list_of_blocks(length):
    """By eight bytes, and by bytes; any byte that is not zero counts as true."""
    batch, steps, tokens = 2, 7, 3
    values = torch.randint(1, 256, (batch, steps, length), device=DEVICE)
    values[torch.rand(batch, steps, length, device=DEVICE) < 0.5] = 0
    values[:, :4, WORD : 3 * WORD] = 0
    values[1, 6] = 0
    bits, blocks, counts = live_blocks(values.to(torch.uint8).view(torch.bool), tokens)
    words = -(-length // WORD)
    for b in range(batch):
        seen = []
        for t in range(steps):
            true = values[b, t].bool().tolist() + [False] * (words * WORD - length)
            rows = [true[w * WORD : (w + 1) * WORD] for w in range(words)]
            sums = [sum(bit << i for i, bit in enumerate(row)) for row in rows]
            assert [found % 2**64 for found in bits[b, t].tolist()] == sums
            seen.append([w for w, row in enumerate(rows) if any(row)])
        for tile in range(3):
            live = sorted(set().union(*seen[tile * tokens : (tile + 1) * tokens]))
            assert blocks[b, tile, : counts[b, tile]].tolist() == live


def test_the_list_of_blocks_of_one_mask_for_all_sequences():
    mask = torch.rand(1, 5, 3 * WORD, device=DEVICE) < 0.5
    bits, blocks, counts = live_blocks(mask.expand(2, -1, -1), 4)
    one = live_blocks(mask, 4)
    assert counts.tolist() == [[3, 3]] * 2
    assert torch.equal(bits, one[0].expand_as(bits))
    assert torch.equal(blocks, one[1].expand_as(blocks))


def test_queries_that_see_nothing_get_zeros():
    args = arguments(1, 30, 2, 1, 16, 40)
    mask = causal(1, 30, 40).clone()
    mask[:, 10:20] = False
    found = assert_matches(args, mask)
    assert not found[:, 10:20].any() and found[:, 9].any()


def test_every_knob_gives_the_same_function():
    args, seen = arguments(1, 30, 6, 1, 16, 150), 0
    for masked in (0, 1):
        shape = {"B": 1, "T": 30, "S": 150, "G": 6, "d": 16, "masked": masked}
        for knobs in all_knobs(CHANGE, shape):
            assert_matches(args, causal(1, 30, 150) if masked else None, knobs, count=4)
            seen += 1
    assert seen >= 8


def test_a_key_more_or_a_hundredth_more_would_be_noticed():
    q, k, v = arguments(2, 50, 6, 1, 32, 82)
    mask, wider = ring(2, 50, 32, 40), ring(2, 50, 32, 40)
    wider[:, 1:] |= mask[:, :-1]  # each query also sees the key that left its window
    others = [rounded(q, k, v, mask, 0.2, at) for at in (1.1, 1.3, 1.5, 1.7)]
    expected = rounded(q, k, v, mask, 0.2)
    assert within(others[0], expected, others[1:])
    assert not within(rounded(q, k, v, wider, 0.2), expected, others)
    coarse = (v.float() * 1.01).bfloat16()
    assert not within(rounded(q, k, coarse, mask, 0.2), expected, others)


@pytest.mark.parametrize("masked", [True, False], ids=["mask", "causal"])
def test_the_library_on_views_of_the_keys_gives_the_references_bits(masked):
    q, k, v = arguments(2, 20, 6, 1, 32, 70)
    node, shared = PrefillAttend(0.2), CHANGE.implementation("torch")
    mask = ring(2, 20, 50, 60) if masked else None
    assert shared.guard is not None and shared.guard(node, q, k, v, mask) is None
    found = shared.build(node, None)(q, k, v, mask)
    assert same_bits(found, node(q, k, v, mask).contiguous())
    assert "21 queries at the end of 20" in (
        shared.guard(node, *arguments(2, 21, 6, 1, 32, 20), None) or ""
    )
    more = k.expand(-1, -1, 2, -1)
    assert "2 KV heads" in (shared.guard(node, q, more, more, mask) or "")


def test_the_library_s_values_of_a_query_that_sees_nothing_are_not_used(monkeypatch):
    """PyTorch's CUDA kernels gave -3392 there (H200, torch 2.11)."""
    library = F.scaled_dot_product_attention

    def careless(q, k, v, attn_mask, scale):
        y = library(q, k, v, attn_mask=attn_mask, scale=scale)
        return y.masked_fill(~attn_mask.any(dim=-1, keepdim=True), -3392.0)

    monkeypatch.setattr(F, "scaled_dot_product_attention", careless)
    q, k, v = arguments(2, 20, 6, 1, 32, 70)
    mask = ring(2, 20, 50, 60)
    mask[1, 5:9] = False
    node = PrefillAttend(0.2)
    found = CHANGE.implementation("torch").build(node, None)(q, k, v, mask)
    assert not found[1, 5:9].any() and found[0, 5:9].any()
    assert same_bits(found, node(q, k, v, mask).contiguous())


def test_no_sequences_and_no_tokens():
    node = PrefillAttend(0.25)
    q, k, v = arguments(1, 5, 4, 2, 16, 10)
    assert run_triton(CHANGE, node, q[:0], k[:0], v[:0], None).shape == (0, 5, 4, 16)
    assert run_triton(CHANGE, node, q[:, :0], k, v, None).shape == (1, 0, 4, 16)


def test_guard_says_why():
    node = PrefillAttend(32**-0.5)
    q, k, v = arguments(2, 5, 4, 2, 32, 40)
    mask = causal(2, 5, 40)
    assert refusal(CHANGE, node, q, k, v, mask) == refusal(CHANGE, node, q, k, v, None) == ""
    assert "head dimension 24" in refusal(CHANGE, node, *arguments(1, 2, 2, 1, 24, 9), None)
    assert "fit together" in refusal(CHANGE, node, q, k, v[:, 1:], None)
    assert "at the end of 3" in refusal(CHANGE, node, q, k[:, :3], v[:, :3], None)
    assert "mask" in refusal(CHANGE, node, q, k, v, mask[..., 1:])
    assert "torch.float32" in refusal(CHANGE, node, q, k.float(), v, mask)
    assert "strides" in refusal(CHANGE, node, q[..., :16], k[..., :16], v[..., :16], None)


def test_heuristic_is_valid():
    for group in (1, 6, 8):
        for dim in (16, 64, 128, 256):
            for masked in (0, 1):
                shape = {"B": 8, "T": 2048, "S": 2560, "G": group, "d": dim, "masked": masked}
                knobs = PrefillKnobs.heuristic(shape)
                assert knobs.is_valid(shape), shape
                assert knobs.stages == (2 if dim > 128 and not masked else 3), shape


@pytest.mark.gpu
@pytest.mark.parametrize("length", [2048, 10_000], ids="bf16-T2048-S{}".format)
def test_causal_on_cuda(length):
    assert_matches(arguments(2, 2048, 6, 1, 128, length), None, count=4)


@pytest.mark.gpu
def test_the_window_on_cuda():
    assert_matches(arguments(2, 2048, 6, 1, 128, 2560), ring(2, 2048, 512, 98_304), count=4)
