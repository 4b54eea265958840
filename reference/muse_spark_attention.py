"""Muse Spark's attention: sliding layers with RoPE over a ring of keys, full layers without.

Shapes: B sequences, T tokens of each in a step, S keys, D hidden, H query heads, Hkv KV heads,
d head dimension, W window.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from reference.attend import Attend, PrefillAttend
from reference.cache import LayerCache
from reference.layers import Linear, ParallelProjection, rope_in_dtype, unit_norm
from reference.muse_spark_config import MuseSparkConfig
from reference.parallel import RankSum


class Step(NamedTuple):
    """What all layers of one forward call share; B, T as above."""

    positions: Tensor  # [B, T] int64, -1 where padded
    cos: Tensor  # [B, T, d / 2], in the model's dtype
    sin: Tensor  # [B, T, d / 2], in the model's dtype
    full_slots: Tensor  # [B, T] int64
    ring_slots: Tensor  # [B, T] int64
    full_mask: Tensor | None  # [B, T, extent] bool, None where causal says it all
    ring_mask: Tensor  # [B, T, W] bool for a decode, [B, T, W + T] for a prefill
    extent: int  # keys that full layers read


class QKUnitNorm(nn.Module):
    """Weightless per-head norm of q and k, q's factor, and the cache write (full layers).

    (q [B, T, H, d], k, v [B, T, Hkv, d], k_cache, v_cache [B, S + 1, Hkv, d],
    slots [B, T] int64) -> (q, k); writes k and v to the cache.
    """

    region = "qk_unit_norm"

    def __init__(self, eps: float, q_factor: float) -> None:
        super().__init__()
        self.eps, self.q_factor = eps, q_factor

    def forward(self, q, k, v, k_cache, v_cache, slots):
        q = unit_norm(q, self.eps) * self.q_factor
        k = unit_norm(k, self.eps)
        LayerCache(k_cache, v_cache, None).write(k, v, slots)
        return q, k


class QKUnitNormRope(nn.Module):
    """Weightless per-head norm of q and k, q's factor, RoPE, and the cache write (sliding layers).

    (q [B, T, H, d], k, v [B, T, Hkv, d], cos, sin [B, T, d / 2], k_cache, v_cache
    [B, S + 1, Hkv, d], slots [B, T] int64) -> (q, k); writes k and v to the cache. The rotation's
    products and sums are all rounded.
    """

    region = "qk_unit_norm_rope"

    def __init__(self, eps: float, q_factor: float) -> None:
        super().__init__()
        self.eps, self.q_factor = eps, q_factor

    def forward(self, q, k, v, cos, sin, k_cache, v_cache, slots):
        q = rope_in_dtype(unit_norm(q, self.eps) * self.q_factor, cos, sin)
        k = rope_in_dtype(unit_norm(k, self.eps), cos, sin)
        LayerCache(k_cache, v_cache, None).write(k, v, slots)
        return q, k


class OutputNormGate(nn.Module):
    """norm(a) * sigmoid(gate), weightless per head: (a, gate [B, T, H, d]) -> [B, T, H, d].

    Three roundings: the norm, the sigmoid, the product.
    """

    region = "output_norm_gate"

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, a: Tensor, gate: Tensor) -> Tensor:
        return unit_norm(a, self.eps) * torch.sigmoid(gate)


class Attention(nn.Module):
    def __init__(self, config: MuseSparkConfig, layer: int) -> None:
        super().__init__()
        c, width = config, config.query_heads * config.head_dim
        self.head_dim, self.is_full = c.head_dim, c.is_full(layer)
        self.q_proj = Linear(c.hidden, width, c.dtype)
        self.k_proj = Linear(c.hidden, c.kv_heads * c.head_dim, c.dtype)
        self.v_proj = Linear(c.hidden, c.kv_heads * c.head_dim, c.dtype)
        self.gate_proj = Linear(c.hidden, width, c.dtype)
        self.o_proj = Linear(width, c.hidden, c.dtype)
        self.project = ParallelProjection(("q_proj", "k_proj", "v_proj", "gate_proj"))
        self.prepare = (QKUnitNorm if self.is_full else QKUnitNormRope)(c.eps, c.q_factor)
        self.attend = Attend(c.head_dim**-0.5)
        library = c.prefill_attention == "sdpa"
        self.prefill_attend = PrefillAttend(self.attend.scale) if library else None
        self.gate = OutputNormGate(c.eps)
        self.rank_sum = RankSum()

    def forward(self, x: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """x [B, T, D] -> [B, T, D]; writes this step's keys and values to `cache`."""
        batch, steps, _ = x.shape
        projections = self.q_proj, self.k_proj, self.v_proj, self.gate_proj
        q, k, v, gate = (
            y.unflatten(-1, (-1, self.head_dim))
            for y in self.project(x, *(p.weight for p in projections))
        )
        past = cache.past(steps)
        if self.is_full:
            q, k = self.prepare(q, k, v, cache.k, cache.v, step.full_slots)
        else:
            rotation = step.cos, step.sin
            q, k = self.prepare(q, k, v, *rotation, cache.k, cache.v, step.ring_slots)
        k, v = cache.seen(past, k, v, step.extent)
        attend = self.attend if steps == 1 else self.prefill_attend or self.attend
        a = attend(q, k, v, step.full_mask if self.is_full else step.ring_mask)
        a = self.gate(a, gate)
        return self.rank_sum(self.o_proj(a.reshape(batch, steps, -1)))
