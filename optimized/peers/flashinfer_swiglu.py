"""FlashInfer 0.6.14, `silu_and_mul`: SwiGLU over the two halves of one projection's output."""

from typing import Any

from torch import Tensor

from optimized.peers.layouts import no_rows, side_by_side
from optimized.peers.peer import Bound, Peer


def bind(node: Any, gate: Tensor, up: Tensor) -> Bound:
    from flashinfer.activation import silu_and_mul

    both = side_by_side(gate, up)
    return Bound(run=lambda: silu_and_mul(both), finish=lambda found: found.view(gate.shape))


PEERS = (
    Peer(
        name="FlashInfer silu_and_mul",
        region="swiglu",
        library="flashinfer.activation",
        bind=bind,
        guard=no_rows,
    ),
)
