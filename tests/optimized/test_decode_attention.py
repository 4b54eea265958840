"""Split decode attention against the reference: masks, rings, groups, strides, splits."""

import pytest
import torch

from optimized.decode_attention import CHANGE, AttentionKnobs
from reference.beam import Attend
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


def arguments(batch, heads, kv_heads, dim, slots, seen, scale=1.0):
    """(q, k, v, mask): caches with one slot more than is read, as the reference's have, and the
    first `seen` of `slots` positions visible to the last sequence, one fewer to each before it."""
    q = bf16(batch, 1, heads, dim, scale=scale)
    k, v = (bf16(batch, slots + 1, kv_heads, dim, seed=s)[:, :-1] for s in (1, 2))
    count = seen - torch.arange(batch - 1, -1, -1, device=DEVICE)
    mask = torch.arange(slots, device=DEVICE) < count[:, None, None]
    return q, k, v, mask


def reordered(node, args, count=16):
    """The reference with both of its reductions in other orders."""
    q, k, v, mask = args
    found = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        positions = torch.randperm(k.shape[1], generator=generator).to(DEVICE)
        columns = torch.randperm(q.shape[3], generator=generator).to(DEVICE)
        hidden = None if mask is None else mask[..., positions]
        found.append(node(q[..., columns], k[:, positions][..., columns], v[:, positions], hidden))
    return found


def on_tensor_cores(node, args):
    """The reference with BF16 tensor cores for both products; P enters as three exact BF16 terms.
    They align the terms of a sum and cut bits off, which orderings of FP32 sums do not show."""
    q, k, v, mask = args
    batch, _, heads, dim = q.shape
    rows = q.reshape(batch * k.shape[2], -1, dim)
    keys, values = (t.transpose(1, 2).reshape(len(rows), -1, dim) for t in (k, v))
    scores = torch.bmm(rows, keys.transpose(1, 2), out_dtype=torch.float32) * node.scale
    hidden = ~mask.expand(batch, k.shape[2], -1).reshape(len(rows), 1, -1)
    rest = torch.softmax(scores.masked_fill(hidden, torch.finfo(torch.float32).min), dim=-1)
    total = torch.zeros(len(rows), heads // k.shape[2], dim, device=q.device)
    for _ in range(3):
        part = rest.bfloat16()
        total += torch.bmm(part, values.contiguous(), out_dtype=torch.float32)
        rest = rest - part.float()
    return total.bfloat16().reshape(q.shape)


def node_for(dim):
    return Attend(dim**-0.5)


def assert_matches(args, knobs=None, count=16):
    node = node_for(args[0].shape[3])
    found = run_triton(CHANGE, node, *args, knobs=knobs)
    if args[3] is None:  # the reference's orderings need a mask that moves with the positions
        *rest, _ = args
        args = *rest, torch.ones(args[0].shape[0], 1, args[1].shape[1], dtype=torch.bool)
        args = *rest, args[3].to(DEVICE)
    noise = reordered(node, args, count)
    if DEVICE == "cuda":
        noise.append(on_tensor_cores(node, args))
    assert_within(found, node(*args), noise)


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "dim", "slots", "seen", "scale"),
    [
        (1, 6, 1, 128, 130, 130, 1.0),
        (3, 4, 2, 32, 100, 37, 1.0),
        (2, 3, 3, 16, 65, 65, 8.0),
        (1, 20, 1, 64, 64, 1, 1.0),
        (1, 2, 1, 256, 33, 20, 1e-3),
    ],
)
def test_matches_the_reference(batch, heads, kv_heads, dim, slots, seen, scale):
    assert_matches(arguments(batch, heads, kv_heads, dim, slots, seen, scale))


@pytest.mark.parametrize("slots", [1, 64, 100])
def test_without_a_mask_everything_is_seen(slots):
    q, k, v, _ = arguments(2, 4, 2, 32, slots, slots)
    assert_matches((q, k, v, None))


def test_a_ring_that_wrapped():
    """The visible slots of a ring need not be its first ones."""
    q, k, v, _ = arguments(1, 6, 1, 64, 96, 96)
    mask = torch.ones(1, 1, 96, dtype=torch.bool, device=DEVICE)
    mask[..., 10:70] = False
    assert_matches((q, k, v, mask))


