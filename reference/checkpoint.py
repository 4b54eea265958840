"""Weights in safetensors files under the published checkpoint's names.

A checkpoint is a directory with `model.safetensors`, or with `model.safetensors.index.json` and the
shards that it names. Tensors have the names of the model's state dict, except that a layer's routed
experts may come one by one, as they are published, and are then packed on load:

    experts.gate_up_proj [E, 2F, D]   from experts.<e>.gate_proj.weight, experts.<e>.up_proj.weight
    experts.down_proj    [E, D, F]    from experts.<e>.down_proj.weight

Everything is checked against the files' headers before the first value of the model changes.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What can be copied as it is, by safetensors' names. FP8 and integers would need their scales.
FLOATS = "BF16", "F16", "F32", "F64"


@dataclass(frozen=True)
class Stored:
    """What a file's header says about one tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def load(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Copy the checkpoint in `directory` into `model`, one tensor at a time.

    Values are converted to the model's dtypes: FP32 rounds once where the model holds BF16, and the
    router stays FP32 whatever the file holds. Raises ValueError, one line that names the tensor or
    the file, if the checkpoint is absent, damaged or doesn't fit; the model is then unchanged.
    """
    folder = Path(directory)
    stored = _read_headers(folder)
    state = model.state_dict()
    if any(tensor.is_meta for tensor in state.values()):
        raise ValueError(
            "the model is on the meta device, which holds no values; build it on cpu or cuda first"
        )
    targets = dict(_targets(state, stored))
    _check(folder, targets, stored)
    by_file: dict[Path, list[str]] = {}
    for name in targets:
        by_file.setdefault(stored[name].file, []).append(name)
    with torch.no_grad():
        for path, names in by_file.items():
            with safe_open(path, framework="pt") as file:
                for name in names:
                    targets[name].copy_(file.get_tensor(name))


def save(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    per_expert: bool = False,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write the model's weights to `directory`, in shards of at most `max_shard_bytes` (or one
    tensor, if that is larger), with the experts packed or one by one.

    Only one shard is copied at a time. Raises ValueError if the directory holds a checkpoint
    already, or can't be written.
    """
    folder = Path(directory)
    if present := [name for name in (SINGLE, INDEX) if (folder / name).exists()]:
        raise ValueError(f"{folder} already holds {present[0]}; choose another directory")
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        tensors |= _one_by_one(name, tensor) if per_expert else {name: tensor}
    shards = _shards(tensors, max_shard_bytes)
    files: dict[str, str] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for i, names in enumerate(shards):
            name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors" if shards[1:] else SINGLE
            # Experts are views of one tensor; safetensors wants each to own its storage.
            shard = {n: tensors[n].detach().cpu().clone() for n in names}
            save_file(shard, folder / f"{name}.part", metadata={"format": "pt"})
            os.replace(folder / f"{name}.part", folder / name)
            files |= dict.fromkeys(names, name)
        if shards[1:]:
            total = sum(tensor.nbytes for tensor in tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": files}
            (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"cannot write a checkpoint to {folder} ({error}); "
            "free space there or choose another directory"
        ) from error


def _one_by_one(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The published names of a state-dict tensor and the parts of it that they hold."""
    prefix, _, leaf = name.rpartition(".")
    if not prefix.endswith(".experts"):
        return {name: tensor}
    parts: dict[str, Tensor] = {}
    for i, expert in enumerate(tensor):
        if leaf == "gate_up_proj":
            gate, up = expert.chunk(2, dim=0)
            parts[f"{prefix}.{i}.gate_proj.weight"] = gate
            parts[f"{prefix}.{i}.up_proj.weight"] = up
        else:
            parts[f"{prefix}.{i}.{leaf}.weight"] = expert
    return parts


def _targets(state: dict[str, Tensor], stored: dict[str, Stored]) -> Iterator[tuple[str, Tensor]]:
    """Each name that must be stored, and the tensor or view to copy it into."""
    for name, tensor in state.items():
        parts = {name: tensor} if name in stored else _one_by_one(name, tensor)
        # Nothing of it is there under either name: report it by the model's own.
        yield from (parts if parts.keys() & stored.keys() else {name: tensor}).items()


def _check(folder: Path, targets: dict[str, Tensor], stored: dict[str, Stored]) -> None:
    fix = "build the model with the configuration that this checkpoint was made for"
    if missing := [name for name in targets if name not in stored]:
        shape = list(targets[missing[0]].shape)
        raise ValueError(
            f"{folder} lacks tensor {missing[0]} {shape}{_more(missing)}, which the model expects; "
            f"{fix}"
        )
    if unexpected := [name for name in stored if name not in targets]:
        first = stored[unexpected[0]]
        raise ValueError(
            f"{first.file} has tensor {unexpected[0]} {list(first.shape)}{_more(unexpected)}, "
            f"which the model doesn't have; {fix}"
        )
    for name, target in targets.items():
        there = stored[name]
        if there.shape != tuple(target.shape):
            raise ValueError(
                f"tensor {name} in {there.file} has shape {list(there.shape)}, the model expects "
                f"{list(target.shape)}; {fix}"
            )
        if there.dtype not in FLOATS:
            raise ValueError(
                f"tensor {name} in {there.file} has dtype {there.dtype}, the model expects one of "
                f"{', '.join(FLOATS)}; convert the checkpoint to one of these first"
            )


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _read_headers(folder: Path) -> dict[str, Stored]:
    """Every tensor of the checkpoint, from the headers of its files."""
    if not folder.is_dir():
        raise ValueError(f"no directory {folder}; give one that holds {SINGLE} or {INDEX}")
    index = folder / INDEX
    if index.is_file():
        placed = _read_index(index)
        files = [folder / name for name in sorted(set(placed.values()))]
    elif (folder / SINGLE).is_file():
        placed = {}
        files = [folder / SINGLE]
    else:
        raise ValueError(f"{folder} holds no checkpoint: it has neither {SINGLE} nor {INDEX}")
    stored: dict[str, Stored] = {}
    for path in files:
        if not path.is_file():
            raise ValueError(f"{index} names {path.name}, which isn't there; download it")
        for name, entry in _read_header(path):
            if placed and placed.get(name) != path.name:
                raise ValueError(
                    f"{path} has tensor {name}, which {index} places in {placed.get(name)}; "
                    "download index and shards again"
                )
            stored[name] = entry
    if absent := [name for name in placed if name not in stored]:
        raise ValueError(
            f"{folder / placed[absent[0]]} lacks tensor {absent[0]}{_more(absent)}, which "
            f"{index} places there; download it again"
        )
    return stored


def _read_header(path: Path) -> Iterator[tuple[str, Stored]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                part = file.get_slice(name)
                yield name, Stored(path, tuple(part.get_shape()), part.get_dtype())
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path} is not a readable safetensors file ({error}); download it again"
        ) from error


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> shard file name."""
    try:
        placed = json.loads(path.read_text())["weight_map"]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a checkpoint index ({type(error).__name__}: {error}); download it again"
        ) from error
    names = placed.values() if isinstance(placed, dict) else [None]
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{path} names {name!r} as a shard; shards must be files beside it")
    return placed


def _shards(tensors: dict[str, Tensor], limit: int) -> list[list[str]]:
    """Names in order, cut where the next tensor would make a shard larger than `limit` bytes."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards
