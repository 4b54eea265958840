"""A model file with one region whose rounding points lie in several modules."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    width: int = 64
    vocabulary: int = 128


configs = {"sets": Config()}


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).to(x.dtype)


class Halve(nn.Module):
    """A power of two: neither this rounding nor the one before it shows alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


class Add(nn.Module):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return x + residual


class Weigh(nn.Module):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * weight


class Tail(nn.Module):
    """(x, residual [B, T, D], weight [D]) -> tanh((norm(x) / 2 + residual) * weight)."""

    region = "tail"

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.halve, self.add, self.weigh = Norm(), Halve(), Add(), Weigh()

    def forward(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        y = self.weigh(self.add(self.halve(self.norm(x)), residual), weight)
        return torch.tanh(y.float()).to(x.dtype)


class Model(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(c.vocabulary, c.width, dtype=torch.bfloat16)
        self.mix = nn.Linear(c.width, c.width, bias=False, dtype=torch.bfloat16)
        self.weight = nn.Parameter(torch.empty(c.width, dtype=torch.bfloat16))
        self.tail = Tail()

    def forward(self, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        h = self.embed(ids)
        return self.mix(self.tail(self.mix(h), h, self.weight)).float()


def build(config: Config, device: Any, seed: int) -> Model:
    model = Model(config).to(device).eval().requires_grad_(False)
    if torch.device(device).type != "meta":
        generator = torch.Generator().manual_seed(seed)
        for tensor in model.state_dict().values():
            drawn = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(drawn * (tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 1.0))
    return model


def cache(config: Config, batch: int, capacity: int, device: Any) -> list[Tensor]:
    return [torch.zeros(batch, capacity + 1, 1, dtype=torch.bfloat16, device=device)]
