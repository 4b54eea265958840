"""Reflection Beam 1.0 (501B-A23B), plain PyTorch: what is right.

Shapes: B sequences, T tokens of each in a step, N = B * T, D hidden, V vocabulary; the parts are in
`beam_config` (shape and presets), `attend`, `beam_attention`, `beam_moe` and `layers`, whose names
this file exports too.

Every tensor that these files make in `config.dtype` (BF16) is a rounding point; everything else is
FP32. Modules named with a `region` are the units that a fused kernel may replace: each is one call,
a function of its arguments alone. Parameter names are those of the published checkpoint.
"""

import math
from typing import cast

import torch
from torch import Tensor, nn

from reference.beam_attention import (
    Attend,
    Attention,
    OutputGate,
    PrefillAttend,
    QKNormRope,
    QKNormScale,
    Step,
)
from reference.beam_config import (
    PRESETS,
    BeamConfig,
    active_parameter_count,
    kv_bytes_per_token,
    parameter_count,
)
from reference.beam_moe import Combine, Experts, MoE, Router
from reference.cache import KVCache, LayerCache, step_keys
from reference.draw import random_model
from reference.layers import Linear, ParallelProjection, RMSNorm, SwiGLU, rms_norm, rope
from reference.parallel import RankSum

__all__ = [
    "Attend",
    "Attention",
    "Beam",
    "BeamConfig",
    "Combine",
    "DenseMLP",
    "Experts",
    "Layer",
    "Linear",
    "LogitCap",
    "MoE",
    "OutputGate",
    "ParallelProjection",
    "PrefillAttend",
    "QKNormRope",
    "QKNormScale",
    "RMSNorm",
    "RankSum",
    "ResidualBoundary",
    "Router",
    "Step",
    "SwiGLU",
    "active_parameter_count",
    "build",
    "cache",
    "configs",
    "kv_bytes_per_token",
    "parameter_count",
    "rms_norm",
    "rope",
]

configs = PRESETS


class ResidualBoundary(nn.Module):
    """Post-norm, depth-scaled residual add number n, next pre-norm.

    (y [B, T, D], h [B, T, D], post_weight [D], pre_weight [D]) -> (h [B, T, D], x [B, T, D])
    """

    region = "residual_boundary"

    def __init__(self, n: int, eps: float) -> None:
        super().__init__()
        self.n, self.eps = n, eps
        self.y_scale = 1.0 / math.sqrt(n)
        self.h_scale = math.sqrt((n - 1) / n)

    def forward(self, y: Tensor, h: Tensor, post_weight: Tensor, pre_weight: Tensor):
        y = rms_norm(y, post_weight, self.eps)
        h = y * self.y_scale + h * self.h_scale
        return h, rms_norm(h, pre_weight, self.eps)


class DenseMLP(nn.Module):
    def __init__(self, config: BeamConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden, config.dense_ff, config.dtype)
        self.up_proj = Linear(config.hidden, config.dense_ff, config.dtype)
        self.down_proj = Linear(config.dense_ff, config.hidden, config.dtype)
        self.project = ParallelProjection(("gate_proj", "up_proj"))
        self.activate = SwiGLU()
        self.rank_sum = RankSum()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.project(x, self.gate_proj.weight, self.up_proj.weight)
        return self.rank_sum(self.down_proj(self.activate(gate, up)))


