"""FlashInfer 0.6.14, `BatchDecodeWithPagedKVCacheWrapper`: attention of one new token a sequence.

Planning and the copy into pages of 16 positions are an engine's, and not timed.
"""

from typing import Any

import torch
from torch import Tensor

from optimized.peers.peer import Bound, Peer

PAGE = 16
WORKSPACE = 128 << 20  # bytes, as its documentation has it
# Query heads a KV head, from which it is to use tensor cores; its other kernel refuses six.
TENSOR_CORES_FROM = 4


def bind(node: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Bound:
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

    batch, length, kv_heads, dim = k.shape
    pages = -(-length // PAGE)
    device, heads = q.device, q.shape[2]
    paged = tuple(_paged(x, pages) for x in (k, v))
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * pages
    order = torch.arange(batch * pages, dtype=torch.int32, device=device)
    last = torch.full((batch,), length - (pages - 1) * PAGE, dtype=torch.int32, device=device)
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    on_tensor_cores = heads // kv_heads >= TENSOR_CORES_FROM
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=on_tensor_cores)
    wrapper.plan(
        starts,
        order,
        last,
        heads,
        kv_heads,
        dim,
        PAGE,
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
        sm_scale=node.scale,
    )
    flat_q = q[:, 0].contiguous()
    return Bound(run=lambda: wrapper.run(flat_q, paged), finish=lambda found: found[:, None])


def _paged(x: Tensor, pages: int) -> Tensor:
    """[B, S, Hkv, d] -> [B pages, 16, Hkv, d], the last page of each sequence filled up."""
    room = x.new_zeros((x.shape[0], pages * PAGE, *x.shape[2:]))
    room[:, : x.shape[1]] = x
    return room.view(-1, PAGE, *x.shape[2:])


def guard(node: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str | None:
    """Why the call is no decode over whole caches, or None; reads the mask."""
    if q.shape[1] != 1 or 0 in k.shape or 0 in q.shape:
        return f"{q.shape[1]} queries over {k.shape[1]} keys; takes one a sequence"
    if mask is not None and not bool(mask.all()):
        return "the mask hides keys; takes all keys of a sequence"
    return None


PEERS = (
    Peer(
        name="FlashInfer batch decode",
        region="attend",
        library="flashinfer.decode",
        bind=bind,
        guard=guard,
    ),
)
