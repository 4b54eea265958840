"""PyTorch's `linear` on one packed weight: cuBLAS on a GPU, its CPU library elsewhere."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.peers.peer import Bound, Peer


def bind(node: Any, x: Tensor, *weights: Tensor) -> Bound:
    weight, sizes = torch.cat(weights), [len(w) for w in weights]
    return Bound(run=lambda: F.linear(x, weight), finish=lambda y: y.split(sizes, dim=-1))


PEERS = (
    Peer(
        name="torch linear, packed",
        region="parallel_projection",
        library="torch",
        bind=bind,
        devices=("cpu", "cuda"),
    ),
)
