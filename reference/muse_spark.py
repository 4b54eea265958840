"""Meta Muse Spark Open (816B-A42B), plain PyTorch: what is right.

Shapes: B sequences, T tokens of each in a step, D hidden, V vocabulary; the parts are in
`muse_spark_config` (shape and presets), `muse_spark_attention`, `muse_spark_moe`,
`muse_spark_residual`, `experts` and `layers`; those of the encoders in `muse_spark_vision`,
`muse_spark_audio` and `muse_spark_media`.

Every tensor that these files make in `config.dtype` (BF16) is a rounding point; everything else is
FP32. Modules named with a `region` are the units that a fused kernel may replace: each is one call,
a function of its arguments alone. Parameter names are those of the published checkpoint.
"""

from typing import cast

import torch
from torch import Tensor, nn

from reference.cache import KVCache, LayerCache, step_keys
from reference.draw import random_model
from reference.layers import CentredNorm, Linear, RMSNorm, unit_norm
from reference.muse_spark_attention import Attention, Step
from reference.muse_spark_audio import AudioEncoder
from reference.muse_spark_config import PRESETS, MuseSparkConfig
from reference.muse_spark_media import Media, Pictures, Sound, heard, placed
from reference.muse_spark_moe import LatentMoE
from reference.muse_spark_residual import GatedResidualBoundary, ResidualGate
from reference.muse_spark_vision import VisionAdapter, VisionEncoder

configs = PRESETS


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
    """The decoder, and the encoders whose tokens stand in for embeddings."""

    def __init__(self, config: MuseSparkConfig) -> None:
        super().__init__()
        c = config
        self.config = c
        self.language_model = Decoder(c)
        if c.vision is not None:
            self.vision_tower = VisionEncoder(c.vision, c.dtype)
            self.vision_adapter = VisionAdapter(c.vision, c.dtype)
            self.vision_projection = Linear(c.vision.adapter, c.hidden, c.dtype)
        if c.audio is not None:
            self.audio_tower = AudioEncoder(c.audio, c.hidden, c.dtype)

    def embed(self, ids: Tensor, media: Media | None) -> Tensor:
        """ids [B, T] -> [B, T, D], encoded media in their places. Raises ValueError if media and
        placeholders do not match, or the configuration lacks the encoder."""
        h, c = self.language_model.embed_tokens(ids), self.config
        if media is None:
            return h
        for what, place, pictures in (
            ("image", c.image_id, media.images),
            ("video", c.video_id, media.videos),
        ):
            if pictures is not None:
                h = placed(h, ids, place, self.see(pictures), what)
        if media.sound is not None:
            h = placed(h, ids, c.audio_id, self.hear(media.sound), "audio")
        return h

    def see(self, pictures: Pictures) -> Tensor:
        """Images or videos -> their tokens' rows [n, D]."""
        if self.config.vision is None:
            raise ValueError("this configuration has no vision encoder; choose another preset")
        patches = pictures.patches.to(self.config.dtype)
        seen = self.vision_adapter(self.vision_tower(patches, pictures.grids))
        return unit_norm(self.vision_projection(seen), self.config.eps)

    def hear(self, sound: Sound) -> Tensor:
        """Clips -> their tokens' rows [n, D]."""
        if self.config.audio is None:
            raise ValueError("this configuration has no audio encoder; choose another preset")
        return unit_norm(heard(self.audio_tower, sound), self.config.eps)


class MuseSpark(nn.Module):
    """forward(ids [B, T], positions [B, T], cache) -> logits [B, 1, V] of each last token.

    A step is a prefill (T > 1, any part of the prompt, rows padded with position -1 at the end) or
    a decode (T = 1). With `logits="all"` the result is [B, T, V]. Logits are in the model's dtype.
    `media` are the images, videos and sound whose placeholders this step's `ids` hold.
    """

    def __init__(self, config: MuseSparkConfig) -> None:
        super().__init__()
        self.config = config
        self.tables = StepTables(config)
        self.model = Model(config)
        self.lm_head = Linear(config.hidden, config.vocabulary, config.dtype)
        self.soft_cap = SoftCap(config.logit_scale, config.soft_cap)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: KVCache,
        logits: str = "last",
        media: Media | None = None,
    ) -> Tensor:
        step = self.step(positions, cache)
        decoder = self.model.language_model
        layers = cast(list[Layer], list(decoder.layers))
        h = self.model.embed(ids, media)
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
    return random_model(lambda: MuseSpark(config), device, seed, draw)


def draw(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Fill one weight so that activations keep about their size through every layer."""
    if name.endswith(("layernorm.weight", "expert_norm.weight")):  # centred: 1 is added
        tensor.uniform_(-0.5, 0.5, generator=generator)
    elif name.endswith("bias"):
        tensor.normal_(std=0.1, generator=generator)
    elif "norm" in name or ".ln_" in name:
        tensor.uniform_(0.5, 1.5, generator=generator)
    elif name.endswith("residual_gate.gate"):
        tensor.normal_(std=0.3, generator=generator)
    elif "embed_tokens" in name or "position_embedding" in name:
        tensor.normal_(generator=generator)
    else:
        tensor.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)


def cache(
    config: MuseSparkConfig, batch: int, capacity: int, device: str | torch.device
) -> KVCache:
    """An empty cache for `batch` sequences of up to `capacity` positions."""
    windows = [None if config.is_full(i) else config.window for i in range(config.layers)]
    row = config.kv_heads, config.head_dim
    return KVCache.empty(windows, batch, capacity, row, config.dtype, device)
