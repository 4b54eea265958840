"""A checkpoint that doesn't fit or is damaged: one line that names the tensor or the file, what was
expected and what to do next, and a model that is as it was."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from reference import checkpoint
from reference.beam import Beam
from tests.reference import small

BF16 = torch.bfloat16
PACKED = "model.layers.2.mlp.experts.gate_up_proj"
GATE_5 = "model.layers.2.mlp.experts.5.gate_proj.weight"
SHARD_BYTES = 100_000


Edit = Callable[[dict[str, Tensor]], object]
MISFITS: dict[str, tuple[bool, Edit, str]] = {
    "missing": (
        False,
        lambda s: s.pop("model.norm.weight"),
        r"lacks tensor model\.norm\.weight \[96\], which the model expects; build the model with",
    ),
    "missing-several": (
        False,
        lambda s: [s.pop(n) for n in list(s) if "layers.1.self_attn.q" in n],
        r"lacks tensor model\.layers\.1\.self_attn\.q_proj\.weight \[128, 96\] and 1 more, which",
    ),
    "missing-experts": (
        False,
        lambda s: s.pop(PACKED),
        re.escape(f"lacks tensor {PACKED} [16, 96, 96], which the model expects"),
    ),
    "missing-one-expert": (
        True,
        lambda s: s.pop(GATE_5),
        re.escape(f"lacks tensor {GATE_5} [48, 96], which the model expects"),
    ),
    "unexpected": (
        False,
        lambda s: s.update({"model.layers.4.input_layernorm.weight": torch.ones(96)}),
        r"has tensor model\.layers\.4\.input_layernorm\.weight \[96\], which the model doesn't",
    ),
    "one-expert-too-many": (
        True,
        lambda s: s.update({GATE_5.replace("5", "16"): s[GATE_5].clone()}),
        r"has tensor model\.layers\.2\.mlp\.experts\.16\.gate_proj\.weight \[48, 96\], which the",
    ),
    "both-schemes-at-once": (
        False,
        lambda s: s.update({GATE_5: torch.ones(48, 96)}),
        r"has tensor model\.layers\.2\.mlp\.experts\.5\.gate_proj\.weight \[48, 96\], which the",
    ),
    "shape": (
        False,
        lambda s: s.update({"lm_head.weight": torch.ones(160, 97)}),
        r"tensor lm_head\.weight in .* has shape \[160, 97\], the model expects \[160, 96\]; build",
    ),
    "shape-of-an-expert": (
        True,
        lambda s: s.update({GATE_5: torch.ones(96, 48)}),
        re.escape(f"tensor {GATE_5} in") + r".* has shape \[96, 48\], the model expects \[48, 96\]",
    ),
    "dtype-integer": (
        False,
        lambda s: s.update({"model.norm.weight": torch.ones(96, dtype=torch.int32)}),
        r"tensor model\.norm\.weight in .* has dtype I32, the model expects one of BF16, F16, F32",
    ),
    "dtype-fp8": (
        False,
        lambda s: s.update({PACKED: s[PACKED].to(torch.float8_e4m3fn)}),
        re.escape(f"tensor {PACKED} in") + r".* has dtype F8_E4M3, .*; convert the checkpoint",
    ),
}


def refused(model: Beam, folder: Path, match: str) -> None:
    """Loading raises one line that matches, and leaves the model as it was."""
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(ValueError, match=match) as error:
        checkpoint.load(model, folder)
    assert "\n" not in str(error.value)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize(("per_expert", "edit", "match"), MISFITS.values(), ids=MISFITS.keys())
def test_a_misfit_names_the_tensor(
    tmp_path: Path, per_expert: bool, edit: Edit, match: str
) -> None:
    checkpoint.save(small.build(BF16, seed=1), tmp_path / "good", per_expert=per_expert)
    state = load_file(tmp_path / "good" / "model.safetensors")
    edit(state)
    save_file(state, tmp_path / "model.safetensors")
    refused(small.build(BF16, seed=2), tmp_path, match)


def test_a_checkpoint_of_another_size_is_refused(tmp_path: Path) -> None:
    checkpoint.save(small.build(BF16, hidden=64), tmp_path)
    refused(small.build(BF16), tmp_path, r"tensor model\.embed_tokens\.weight .*\[160, 64\]")


def test_no_directory(tmp_path: Path) -> None:
    refused(small.build(BF16), tmp_path / "absent", "no directory .*absent; give one that holds")


def test_a_file_instead_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(small.build(BF16), tmp_path / "file", "no directory .*file; give one that holds")


def test_an_empty_directory(tmp_path: Path) -> None:
    refused(small.build(BF16), tmp_path, r"holds no checkpoint: it has neither model\.safetensors")


@pytest.mark.parametrize("keep", [0, 7, 1000, -1], ids=["empty", "header", "middle", "last-byte"])
def test_a_truncated_file(tmp_path: Path, keep: int) -> None:
    checkpoint.save(small.build(BF16, seed=1), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(small.build(BF16), tmp_path, r"model\.safetensors is not a readable safetensors file")


def test_a_file_of_garbage(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 4096)
    refused(small.build(BF16), tmp_path, r"is not a readable safetensors file \(.*download it")


def sharded(tmp_path: Path) -> tuple[Path, dict]:
    checkpoint.save(small.build(BF16, seed=1), tmp_path, max_shard_bytes=SHARD_BYTES)
    index = tmp_path / "model.safetensors.index.json"
    return index, json.loads(index.read_text())


def test_a_missing_shard(tmp_path: Path) -> None:
    sharded(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    refused(small.build(BF16), tmp_path, f"names {shard.name}, which isn't there; download it")


def test_a_damaged_last_shard_is_found_before_anything_changes(tmp_path: Path) -> None:
    sharded(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1])
    refused(small.build(BF16), tmp_path, f"{shard.name} is not a readable safetensors file")


def test_an_index_that_places_a_tensor_elsewhere(tmp_path: Path) -> None:
    index, content = sharded(tmp_path)
    content["weight_map"]["lm_head.weight"] = content["weight_map"]["model.embed_tokens.weight"]
    index.write_text(json.dumps(content))
    refused(small.build(BF16), tmp_path, r"lm_head\.weight, which .*download .* again")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "../b"}}',
    ],
)
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refused(small.build(BF16), tmp_path, r"index\.json (is not a checkpoint index|names .* shard)")


def test_a_meta_model_is_refused(tmp_path: Path) -> None:
    checkpoint.save(small.build(BF16), tmp_path)
    model = small.beam.build(small.small(BF16), "meta", 0)
    with pytest.raises(ValueError, match="the model is on the meta device"):
        checkpoint.load(model, tmp_path)
