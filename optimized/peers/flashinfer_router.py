"""FlashInfer 0.6.14, `fused_topk_deepseek`, after an FP32 product by cuBLAS."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.peers.peer import Bound, Peer

MOST = 8  # experts a token, of 128 in the open groups: limits of its kernel
MOST_OPEN = 128


def bind(node: Any, x: Tensor) -> Bound:
    from flashinfer.fused_moe import fused_topk_deepseek

    bias, shape = node.e_score_correction_bias, (x.shape[0], node.top_k)
    weights = torch.empty(shape, dtype=torch.float32, device=x.device)
    experts = torch.empty(shape, dtype=torch.int32, device=x.device)

    def run() -> Any:
        logits = F.linear(x.float(), node.weight)
        groups = node.groups, node.top_groups, node.top_k
        fused_topk_deepseek(logits, bias, *groups, 1.0, weights, experts)
        return weights, experts

    return Bound(run=run, finish=lambda found: (found[0], found[1].long()))


def guard(node: Any, x: Tensor) -> str | None:
    """Why its kernel cannot take the call, or None."""
    members = node.weight.shape[0] // node.groups
    if not len(x):
        return "no tokens"
    if node.top_k > MOST or members > 32 or members * node.top_groups > MOST_OPEN:
        return f"top {node.top_k} of {node.top_groups} groups of {members} is beyond its limits"
    return None


PEERS = (
    Peer(
        name="cuBLAS FP32 + FlashInfer fused_topk_deepseek",
        region="router",
        library="flashinfer.fused_moe",
        bind=bind,
        guard=guard,
    ),
)
