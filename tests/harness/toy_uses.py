"""A model file with one region whose norm two modules read: an FP32 gate, and a BF16 product."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    width: int = 64
    vocabulary: int = 128


configs = {"uses": Config()}


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).to(x.dtype)


class Gate(nn.Module):
    """(rows [N, D], weight [D, D]) -> sigmoid of their product, FP32."""

    def forward(self, rows: Tensor, weight: Tensor) -> Tensor:
        return torch.sigmoid(rows.float() @ weight.float())


class Scale(nn.Module):
    def forward(self, rows: Tensor, scale: Tensor) -> Tensor:
        return rows * scale


class Fork(nn.Module):
    """(x [B, T, D], weight [D, D], scale [D]) -> [B, T, D]."""

    region = "fork"

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.scale = Norm(), Gate(), Scale()

    def forward(self, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)  # a view of what was rounded
        out = self.gate(rows, weight) * self.scale(rows, scale).float()
        return out.to(x.dtype).view_as(x)


class Model(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(c.vocabulary, c.width, dtype=torch.bfloat16)
        self.mix = nn.Linear(c.width, c.width, bias=False, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.empty(c.width, dtype=torch.bfloat16))
        self.fork = Fork()

    def forward(self, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        return self.mix(self.fork(self.embed(ids), self.mix.weight, self.scale)).float()


def build(config: Config, device: Any, seed: int) -> Model:
    model = Model(config).to(device).eval().requires_grad_(False)
    if torch.device(device).type != "meta":
        generator = torch.Generator().manual_seed(seed)
        for tensor in model.state_dict().values():
            drawn = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(drawn * (tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 1.0))
    return model


def cache(config: Config, batch: int, capacity: int, device: Any) -> list[Tensor]:
    return [torch.zeros(batch, capacity, device=device)]
