"""vLLM 0.33, `beam_silu_mul`: SwiGLU over the two halves of one projection's output (Triton)."""

from typing import Any

from torch import Tensor

from optimized.peers.layouts import side_by_side
from optimized.peers.peer import Bound, Peer

LIBRARY = "vllm.models.beam.nvidia.activation"


def bind(node: Any, gate: Tensor, up: Tensor) -> Bound:
    from vllm.models.beam.nvidia.activation import beam_silu_mul

    both = side_by_side(gate, up)
    return Bound(run=lambda: beam_silu_mul(both), finish=lambda found: found.view(gate.shape))


PEERS = (Peer(name="vLLM 0.33 beam_silu_mul", region="swiglu", library=LIBRARY, bind=bind),)