def test_a_sequence_that_sees_nothing_is_the_mean_of_all():
    """As in the reference, whose hidden scores are finite: padding must not make NaN."""
    q, k, v, mask = arguments(2, 4, 2, 32, 80, 1)
    assert mask.sum(dim=-1).flatten().tolist() == [0, 1]
    assert_matches((q, k, v, mask))


def test_hidden_keys_do_not_matter():
    q, k, v, mask = arguments(1, 6, 1, 64, 128, 50)
    before = run_triton(CHANGE, node_for(64), q, k, v, mask)
    k[:, 50:], v[:, 50:] = 1e30, -1e30
    assert same_bits(run_triton(CHANGE, node_for(64), q, k, v, mask), before)


def test_every_knob_gives_the_same_function():
    args = arguments(1, 6, 1, 32, 300, 290)
    seen = 0
    for knobs in all_knobs(CHANGE, {"B": 1, "S": 300, "H": 6, "Hkv": 1, "d": 32}):
        assert_matches(args, knobs=knobs, count=4)
        seen += 1
    assert seen >= 8


def test_probabilities_rounded_to_bf16_would_be_noticed():
    """What fast kernels do, and this one does not need to."""
    args = arguments(2, 8, 1, 64, 128, 128)
    q, k, v, _ = args
    node = node_for(64)
    scores = torch.einsum("bthd,bskd->bhs", q.float(), k.float()) * node.scale
    weights = torch.softmax(scores[:, :], dim=-1).to(torch.bfloat16).float()
    rounded = torch.einsum("bhs,bskd->bhd", weights, v.float()).to(torch.bfloat16)[:, None]
    args = q, k, v, torch.ones_like(args[3])
    noise = reordered(node, args)
    assert not within(rounded, node(*args), noise)
    assert within(run_triton(CHANGE, node, *args), node(*args), noise)


def test_no_sequences():
    q, k, v, mask = (a[:0] for a in arguments(1, 4, 2, 32, 10, 10))
    assert run_triton(CHANGE, node_for(32), q, k, v, mask).shape == (0, 1, 4, 32)


def test_guard_says_why():
    node = node_for(32)
    q, k, v, mask = arguments(2, 4, 2, 32, 40, 40)
    assert refusal(CHANGE, node, q, k, v, mask) == ""
    assert refusal(CHANGE, node, q, k, v, None) == ""
    more = q.expand(2, 3, 4, 32)
    assert "more than one token" in refusal(CHANGE, node, more, k, v, mask.expand(2, 3, 40))
    assert "head dimension 24" in refusal(CHANGE, node, *arguments(1, 2, 1, 24, 9, 9))
    assert "fit together" in refusal(CHANGE, node, q, k, v[:, 1:], mask)
    assert "mask" in refusal(CHANGE, node, q, k, v, mask[..., 1:])
    assert "torch.float32" in refusal(CHANGE, node, q, k.float(), v, mask)


def test_heuristic_is_valid_for_any_shape():
    for batch, kv_heads in ((1, 1), (8, 1), (128, 8)):
        for slots in (1, 512, 8192, 100_352):
            for dim in (16, 64, 128, 256):
                shape = {"B": batch, "S": slots, "H": 6 * kv_heads, "Hkv": kv_heads, "d": dim}
                assert AttentionKnobs.heuristic(shape).is_valid(shape), shape


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "slots"), [(1, 100_352), (8, 100_352), (1, 512), (128, 512)])
def test_full_size_on_cuda(batch, slots):
    assert_matches(arguments(batch, 6, 1, 128, slots, slots - 5), count=4)


@pytest.mark.gpu
def test_every_knob_on_cuda():
    args = arguments(1, 6, 1, 128, 4000, 3900)
    for knobs in all_knobs(CHANGE, {"B": 1, "S": 4000, "H": 6, "Hkv": 1, "d": 128}):
        assert_matches(args, knobs=knobs, count=4)


@pytest.mark.gpu
def test_a_captured_graph_serves_other_positions():
    q, k, v, mask = arguments(1, 6, 1, 128, 2048, 1000)
    node = node_for(128)
    forward = CHANGE.implementation("triton").build(node, None)
    forward(q, k, v, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = forward(q, k, v, mask)
    mask[..., 1000:2000] = True
    graph.replay()
    assert same_bits(found, forward(q, k, v, mask))
    assert_within(found, node(q, k, v, mask), reordered(node, (q, k, v, mask)))
