"""vLLM 0.33, `beam_qk_norm_rope`: Q/K norm, RoPE or SSMax, and the cache write (Triton).

One cache holds each key beside its value, in pages: here a page is one sequence. It looks cosines
and sines up by position, so what the region gets is its table and row i is position i. SSMax's
factor it computes from the position itself; that is what the region's factor is turned back into.
"""

from typing import Any

import torch
from torch import Tensor

from optimized.peers.layouts import flat_slots, joined_cache, split_cache, tokens
from optimized.peers.peer import Bound, Peer

LIBRARY = "vllm.models.beam.nvidia.attention_ops"
SSMAX_LENGTH, SSMAX_POWER = 2048.0, 0.1  # fixed in its kernel


def bind_rope(
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
    table = torch.cat((cos, sin), dim=-1).flatten(0, 1).contiguous()
    positions = torch.arange(len(table), device=table.device)
    turn = {"cos_sin_cache": table, "rotary_dim": q.shape[-1]}
    return _bound(node, q, k, v, (q_weight, k_weight), positions, turn, (k_cache, v_cache), slots)


def bind_scale(
    node: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    q_scale: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> Bound:
    turn = {"cos_sin_cache": None, "ssmax": True}
    positions = positions_of(q_scale).flatten()
    return _bound(node, q, k, v, (q_weight, k_weight), positions, turn, (k_cache, v_cache), slots)


def _bound(
    node: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: tuple[Tensor, Tensor],
    positions: Tensor,
    turn: dict[str, Any],
    caches: tuple[Tensor, Tensor],
    slots: Tensor,
) -> Bound:
    from vllm.models.beam.nvidia.attention_ops import beam_qk_norm_rope

    flat_q, flat_k, flat_v = tokens(q), tokens(k), tokens(v)
    joined, places = joined_cache(*caches), flat_slots(slots, caches[0].shape[1])

    def run() -> Any:
        return beam_qk_norm_rope(
            flat_q,
            flat_k,
            *weights,
            node.eps,
            positions,
            head_dim=q.shape[-1],
            value=flat_v,
            kv_cache=joined,
            slot_mapping=places,
            **turn,
        )

    def finish(found: Any) -> Any:
        split_cache(joined, *caches)
        return found[0].view(q.shape), found[1].view(k.shape)

    return Bound(run=run, finish=finish)


def positions_of(q_scale: Tensor) -> Tensor:
    """The positions whose SSMax factors (1 + (p + 1) / 2048) ^ 0.1 are `q_scale`, as int64."""
    wide = q_scale.double() ** (1 / SSMAX_POWER)
    return (SSMAX_LENGTH * (wide - 1) - 1).round().long()


def guard_scale(node: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> str | None:
    """Why the factors are none of a position's, or None; reads them, so not while capturing."""
    q_scale = rest[2]
    again = (1 + (positions_of(q_scale) + 1).double() / SSMAX_LENGTH) ** SSMAX_POWER
    beside = torch.finfo(torch.float32).eps * again
    if bool(((again - q_scale.double()).abs() > beside).any()):
        return "takes positions, and these factors are none of a position's"
    return None


PEERS = (
    Peer(
        name="vLLM 0.33 beam_qk_norm_rope",
        region="qk_norm_rope",
        library=LIBRARY,
        bind=bind_rope,
    ),
    Peer(
        name="vLLM 0.33 beam_qk_norm_rope, ssmax",
        region="qk_norm_scale",
        library=LIBRARY,
        bind=bind_scale,
        guard=guard_scale,
    ),
)
