"""A model that the product knows nothing about: a stack of norm, gated projection and mixing."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 64


class Squash(nn.Module):
    """A chain of element-wise operators: (x [N, D], scale [D]) -> [N, D]."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)  # norm line
        return (torch.tanh(wide) * scale.float()).to(x.dtype)


class Twins(nn.Module):
    """Two products of one input: (x [N, D]) -> two [N, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16))
        self.right = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, self.left), F.linear(x, self.right)


class Meld(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.sigmoid(a + b) * b


class Storey(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))
        self.squash, self.twins, self.meld = Squash(), Twins(), Meld()

    def forward(self, h: Tensor) -> Tensor:
        a, b = self.twins(self.squash(h, self.scale))
        return h + self.meld(a, b)


class Tower(nn.Module):
    def __init__(self, storeys: int = 2) -> None:
        super().__init__()
        self.storeys = nn.ModuleList(Storey() for _ in range(storeys))
        self.store = nn.Buffer(torch.zeros(8, WIDTH, dtype=torch.bfloat16))

    def forward(self, h: Tensor) -> Tensor:
        for storey in self.storeys:
            h = storey(h)
        self.store[2:3] = h[:1]
        return h


def tower(storeys: int = 2) -> tuple[Tower, tuple[Tensor, ...]]:
    """A tower in evaluation and its input [4, D]."""
    model = Tower(storeys).eval().requires_grad_(False)
    return model, (torch.randn(4, WIDTH, dtype=torch.bfloat16),)


def line_of(text: str) -> str:
    """file:line of the line of this file that contains `text`."""
    with open(__file__) as file:
        number = next(n for n, line in enumerate(file, start=1) if text in line)
    return f"tests/traces/toy_stack.py:{number}"
