"""A model file that the product does not know: other layers, another cache, no named regions."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ToyConfig:
    layers: int = 2
    width: int = 64
    heads: int = 4
    experts: int = 4
    vocabulary: int = 128


configs = {"toy": ToyConfig()}


class AddNorm(nn.Module):
    """(x, residual [B, T, D]) -> (their sum, its layer norm)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.empty(width, dtype=torch.bfloat16))

    def forward(self, x: Tensor, residual: Tensor):
        residual = residual + x
        wide = residual.float()
        wide = wide - wide.mean(-1, keepdim=True)
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return residual, scaled.to(x.dtype) * self.weight + self.bias


class Mix(nn.Module):
    """Attention over a cache that is a dict, rotated with complex numbers, written by scatter."""

    def __init__(self, c: ToyConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.qkv = nn.Linear(c.width, 3 * c.width, dtype=torch.bfloat16)
        self.out = nn.Linear(c.width, c.width, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor, positions: Tensor, store: dict[str, Tensor]) -> Tensor:
        batch, steps, width = x.shape
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in self.qkv(x).chunk(3, dim=-1))
        q, k = rotate(q, positions), rotate(k, positions)
        capacity = store["k"].shape[1] - 1
        slots = torch.where(positions < 0, capacity, positions)[..., None, None].expand_as(k)
        store["k"].scatter_(1, slots, k)
        store["v"].scatter_(1, slots, v)
        seen = torch.arange(capacity + 1, device=x.device) <= positions[..., None].clamp_min(0)
        q, k, v = (y.transpose(1, 2) for y in (q, store["k"], store["v"]))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])
        return self.out(y.transpose(1, 2).reshape(batch, steps, width))


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    steps = torch.arange(pairs.shape[-1], device=x.device) * -0.5
    angles = positions[..., None].float() * steps.exp()
    turn = torch.polar(torch.ones_like(angles), angles)[:, :, None]
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


class Choose(nn.Module):
    """x [B, T, D] -> (weights [B, T, 2], experts [B, T, 2])."""

    def __init__(self, c: ToyConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.experts, c.width))

    def forward(self, x: Tensor):
        top = F.linear(x.float(), self.weight).softmax(-1).topk(2, dim=-1)
        return top.values, top.indices


class Mixture(nn.Module):
    def __init__(self, c: ToyConfig) -> None:
        super().__init__()
        self.choose = Choose(c)
        shape = c.experts, c.width, c.width
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = self.choose(x)
        every = torch.einsum("btd,edf->btef", x, self.weight)
        chosen = every.gather(2, experts[..., None].expand(-1, -1, -1, every.shape[-1]))
        return (F.gelu(chosen).float() * weights[..., None]).sum(2).to(x.dtype)


class Block(nn.Module):
    def __init__(self, c: ToyConfig) -> None:
        super().__init__()
        self.mix, self.mixture = Mix(c), Mixture(c)
        self.first, self.second = AddNorm(c.width), AddNorm(c.width)

    def forward(self, x: Tensor, residual: Tensor, positions: Tensor, store: dict[str, Tensor]):
        residual, x = self.first(x, residual)
        residual, x = self.second(self.mix(x, positions, store), residual)
        return self.mixture(x), residual


class Toy(nn.Module):
    def __init__(self, c: ToyConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(c.vocabulary, c.width, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.head = nn.Linear(c.width, c.vocabulary, bias=False, dtype=torch.bfloat16)

    def forward(self, ids: Tensor, positions: Tensor, cache: list[dict[str, Tensor]]) -> Tensor:
        x = self.embed(ids)
        residual = torch.zeros_like(x)
        for block, store in zip(self.blocks, cache, strict=True):
            x, residual = block(x, residual, positions, store)
        return self.head(x + residual).float()


def build(config: ToyConfig, device: Any, seed: int) -> Toy:
    model = Toy(config).to(device).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    if torch.device(device).type != "meta":
        for tensor in model.state_dict().values():
            drawn = torch.randn(tensor.shape, generator=generator)
            spread = tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 0.3
            tensor.copy_(drawn * spread + (tensor.ndim == 1))
    return model


def cache(config: ToyConfig, batch: int, capacity: int, device: Any) -> list[dict[str, Tensor]]:
    shape = batch, capacity + 1, config.heads, config.width // config.heads
    return [
        {kind: torch.zeros(shape, dtype=torch.bfloat16, device=device) for kind in "kv"}
        for _ in range(config.layers)
    ]
