"""vLLM 0.33, `beam_output_gate`: the sigmoid gate on attention's output (Triton before sm_100)."""

from typing import Any

from torch import Tensor

from optimized.peers.layouts import tokens
from optimized.peers.peer import Bound, Peer

LIBRARY = "vllm.models.beam.nvidia.attention_ops"


def bind(node: Any, a: Tensor, gate: Tensor, bias: Tensor) -> Bound:
    from vllm.models.beam.nvidia.attention_ops import beam_output_gate

    flat_a, flat_gate = tokens(a), tokens(gate)
    heads, dim = a.shape[-2:]

    def run() -> Any:
        return beam_output_gate(flat_a, flat_gate, bias, num_heads=heads, head_dim=dim)

    return Bound(run=run, finish=lambda found: found.view(a.shape))


PEERS = (Peer(name="vLLM 0.33 beam_output_gate", region="output_gate", library=LIBRARY, bind=bind),)
