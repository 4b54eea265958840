"""Meta Muse Spark Open (816B-A42B), plain PyTorch: what is right.

Shapes: B sequences, T tokens of each in a step, D hidden, V vocabulary; the parts are in
`muse_spark_config` (shape and presets), `muse_spark_attention`, `muse_spark_moe`, `experts` and
`layers`.

Every tensor that these files make in `config.dtype` (BF16) is a rounding point; everything else is
FP32. Modules named with a `region` are the units that a fused kernel may replace: each is one call,
a function of its arguments alone. Parameter names are those of the published checkpoint.
"""

from typing import cast

import torch
from torch import Tensor, nn

from reference.cache import KVCache, LayerCache, step_keys
from reference.layers import (
    CentredNorm,
    Linear,
    RMSNorm,
    centred_norm,
    input_scaled_norm,
    rms_norm,
    unit_norm,
)
from reference.muse_spark_attention import Attention, Step
from reference.muse_spark_config import PRESETS, MuseSparkConfig
from reference.muse_spark_moe import LatentMoE
from reference.numerics import set_numerics

configs = PRESETS


class GatedResidualBoundary(nn.Module):
    """Post-norm, gated residual add, next pre-norm.

    (y [B, T, D], h [B, T, D], gate [D] fp32, post_weight [D] or None, pre_weight [D])
    -> (h [B, T, D], x [B, T, D])

    The post-norm is weightless, or input-scaled where it has a weight. The pre-norm is centred,
    or plain before the head. With w = gate / temperature and beta = sigmoid(w) the sum is
    sqrt(max(sigmoid(-w) * (1 + beta), floor)) * h + beta * y: FP32, rounded once.
    """

    region = "gated_residual_boundary"

    def __init__(self, config: MuseSparkConfig, *, scaled: bool, centred: bool) -> None:
        super().__init__()
        self.scaled, self.centred = scaled, centred  # the post-norm, the pre-norm
        self.eps, self.post_eps = config.eps, config.post_eps
        self.temperature, self.floor = config.gate_temperature, config.gate_floor

    def forward(
        self, y: Tensor, h: Tensor, gate: Tensor, post_weight: Tensor | None, pre_weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        if post_weight is None:
            y = unit_norm(y, self.post_eps)
        else:
            y = input_scaled_norm(y, post_weight, self.post_eps)
        w = gate / self.temperature
        beta = torch.sigmoid(w)
        alpha = torch.sqrt(torch.clamp(torch.sigmoid(-w) * (1.0 + beta), min=self.floor))
        h = (alpha * h.float() + beta * y.float()).to(h.dtype)
        norm = centred_norm if self.centred else rms_norm
        x = norm(h, pre_weight, self.eps)
        return h, x


class ResidualGate(nn.Module):
    """Holds a residual gate [D], FP32 in every model."""

    def __init__(self, config: MuseSparkConfig) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(config.hidden))


class SoftCap(nn.Module):
    """cap * tanh(scale * logits / cap), each of the four steps rounded: [..., V] -> [..., V]."""

    region = "soft_cap"

    def __init__(self, scale: float, cap: float) -> None:
        super().__init__()
        self.scale, self.cap = scale, cap

    def forward(self, logits: Tensor) -> Tensor:
        return torch.tanh(logits * self.scale / self.cap) * self.cap


