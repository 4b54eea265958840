"""FlashInfer 0.6.14: `rmsnorm` per head, `apply_rope_with_cos_sin_cache_inplace`, PyTorch's write.

It looks cosines and sines up by position, so what the region gets is its table, row i position i.
"""

from typing import Any

import torch
from torch import Tensor

from optimized.peers.layouts import flat_slots
from optimized.peers.peer import Bound, Peer


def bind(
    node: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> Bound:
    from flashinfer.norm import rmsnorm
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    heads_q, heads_k, heads_v = (x.flatten(0, 1).contiguous() for x in (q, k, v))
    table = torch.cat((cos, sin), dim=-1).flatten(0, 1).contiguous()
    positions = torch.arange(len(table), device=table.device)
    places = flat_slots(slots, k_cache.shape[1])
    k_flat, v_flat = k_cache.flatten(0, 1), v_cache.flatten(0, 1)

    def run() -> Any:
        q_out = rmsnorm(heads_q, q_weight, node.eps)
        k_out = rmsnorm(heads_k, k_weight, node.eps)
        apply_rope_with_cos_sin_cache_inplace(
            positions, q_out.flatten(1), k_out.flatten(1), q.shape[-1], table
        )
        k_flat[places] = k_out
        v_flat[places] = heads_v
        return q_out, k_out

    return Bound(run=run, finish=lambda found: (found[0].view(q.shape), found[1].view(k.shape)))


def guard(node: Any, *args: Tensor) -> str | None:
    """Why it cannot take the call, or None: nothing to do, or caches it cannot write in place."""
    if not args[0].numel():
        return "no rows"
    if not (args[7].is_contiguous() and args[8].is_contiguous()):
        return "the caches are not contiguous"
    return None


PEERS = (
    Peer(
        name="FlashInfer rmsnorm + rope, PyTorch's cache write",
        region="qk_norm_rope",
        library="flashinfer.rope",
        bind=bind,
        guard=guard,
    ),
)
