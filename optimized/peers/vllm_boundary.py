"""vLLM 0.33, `beam_norm_residual_norm`: post-norm, scaled residual add and next pre-norm (Triton).

It takes rows [N, D] and both scales; called here as vLLM's model does, without dependent launch.
"""

from typing import Any

from torch import Tensor

from optimized.peers.layouts import rows
from optimized.peers.peer import Bound, Peer

LIBRARY = "vllm.models.beam.nvidia.layernorm"


def bind(node: Any, y: Tensor, h: Tensor, post_weight: Tensor, pre_weight: Tensor) -> Bound:
    from vllm.models.beam.nvidia.layernorm import beam_norm_residual_norm

    flat_y, flat_h, scales = rows(y), rows(h), (node.y_scale, node.h_scale)

    def run() -> Any:
        return beam_norm_residual_norm(
            flat_y, flat_h, post_weight, node.eps, pre_weight, node.eps, scales
        )

    return Bound(run=run, finish=lambda found: tuple(x.view(y.shape) for x in found))


PEERS = (
    Peer(
        name="vLLM 0.33 beam_norm_residual_norm",
        region="residual_boundary",
        library=LIBRARY,
        bind=bind,
    ),
)