class Layer(nn.Module):
    def __init__(self, config: MuseSparkConfig, layer: int) -> None:
        super().__init__()
        c = config
        self.self_attn = Attention(c, layer)
        self.mlp = LatentMoE(c)
        self.input_layernorm = CentredNorm(c.hidden, c.eps, c.dtype)
        self.pre_feedforward_layernorm = CentredNorm(c.hidden, c.eps, c.dtype)
        self.post_feedforward_layernorm = CentredNorm(c.hidden, c.post_eps, c.dtype)
        self.post_attention_residual_gate = ResidualGate(c)
        self.post_feedforward_residual_gate = ResidualGate(c)
        self.attn_boundary = GatedResidualBoundary(c, scaled=False, centred=True)
        last = layer == c.layers - 1
        self.mlp_boundary = GatedResidualBoundary(c, scaled=True, centred=not last)
        self.kind = "full" if c.is_full(layer) else "sliding"

    def forward(
        self, h: Tensor, x: Tensor, step: Step, cache: LayerCache, next_norm: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(residual h, normed input x) -> those of the next layer, normed by next_norm [D]."""
        y = self.self_attn(x, step, cache)
        gate = self.post_attention_residual_gate.gate
        h, x = self.attn_boundary(y, h, gate, None, self.pre_feedforward_layernorm.weight)
        y = self.mlp(x)
        gate = self.post_feedforward_residual_gate.gate
        post_weight = self.post_feedforward_layernorm.weight
        return self.mlp_boundary(y, h, gate, post_weight, next_norm)


class StepTables(nn.Module):
    """What all layers of one step share, from its positions alone.

    (positions [B, T] int64, capacity, extent, causal) -> (cos, sin [B, T, d / 2] rounded,
    full_slots, ring_slots [B, T], full_mask [B, T, extent] or None if `causal` says it all,
    ring_mask [B, T, W] in a decode, [B, T, W + T] in a prefill); see `Step`.
    """

    def __init__(self, config: MuseSparkConfig) -> None:
        super().__init__()
        self.head_dim, self.rope_theta = config.head_dim, config.rope_theta
        self.window, self.dtype = config.window, config.dtype

    def forward(
        self, positions: Tensor, capacity: int, extent: int, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        exponents = torch.arange(0, self.head_dim, 2, device=positions.device).float()
        frequencies = 1.0 / self.rope_theta ** (exponents / self.head_dim)
        angles = positions.float()[..., None] * frequencies
        return (
            angles.cos().to(self.dtype),
            angles.sin().to(self.dtype),
            *step_keys(positions, capacity, extent, self.window, causal),
        )


class NormedEmbedding(nn.Embedding):
    """Rows of the table, each divided by its root mean square: ids [B, T] -> [B, T, D]."""

    def __init__(self, config: MuseSparkConfig) -> None:
        super().__init__(config.vocabulary, config.hidden, dtype=config.dtype)
        self.eps = config.eps

    def forward(self, input: Tensor) -> Tensor:
        return unit_norm(super().forward(input), self.eps)


class Decoder(nn.Module):
    def __init__(self, config: MuseSparkConfig) -> None:
        super().__init__()
        self.embed_tokens = NormedEmbedding(config)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps, config.dtype)


class Model(nn.Module):
    def __init__(self, config: MuseSparkConfig) -> None:
        super().__init__()
        self.language_model = Decoder(config)


class MuseSpark(nn.Module):
    """forward(ids [B, T], positions [B, T], cache) -> logits [B, 1, V] of each last token.

    A step is a prefill (T > 1, any part of the prompt, rows padded with position -1 at the end) or
    a decode (T = 1). With `logits="all"` the result is [B, T, V]. Logits are in the model's dtype.
    """

    def __init__(self, config: MuseSparkConfig) -> None:
        super().__init__()
        self.config = config
        self.tables = StepTables(config)
        self.model = Model(config)
        self.lm_head = Linear(config.hidden, config.vocabulary, config.dtype)
        self.soft_cap = SoftCap(config.logit_scale, config.soft_cap)

    def forward(
        self, ids: Tensor, positions: Tensor, cache: KVCache, logits: str = "last"
    ) -> Tensor:
        step = self.step(positions, cache)
        decoder = self.model.language_model
        layers = cast(list[Layer], list(decoder.layers))
        h = decoder.embed_tokens(ids)
        x = layers[0].input_layernorm(h)
        for i, layer in enumerate(layers):
            following = layers[i + 1].input_layernorm if i + 1 < len(layers) else decoder.norm
            h, x = layer(h, x, step, cache.layers[i], following.weight)
        if logits == "last" and x.shape[1] > 1:
            last = positions.argmax(dim=1)
            x = x[torch.arange(x.shape[0], device=x.device), last][:, None]
        return self.soft_cap(self.lm_head(x))

    def step(self, positions: Tensor, cache: KVCache) -> Step:
        causal = cache.ends_aligned and positions.shape[1] > 1
        shared = self.tables(positions, cache.capacity, cache.extent, causal)
        return Step(positions, *shared, extent=cache.extent)


def build(config: MuseSparkConfig, device: str | torch.device, seed: int) -> MuseSpark:
    """A Muse Spark with random weights drawn on `device` from `seed`; `device="meta"` draws
    nothing."""
    set_numerics()
    with torch.device("meta"):
        model = MuseSpark(config)
    model.eval().requires_grad_(False)
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if name.endswith(("layernorm.weight", "expert_norm.weight")):  # centred: 1 is added
            tensor.uniform_(-0.5, 0.5, generator=generator)
        elif "norm" in name:
            tensor.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith("residual_gate.gate"):
            tensor.normal_(std=0.3, generator=generator)
        elif name.endswith("bias"):
            tensor.normal_(std=0.1, generator=generator)
        elif "embed_tokens" in name:
            tensor.normal_(generator=generator)
        else:
            tensor.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)
    return model


def cache(
    config: MuseSparkConfig, batch: int, capacity: int, device: str | torch.device
) -> KVCache:
    """An empty cache for `batch` sequences of up to `capacity` positions."""

    def layer(i: int) -> LayerCache:
        window = None if config.is_full(i) else config.window
        shape = batch, (window or capacity) + 1, config.kv_heads, config.head_dim
        k, v = (torch.zeros(shape, dtype=config.dtype, device=device) for _ in "kv")
        return LayerCache(k, v, window)

    return KVCache([layer(i) for i in range(config.layers)], capacity)
