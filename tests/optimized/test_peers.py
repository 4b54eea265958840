"""Peers: found by their files, absent with a reason, called with the region's own arguments."""

import dataclasses
import sys

import pytest
import torch

from optimized.change import Contract, apply_change, nodes, share
from optimized.peers import layouts
from optimized.peers.peer import Bound, Peer, peers
from optimized.peers.vllm_qk_norm import guard_scale, positions_of
from reference import models

BEAM = models.load("beam")


@pytest.fixture(scope="module")
def model():
    return BEAM.build(BEAM.configs["mini"], "cpu", 0)


def test_every_peer_is_for_a_region_of_the_reference(model):
    found = peers()
    assert len(found) == len({p.name for p in found}) >= 10
    assert {p.name for p in found if not nodes(model, p.region)} == set()


def test_no_library_is_imported_before_it_is_asked_for():
    peers()
    assert {"flashinfer", "quack", "vllm"} & set(sys.modules) == set()


def test_a_peer_that_cannot_run_says_why(tmp_path, monkeypatch):
    missing = Peer(name="m", region="r", library="no_such_library", bind=Bound)
    assert missing.absent("cpu") == "runs on cuda, this is cpu"
    assert "no_such_library cannot be imported: No module" in str(missing.absent("cuda"))
    (tmp_path / "half_a_library.py").write_text("raise RuntimeError('no compiled part\\nmore')")
    monkeypatch.syspath_prepend(str(tmp_path))
    half = dataclasses.replace(missing, library="half_a_library")
    assert half.absent("cuda") == "half_a_library cannot be imported: no compiled part"
    whole = dataclasses.replace(missing, library="torch")
    assert whole.absent("cuda") is None
    assert dataclasses.replace(whole, broken=lambda: "it hangs").absent("cuda") == "it hangs"


def test_a_peer_is_a_candidate_for_its_region(model):
    packed = next(p for p in peers() if p.library == "torch")
    tree = share(model)
    apply_change(tree, packed.change(Contract(numerics="reduction")), "torch")
    name = nodes(model, packed.region)[0]
    x = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    parent = model.get_submodule(name.rpartition(".")[0])
    weights = [getattr(parent, n).weight for n in model.get_submodule(name).names]
    got = tree.get_submodule(name)(x, *weights)
    want = model.get_submodule(name)(x, *weights)
    assert [y.shape for y in got] == [y.shape for y in want]
    assert all(torch.allclose(a.float(), b.float()) for a, b in zip(got, want, strict=True))


def test_positions_are_recovered_from_the_factors_of_a_million_positions():
    p = torch.arange(-1, 1_000_000)
    factors = torch.exp(0.1 * torch.log1p((p.float() + 1) / 2048))
    assert (positions_of(factors) - p).abs().max() <= 1
    assert torch.equal(positions_of(factors[:100_000]), p[:100_000])


def test_factors_of_no_position_are_declined():
    factors = torch.exp(0.1 * torch.log1p(torch.tensor([[8.0, 100_000.0]]) / 2048))
    args = [torch.empty(0)] * 5
    assert guard_scale(None, *args, factors) is None
    assert "none of a position's" in guard_scale(None, *args, factors * 1.00001)


def test_a_joined_cache_holds_each_key_beside_its_value():
    k = torch.arange(2 * 3 * 2 * 4).view(2, 3, 2, 4)
    joined = layouts.joined_cache(k, -k)
    assert joined.shape == (2, 2, 3, 8) and joined.stride(-1) == 1
    assert torch.equal(joined[1, 0, 2], torch.cat((k[1, 2, 0], -k[1, 2, 0])))
    back = torch.zeros_like(k), torch.zeros_like(k)
    layouts.split_cache(joined, *back)
    assert torch.equal(back[0], k) and torch.equal(back[1], -k)


@pytest.mark.parametrize("count", [0, 3])
def test_tokens_lie_in_rows(count):
    x = torch.arange(2 * count * 2 * 4).view(2, count, 2, 4)
    assert torch.equal(layouts.tokens(x), x.view(2 * count, 8))
    assert layouts.rows(x).shape == (4 * count, 4)
    assert (layouts.no_rows(None, x) is None) == (count > 0)


def test_slots_of_all_sequences_count_on():
    slots = torch.tensor([[0, 4], [2, 3]])
    assert layouts.flat_slots(slots, 5).tolist() == [0, 4, 7, 8]
