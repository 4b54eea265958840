"""A toy Beam with every kind of layer, and ways to run it."""

from dataclasses import replace

import torch
from torch import Tensor

from reference import beam
from reference.beam import Beam, BeamConfig
from reference.cache import KVCache

SMALL = BeamConfig(
    layers=4,
    hidden=96,
    vocabulary=160,
    query_heads=4,
    kv_heads=2,
    head_dim=32,
    window=8,
    full_every=2,  # dense sliding, dense full, MoE sliding, MoE full
    dense_layers=2,
    dense_ff=160,
    experts=16,
    expert_ff=48,
    top_k=4,
    groups=4,
    top_groups=2,
    gather_limit=16,
)


def small(dtype: torch.dtype, **changes: object) -> BeamConfig:
    return replace(SMALL, dtype=dtype, **changes)


def build(dtype: torch.dtype, seed: int = 0, **changes: object) -> Beam:
    return beam.build(small(dtype, **changes), "cpu", seed)


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Random token ids [B, T]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SMALL.vocabulary, (batch, length), generator=generator)


def positions(batch: int, first: int, end: int) -> Tensor:
    """first, ..., end - 1 for every sequence, [B, T] int64."""
    return torch.arange(first, end).expand(batch, -1).contiguous()


def run(model: Beam, ids: Tensor, cuts: list[int], cache: KVCache | None = None) -> Tensor:
    """Logits [B, T, V] of `ids` fed in steps that end at `cuts` (the last one is T)."""
    if cache is None:
        cache = beam.cache(model.config, ids.shape[0], ids.shape[1], "cpu")
    logits = []
    for first, end in zip([0, *cuts], cuts, strict=False):
        place = positions(ids.shape[0], first, end)
        logits.append(model(ids[:, first:end], place, cache, "all"))
    return torch.cat(logits, dim=1)
