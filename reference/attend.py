"""Attention that models share: grouped queries over cached keys and values.

Shapes: B sequences, T queries of each in a step, S keys, H query heads, Hkv KV heads, d head
dimension.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

SCORES_PER_BLOCK = 1 << 28  # FP32 attention scores held at once: 1 GiB


class Attend(nn.Module):
    """Grouped-query attention over the keys that `mask` allows.

    (q [B, T, H, d], k, v [B, S, Hkv, d], mask [B, T, S] bool) -> [B, T, H, d]; scores and
    probabilities stay FP32, one rounding at the end. Without a mask, the queries are the last T of
    S positions and see what is not after them.
    """

    region = "attend"

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        batch, steps, heads, dim = q.shape
        kv_heads = k.shape[2]
        if mask is None:
            every = torch.arange(k.shape[1], device=k.device)
            mask = (every <= every[-steps:, None])[None]
        keys = k.float().permute(0, 2, 3, 1)  # [B, Hkv, d, S]
        values = v.float().transpose(1, 2)  # [B, Hkv, S, d]
        block = max(1, SCORES_PER_BLOCK // (batch * heads * k.shape[1]))
        outputs = []
        for first in range(0, steps, block):
            rows = q[:, first : first + block].float()
            count = rows.shape[1]
            rows = rows.reshape(batch, count, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)
            scores = rows.reshape(batch, kv_heads, -1, dim) @ keys * self.scale
            scores = scores.view(batch, kv_heads, -1, count, k.shape[1])
            hidden = ~mask[:, None, None, first : first + block]
            scores = scores.masked_fill(hidden, torch.finfo(torch.float32).min)
            weights = torch.softmax(scores, dim=-1).view(batch, kv_heads, -1, k.shape[1])
            mixed = (weights @ values).view(batch, kv_heads, -1, count, dim)
            outputs.append(mixed.permute(0, 3, 1, 2, 4).reshape(batch, count, heads, dim))
        return torch.cat(outputs, dim=1).to(q.dtype)


class PrefillAttend(nn.Module):
    """The same function by PyTorch's kernel, for long prefills, where mask None means causal.

    It adds a rounding that `Attend` lacks: probabilities to BF16, before their product with v. A
    query that sees nothing gets zeros: PyTorch's kernels differ there.
    """

    region = "prefill_attend"

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        allowed = causal_lower_right(q.shape[1], k.shape[1]) if mask is None else mask[:, None]
        share = q.shape[2] // k.shape[2]
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        k, v = (y.repeat_interleave(share, dim=1) for y in (k, v))
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=self.scale)
        if mask is not None:
            a = a.masked_fill(~mask.any(dim=-1)[:, None, :, None], 0.0)
        return a.transpose(1, 2)
