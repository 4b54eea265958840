"""A model file that the product knows nothing about: a small decoder with a full KV cache."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    layers: int = 2
    hidden: int = 64
    heads: int = 2
    vocabulary: int = 128


configs = {"toy": Config()}


class ScaledNorm(nn.Module):
    """Normalise, scale, shift: a chain of element-wise operators that a compiler can fuse."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        wide = wide * torch.sigmoid(wide) + torch.tanh(wide)
        return (wide * self.weight.float()).to(x.dtype)


class Mixer(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.heads
        self.qkv = nn.Parameter(torch.empty(3 * c.hidden, c.hidden, dtype=torch.bfloat16))
        self.out = nn.Parameter(torch.empty(c.hidden, c.hidden, dtype=torch.bfloat16))

    def forward(self, x: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.qkv).unflatten(-1, (self.heads, -1)).chunk(3, dim=-1)
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        k_cache[rows, positions] = k
        v_cache[rows, positions] = v
        scores = torch.einsum("bthd,bshd->bhts", q.float(), k_cache.float())
        held = torch.arange(k_cache.shape[1], device=x.device)
        hidden = held > positions[:, None, :, None]
        weights = scores.masked_fill(hidden, -1e30).softmax(dim=-1)
        mixed = torch.einsum("bhts,bshd->bthd", weights, v_cache.float()).to(x.dtype)
        return F.linear(mixed.flatten(-2), self.out)


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.norm = ScaledNorm(c.hidden)
        self.mixer = Mixer(c)

    def forward(self, h: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return h + self.mixer(self.norm(h), positions, k_cache, v_cache)


class Toy(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(c.vocabulary, c.hidden, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = ScaledNorm(c.hidden)

    def forward(self, ids: Tensor, positions: Tensor, cache: list) -> Tensor:
        h = self.embed(ids)
        for block, (k, v) in zip(self.blocks, cache, strict=True):
            h = block(h, positions, k, v)
        return F.linear(self.norm(h[:, -1:]), self.embed.weight).float()


def build(config: Config, device, seed: int) -> Toy:
    with torch.device("meta"):
        model = Toy(config).eval().requires_grad_(False)
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for tensor in model.state_dict().values():
        tensor.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)
    return model


def cache(config: Config, batch: int, capacity: int, device) -> list[tuple[Tensor, Tensor]]:
    shape = batch, capacity, config.heads, config.hidden // config.heads
    return [
        (
            torch.zeros(shape, dtype=torch.bfloat16, device=device),
            torch.zeros(shape, dtype=torch.bfloat16, device=device),
        )
        for _ in range(config.layers)
    ]
