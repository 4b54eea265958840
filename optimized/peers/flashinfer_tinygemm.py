"""FlashInfer 0.6.14, `tinygemm_bf16`: the product of a few rows, with its siblings' weights packed.

Made for 1 to 8 rows; it takes more, in tiles of 8.
"""

from typing import Any

import torch
from torch import Tensor

from optimized.gemv_engines import hangs
from optimized.peers.layouts import rows
from optimized.peers.peer import Bound, Peer

LIBRARY = "flashinfer.gemm"
MOST_ROWS = 128  # far beyond what it is made for


def bind(node: Any, x: Tensor) -> Bound:
    run, shape = _product(x, node.weight), x.shape[:-1]
    return Bound(run=run, finish=lambda found: found.view(*shape, -1))


def bind_packed(node: Any, x: Tensor, *weights: Tensor) -> Bound:
    run, sizes = _product(x, torch.cat(weights)), [len(w) for w in weights]
    shape = x.shape[:-1]
    return Bound(run=run, finish=lambda found: found.view(*shape, -1).split(sizes, dim=-1))


def _product(x: Tensor, weight: Tensor) -> Any:
    from flashinfer.gemm import tinygemm_bf16

    flat, plain = rows(x), weight.detach().contiguous()

    def run() -> Tensor:
        out = flat.new_empty((len(flat), len(plain)))
        tinygemm_bf16(flat, plain, out)
        return out

    return run


def guard(node: Any, x: Tensor, *weights: Tensor) -> str | None:
    """Why it cannot take the call, or None: shapes, and more rows than it is made for."""
    count = x.numel() // max(1, x.shape[-1])
    if not 0 < count <= MOST_ROWS:
        return f"{count} rows; it is made for 1 to 8"
    outputs = sum(len(w) for w in weights) or len(node.weight)
    if x.shape[-1] % 64 or outputs % 16:
        return f"{outputs} x {x.shape[-1]}; it takes multiples of 16 x 64"
    return None


PEERS = (
    Peer(
        name="FlashInfer tinygemm_bf16",
        region="linear",
        library=LIBRARY,
        bind=bind,
        guard=guard,
        broken=hangs,
    ),
    Peer(
        name="FlashInfer tinygemm_bf16, packed",
        region="parallel_projection",
        library=LIBRARY,
        bind=bind_packed,
        guard=guard,
        broken=hangs,
    ),
)
