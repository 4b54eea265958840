"""A model file whose model can be built, and not called."""

import torch
from torch import Tensor, nn


class Uncallable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)

    def forward(self, ids: Tensor, positions: Tensor, cache: object) -> Tensor:
        return self.embed(ids) @ torch.zeros(5, 5)


configs = {"only": None}


def build(config: None, device: torch.device, seed: int) -> nn.Module:
    with torch.device(device):
        return Uncallable()


def cache(config: None, batch: int, capacity: int, device: torch.device) -> tuple[()]:
    return ()
