"""FlashInfer 0.6.14: `rmsnorm`, the two scales in PyTorch, then `fused_add_rmsnorm` in place."""

from typing import Any

from torch import Tensor

from optimized.peers.layouts import no_rows, rows
from optimized.peers.peer import Bound, Peer


def bind(node: Any, y: Tensor, h: Tensor, post_weight: Tensor, pre_weight: Tensor) -> Bound:
    from flashinfer.norm import fused_add_rmsnorm, rmsnorm

    flat_y, flat_h = rows(y), rows(h)

    def run() -> Any:
        x = rmsnorm(flat_y, post_weight, node.eps).mul_(node.y_scale)
        residual = flat_h * node.h_scale
        fused_add_rmsnorm(x, residual, pre_weight, node.eps)
        return residual, x

    return Bound(run=run, finish=lambda found: tuple(x.view(y.shape) for x in found))


PEERS = (
    Peer(
        name="FlashInfer rmsnorm + fused_add_rmsnorm",
        region="residual_boundary",
        library="flashinfer.norm",
        bind=bind,
        guard=no_rows,
    ),
)
