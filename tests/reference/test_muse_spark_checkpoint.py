"""Checkpoints: round trips, and files that transformers wrote and reads."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reference import checkpoint, muse_spark
from reference.muse_spark import MuseSpark
from tests.reference.test_muse_spark_media import BOTH

oracle = pytest.importorskip("tests.reference.muse_spark_oracle")


def build(seed: int) -> MuseSpark:
    return muse_spark.build(BOTH, "cpu", seed)


def equal(a: MuseSpark, b: MuseSpark) -> bool:
    one, two = a.state_dict(), b.state_dict()
    return one.keys() == two.keys() and all(
        one[n].dtype == two[n].dtype and torch.equal(one[n], two[n]) for n in one
    )


@pytest.mark.parametrize("per_expert", [False, True], ids=["packed", "per-expert"])
def test_round_trip(tmp_path: Path, per_expert: bool) -> None:
    saved, loaded = build(1), build(2)
    assert not equal(saved, loaded)
    checkpoint.save(saved, tmp_path, per_expert=per_expert, max_shard_bytes=100_000)
    assert (tmp_path / "model.safetensors.index.json").exists()
    checkpoint.load(loaded, tmp_path)
    assert equal(saved, loaded)


def test_transformers_own_checkpoint(tmp_path: Path) -> None:
    saved, loaded = build(1), build(2)
    oracle.published(saved).save_pretrained(tmp_path, max_shard_size="200KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    checkpoint.load(loaded, tmp_path)
    assert equal(saved, loaded)


def test_transformers_loads_ours(tmp_path: Path) -> None:
    """Into the same dtypes: routers and residual gates stay FP32."""
    model = build(1)
    checkpoint.save(model, tmp_path)
    oracle.published_config(model.config).save_pretrained(tmp_path)
    kind = oracle.modeling.MuseSparkForConditionalGeneration
    theirs = kind.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    ours = model.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(t.dtype == ours[n].dtype and torch.equal(t, ours[n]) for n, t in theirs.items())
    wide = {n.rsplit(".", 2)[1] for n, t in theirs.items() if t.dtype == torch.float32}
    assert wide == {"gate", "post_attention_residual_gate", "post_feedforward_residual_gate"}


def test_a_checkpoint_without_an_encoder_does_not_fit(tmp_path: Path) -> None:
    checkpoint.save(build(1), tmp_path)
    for name in ("vision", "audio"):
        other = muse_spark.build(replace(BOTH, **{name: None}), "cpu", 0)
        with pytest.raises(ValueError, match=f"has tensor model.{name}_.*doesn't have"):
            checkpoint.load(other, tmp_path)