class Layer(nn.Module):
    def __init__(self, config: BeamConfig, layer: int) -> None:
        super().__init__()
        c = config
        self.self_attn = Attention(c, layer)
        self.mlp = DenseMLP(c) if c.is_dense(layer) else MoE(c)
        self.input_layernorm = RMSNorm(c.hidden, c.eps, c.dtype)
        self.post_attention_layernorm = RMSNorm(c.hidden, c.eps, c.dtype)
        self.pre_feedforward_layernorm = RMSNorm(c.hidden, c.eps, c.dtype)
        self.post_feedforward_layernorm = RMSNorm(c.hidden, c.eps, c.dtype)
        self.attn_boundary = ResidualBoundary(2 * (layer + 1), c.eps)
        self.mlp_boundary = ResidualBoundary(2 * (layer + 1) + 1, c.eps)
        mlp = "dense" if c.is_dense(layer) else "moe"
        self.kind = f"{mlp}_full" if c.is_full(layer) else f"{mlp}_sliding"

    def forward(
        self, h: Tensor, x: Tensor, step: Step, cache: LayerCache, next_norm: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(residual h, normed input x) -> those of the next layer, normed by next_norm [D]."""
        y = self.self_attn(x, step, cache)
        norms = self.post_attention_layernorm.weight, self.pre_feedforward_layernorm.weight
        h, x = self.attn_boundary(y, h, *norms)
        y = self.mlp(x)
        return self.mlp_boundary(y, h, self.post_feedforward_layernorm.weight, next_norm)


class StepTables(nn.Module):
    """What all layers of one step share, from its positions alone.

    (positions [B, T] int64, capacity, extent, causal) -> (cos, sin [B, T, d / 2], q_scale [B, T],
    full_slots, ring_slots [B, T], full_mask [B, T, extent] or None if `causal` says it all,
    ring_mask [B, T, W] in a decode, [B, T, W + T] in a prefill); see `Step`.
    """

    def __init__(self, config: BeamConfig) -> None:
        super().__init__()
        self.head_dim, self.rope_theta = config.head_dim, config.rope_theta
        self.ssmax_length, self.window = config.ssmax_length, config.window

    def forward(
        self, positions: Tensor, capacity: int, extent: int, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        p = positions.float()
        exponents = torch.arange(0, self.head_dim, 2, device=p.device).float() / self.head_dim
        angles = p[..., None] * (1.0 / self.rope_theta**exponents)
        return (
            angles.cos(),
            angles.sin(),
            torch.exp(0.1 * torch.log1p((p + 1) / self.ssmax_length)),
            *step_keys(positions, capacity, extent, self.window, causal),
        )


class Decoder(nn.Module):
    def __init__(self, config: BeamConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden, dtype=config.dtype)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps, config.dtype)


class LogitCap(nn.Module):
    """cap * tanh(logits / cap): [B, T, V] -> [B, T, V] fp32."""

    region = "logit_cap"

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, logits: Tensor) -> Tensor:
        return self.cap * torch.tanh(logits.float() / self.cap)


class Beam(nn.Module):
    """forward(ids [B, T], positions [B, T], cache) -> logits [B, 1, V] fp32 of each last token.

    A step is a prefill (T > 1, any part of the prompt, rows padded with position -1 at the end) or
    a decode (T = 1). With `logits="all"` the result is [B, T, V].
    """

    def __init__(self, config: BeamConfig) -> None:
        super().__init__()
        self.config = config
        self.tables = StepTables(config)
        self.model = Decoder(config)
        self.lm_head = Linear(config.hidden, config.vocabulary, config.dtype)
        self.cap = LogitCap(config.soft_cap)

    def forward(
        self, ids: Tensor, positions: Tensor, cache: KVCache, logits: str = "last"
    ) -> Tensor:
        step = self.step(positions, cache)
        layers = cast(list[Layer], list(self.model.layers))
        h = self.model.embed_tokens(ids)
        x = layers[0].input_layernorm(h)
        for i, layer in enumerate(layers):
            following = layers[i + 1].input_layernorm if i + 1 < len(layers) else self.model.norm
            h, x = layer(h, x, step, cache.layers[i], following.weight)
        if logits == "last" and x.shape[1] > 1:
            last = positions.argmax(dim=1)
            x = x[torch.arange(x.shape[0], device=x.device), last][:, None]
        return self.cap(self.lm_head(x))

    def step(self, positions: Tensor, cache: KVCache) -> Step:
        causal = cache.ends_aligned and positions.shape[1] > 1
        shared = self.tables(positions, cache.capacity, cache.extent, causal)
        return Step(positions, *shared, extent=cache.extent)


def build(config: BeamConfig, device: str | torch.device, seed: int) -> Beam:
    """A Beam with random weights drawn on `device` from `seed`; `device="meta"` draws nothing."""
    return random_model(lambda: Beam(config), device, seed, draw)


def draw(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Fill one weight so that activations keep about their size through every layer."""
    if "norm" in name:
        tensor.uniform_(0.5, 1.5, generator=generator)
    elif name.endswith("bias"):
        tensor.normal_(std=0.1 if "correction" in name else 1.0, generator=generator)
    elif "embed" in name:
        tensor.normal_(generator=generator)
    else:
        tensor.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)


def cache(config: BeamConfig, batch: int, capacity: int, device: str | torch.device) -> KVCache:
    """An empty cache for `batch` sequences of up to `capacity` positions."""
    windows = [None if config.is_full(i) else config.window for i in range(config.layers)]
    row = config.kv_heads, config.head_dim
    return KVCache.empty(windows, batch, capacity, row, config.dtype, device)
