"""A third architecture, as a file of reference/: what it does not make itself it has from there."""

from dataclasses import dataclass

import torch
from torch import nn

from reference.attend import Attend
from reference.cache import KVCache, step_keys
from reference.draw import random_model
from reference.layers import Linear, ParallelProjection, RMSNorm, SwiGLU


@dataclass(frozen=True)
class Config:
    layers: int = 2
    width: int = 256
    heads: int = 4
    inner: int = 512
    vocabulary: int = 512

    @property
    def head_dim(self):
        return self.width // self.heads


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, kind = c.heads, torch.bfloat16
        self.norm, self.mlp_norm = (RMSNorm(c.width, 1e-6, kind) for _ in range(2))
        self.q, self.k, self.v, self.o = (Linear(c.width, c.width, kind) for _ in range(4))
        self.gate, self.up = (Linear(c.width, c.inner, kind) for _ in range(2))
        self.down = Linear(c.inner, c.width, kind)
        self.project = ParallelProjection(("q", "k", "v"))
        self.expand = ParallelProjection(("gate", "up"))
        self.attend, self.act = Attend(c.head_dim**-0.5), SwiGLU()

    def forward(self, h, slots, mask, extent, cache):
        q, k, v = self.project(self.norm(h), self.q.weight, self.k.weight, self.v.weight)
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in (q, k, v))
        cache.write(k, v, slots)
        h = h + self.o(self.attend(q, *cache.seen(None, k, v, extent), mask).flatten(2))
        return h + self.down(
            self.act(*self.expand(self.mlp_norm(h), self.gate.weight, self.up.weight))
        )


class Third(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocabulary, c.width, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.layers))
        self.head = Linear(c.width, c.vocabulary, torch.bfloat16)

    def forward(self, ids, positions, cache):
        h = self.embed(ids)
        slots, _, mask, _ = step_keys(positions, cache.capacity, cache.extent, 1, False)
        for layer, kept in zip(self.layers, cache.layers, strict=True):
            h = layer(h, slots, mask, cache.extent, kept)
        return self.head(h[:, -1:])


configs = {"mini": Config()}


def build(config, device, seed):
    return random_model(lambda: Third(config), device, seed, draw)


def draw(name, tensor, generator):
    scale = 1.0 if "norm" in name or "embed" in name else tensor.shape[-1] ** -0.5
    tensor.normal_(std=scale, generator=generator)


def cache(config, batch, capacity, device):
    row = config.heads, config.head_dim
    return KVCache.empty([None] * config.layers, batch, capacity, row, torch.bfloat16, device)
