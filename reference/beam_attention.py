"""Beam's attention: sliding layers with RoPE over a ring of keys, full layers with SSMax instead.

Shapes: B sequences, T tokens of each in a step, S keys, D hidden, H query heads, Hkv KV heads,
d head dimension, W window.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from reference.attend import Attend, PrefillAttend
from reference.beam_config import BeamConfig
from reference.cache import LayerCache
from reference.layers import Linear, ParallelProjection, RMSNorm, rms_norm, rope
from reference.parallel import RankSum


class Step(NamedTuple):
    """What all layers of one forward call share; B, T as above, P = d / 2."""

    positions: Tensor  # [B, T] int64, -1 where padded
    cos: Tensor  # [B, T, P] fp32
    sin: Tensor  # [B, T, P] fp32
    q_scale: Tensor  # [B, T] fp32, SSMax's factor
    full_slots: Tensor  # [B, T] int64
    ring_slots: Tensor  # [B, T] int64
    full_mask: Tensor | None  # [B, T, extent] bool, None where causal says it all
    ring_mask: Tensor  # [B, T, W] bool for a decode, [B, T, W + T] for a prefill
    extent: int  # keys that full layers read


class QKNormRope(nn.Module):
    """Per-head RMSNorm of q and k, RoPE, and the cache write (sliding layers).

    (q [B, T, H, d], k, v [B, T, Hkv, d], q_weight [d], k_weight [d], cos, sin [B, T, d / 2],
    k_cache, v_cache [B, S + 1, Hkv, d], slots [B, T] int64) -> (q, k); writes k and v to the cache.
    """

    region = "qk_norm_rope"

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, q, k, v, q_weight, k_weight, cos, sin, k_cache, v_cache, slots):
        q = rope(rms_norm(q, q_weight, self.eps), cos, sin)
        k = rope(rms_norm(k, k_weight, self.eps), cos, sin)
        LayerCache(k_cache, v_cache, None).write(k, v, slots)
        return q, k


class QKNormScale(nn.Module):
    """Per-head RMSNorm of q and k, SSMax's query factor, and the cache write (full layers).

    (q [B, T, H, d], k, v [B, T, Hkv, d], q_weight [d], k_weight [d], q_scale [B, T] fp32,
    k_cache, v_cache [B, S + 1, Hkv, d], slots [B, T] int64) -> (q, k); writes k and v to the cache.
    """

    region = "qk_norm_scale"

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, q, k, v, q_weight, k_weight, q_scale, k_cache, v_cache, slots):
        q = rms_norm(q, q_weight, self.eps)
        q = (q.float() * q_scale[:, :, None, None]).to(q.dtype)
        k = rms_norm(k, k_weight, self.eps)
        LayerCache(k_cache, v_cache, None).write(k, v, slots)
        return q, k


class OutputGate(nn.Module):
    """a * sigmoid(gate + bias): (a [B, T, H, d], gate [B, T, H, d], bias [H]) -> [B, T, H, d].

    Three roundings: the biased gate, its sigmoid, the product.
    """

    region = "output_gate"

    def forward(self, a: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
        return a * torch.sigmoid(gate + bias[:, None])


class Attention(nn.Module):
    def __init__(self, config: BeamConfig, layer: int) -> None:
        super().__init__()
        c, width = config, config.query_heads * config.head_dim
        self.heads, self.kv_heads, self.head_dim = c.query_heads, c.kv_heads, c.head_dim
        self.is_full = c.is_full(layer)
        self.q_proj = Linear(c.hidden, width, c.dtype)
        self.k_proj = Linear(c.hidden, c.kv_heads * c.head_dim, c.dtype)
        self.v_proj = Linear(c.hidden, c.kv_heads * c.head_dim, c.dtype)
        self.gate_proj = Linear(c.hidden, width, c.dtype)
        self.o_proj = Linear(width, c.hidden, c.dtype)
        self.q_norm = RMSNorm(c.head_dim, c.eps, c.dtype)
        self.k_norm = RMSNorm(c.head_dim, c.eps, c.dtype)
        self.gate_bias = nn.Parameter(torch.empty(c.query_heads, dtype=c.dtype))
        self.project = ParallelProjection(("q_proj", "k_proj", "v_proj", "gate_proj"))
        self.prepare = QKNormScale(c.eps) if self.is_full else QKNormRope(c.eps)
        self.attend = Attend(c.head_dim**-0.5)
        library = c.prefill_attention == "sdpa"
        self.prefill_attend = PrefillAttend(self.attend.scale) if library else None
        self.gate = OutputGate()
        self.rank_sum = RankSum()

    def forward(self, x: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """x [B, T, D] -> [B, T, D]; writes this step's keys and values to `cache`."""
        batch, steps, _ = x.shape
        projections = self.q_proj, self.k_proj, self.v_proj, self.gate_proj
        q, k, v, gate = (
            y.unflatten(-1, (-1, self.head_dim))
            for y in self.project(x, *(p.weight for p in projections))
        )
        norms = self.q_norm.weight, self.k_norm.weight
        attend = self.attend if steps == 1 else self.prefill_attend or self.attend
        if self.is_full:
            slots = cache.k, cache.v, step.full_slots
            q, _ = self.prepare(q, k, v, *norms, step.q_scale, *slots)
            k, v = cache.k[:, : step.extent], cache.v[:, : step.extent]
            a = attend(q, k, v, step.full_mask)
        else:
            slots = cache.k, cache.v, step.ring_slots
            past_k, past_v = cache.k[:, :-1], cache.v[:, :-1]
            if steps == 1:
                q, _ = self.prepare(q, k, v, *norms, step.cos, step.sin, *slots)
                k, v = past_k, past_v
            else:  # the step overwrites keys that its own first queries still see
                past_k, past_v = past_k.clone(), past_v.clone()
                q, k = self.prepare(q, k, v, *norms, step.cos, step.sin, *slots)
                k, v = torch.cat((past_k, k), dim=1), torch.cat((past_v, v), dim=1)
            a = attend(q, k, v, step.ring_mask)
        a = self.gate(a, gate, self.gate_bias)
        return self.rank_sum(self.o_proj(a.reshape(batch, steps, -1)))
