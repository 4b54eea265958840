"""quack 0.6.5, `rmsnorm` twice: alone, then with the residual added; the scales in PyTorch."""

from typing import Any

from torch import Tensor

from optimized.peers.layouts import no_rows, rows
from optimized.peers.peer import Bound, Peer


def bind(node: Any, y: Tensor, h: Tensor, post_weight: Tensor, pre_weight: Tensor) -> Bound:
    from quack import rmsnorm

    flat_y, flat_h = rows(y), rows(h)

    def run() -> Any:
        x = rmsnorm(flat_y, post_weight, eps=node.eps).mul_(node.y_scale)
        residual = flat_h * node.h_scale
        return rmsnorm(x, pre_weight, residual=residual, eps=node.eps, prenorm=True)

    def finish(found: Any) -> Any:
        return found[1].view(y.shape), found[0].view(y.shape)

    return Bound(run=run, finish=finish)


PEERS = (
    Peer(
        name="quack rmsnorm, twice",
        region="residual_boundary",
        library="quack",
        bind=bind,
        guard=no_rows,
    ),
)
