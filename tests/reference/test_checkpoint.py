"""Checkpoints: round trips under both naming schemes, and the published library's own files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reference import checkpoint
from reference.beam import Beam
from tests.reference import small

BF16 = torch.bfloat16
PACKED = "model.layers.2.mlp.experts.gate_up_proj"
SHARD_BYTES = 100_000


def equal(a: Beam, b: Beam) -> bool:
    one, two = a.state_dict(), b.state_dict()
    return one.keys() == two.keys() and all(
        one[n].dtype == two[n].dtype and torch.equal(one[n], two[n]) for n in one
    )


@pytest.mark.parametrize("per_expert", [False, True], ids=["packed", "per-expert"])
@pytest.mark.parametrize("limit", [10**9, SHARD_BYTES], ids=["one-file", "shards"])
def test_round_trip(tmp_path: Path, per_expert: bool, limit: int) -> None:
    saved, loaded = small.build(BF16, seed=1), small.build(BF16, seed=2)
    assert not equal(saved, loaded)
    checkpoint.save(saved, tmp_path, per_expert=per_expert, max_shard_bytes=limit)
    checkpoint.load(loaded, tmp_path)
    assert equal(saved, loaded)
    files = sorted(p.name for p in tmp_path.iterdir())
    if limit > SHARD_BYTES:
        assert files == ["model.safetensors"]
    else:
        assert files[0] == f"model-00001-of-{len(files) - 1:05}.safetensors"
        assert files[-1] == "model.safetensors.index.json"


def test_names_of_both_schemes(tmp_path: Path) -> None:
    """Packed names are the state dict's; per-expert ones are the published checkpoint's."""
    model = small.build(BF16)
    state = model.state_dict()
    checkpoint.save(model, tmp_path / "packed")
    assert load_file(tmp_path / "packed" / "model.safetensors").keys() == state.keys()
    checkpoint.save(model, tmp_path / "each", per_expert=True)
    each = load_file(tmp_path / "each" / "model.safetensors")
    ff = small.SMALL.expert_ff
    prefix = "model.layers.2.mlp.experts"
    assert torch.equal(each[f"{prefix}.5.gate_proj.weight"], state[PACKED][5, :ff])
    assert torch.equal(each[f"{prefix}.5.up_proj.weight"], state[PACKED][5, ff:])
    down = state[f"{prefix}.down_proj"]
    assert torch.equal(each[f"{prefix}.15.down_proj.weight"], down[15])
    moe_layers, packed = 2, 2
    assert len(each) == len(state) + moe_layers * (3 * small.SMALL.experts - packed)


def test_shards_stay_below_the_limit_and_the_index_is_complete(tmp_path: Path) -> None:
    model = small.build(BF16)
    checkpoint.save(model, tmp_path, max_shard_bytes=SHARD_BYTES)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    state = model.state_dict()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
    assert index["weight_map"].keys() == state.keys()
    for file in set(index["weight_map"].values()):
        held = load_file(tmp_path / file)
        size = sum(t.nbytes for t in held.values())
        assert size <= SHARD_BYTES or len(held) == 1
        assert all(index["weight_map"][name] == file for name in held)


def test_transformers_own_checkpoint(tmp_path: Path) -> None:
    """Written by save_pretrained in shards, under whichever scheme that version uses."""
    oracle = pytest.importorskip("tests.reference.oracle")
    saved, loaded = small.build(BF16, seed=1), small.build(BF16, seed=2)
    oracle.published(saved).save_pretrained(tmp_path, max_shard_size="200KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    checkpoint.load(loaded, tmp_path)
    assert equal(saved, loaded)


@pytest.mark.parametrize("per_expert", [False, True], ids=["packed", "per-expert"])
def test_transformers_loads_ours(tmp_path: Path, per_expert: bool) -> None:
    oracle = pytest.importorskip("tests.reference.oracle")
    model = small.build(BF16)
    checkpoint.save(model, tmp_path, per_expert=per_expert, max_shard_bytes=SHARD_BYTES)
    oracle.published_config(model.config).save_pretrained(tmp_path)
    theirs = oracle.published_beam.BeamForCausalLM.from_pretrained(tmp_path, dtype=BF16)
    state = model.state_dict()
    assert theirs.state_dict().keys() == state.keys()
    assert all(torch.equal(t, state[n]) for n, t in theirs.state_dict().items())


def test_dtypes_are_the_models(tmp_path: Path) -> None:
    """A file in FP32 rounds once into BF16; a router in BF16 widens, and the router stays FP32."""
    model = small.build(torch.float32, seed=1)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    router = "model.layers.2.mlp.gate.weight"
    state[router] = state[router].to(BF16)
    save_file(state, tmp_path / "model.safetensors")
    loaded = small.build(BF16, seed=2)
    checkpoint.load(loaded, tmp_path)
    got = loaded.state_dict()
    assert got[router].dtype == torch.float32
    assert torch.equal(got[router], state[router].float())
    for name in ("lm_head.weight", PACKED):
        assert torch.equal(got[name], state[name].to(BF16))
    bias = "model.layers.3.mlp.gate.e_score_correction_bias"
    assert torch.equal(got[bias], state[bias])


def test_saving_over_a_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoint.save(small.build(BF16, seed=1), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"already holds model\.safetensors; choose another"):
        checkpoint.save(small.build(BF16, seed=2), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_saving_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write a checkpoint to .*choose another directory"):
        checkpoint.save(small.build(BF16), tmp_path / "file" / "below")
