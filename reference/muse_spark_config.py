"""The shape of a Muse Spark model, its presets, and what follows from them by arithmetic."""

import math
from dataclasses import dataclass, field, replace

import torch


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The shape of the vision encoder; the defaults are the released one."""

    layers: int = 50
    hidden: int = 1536
    heads: int = 16
    ff: int = 8960
    patch: int = 14  # pixels of a patch's side
    patch_frames: int = 2  # frames of a patch
    grid: int = 32  # positions of the learned table along a side, and patches of a window's side
    merge: int = 2  # patches of a token's side
    full_every: int = 4
    rope_theta: float = 10000.0
    adapter: int = 4096  # width between the encoder and the decoder
    eps: float = 1e-5

    def is_full(self, layer: int) -> bool:
        """Whether layer `layer` attends to a whole frame, not to a window of it."""
        return (layer + 1) % self.full_every == 0 or layer == self.layers - 1

    @property
    def patch_values(self) -> int:
        """Values of one patch: frames x 3 colours x patch x patch."""
        return self.patch_frames * 3 * self.patch**2


@dataclass(frozen=True, kw_only=True)
class AudioConfig:
    """The shape of the audio encoder; the defaults are the released one."""

    patches: tuple[int, ...] = (16, 6, 5, 4)  # inputs that each stage folds into one
    widths: tuple[int, ...] = (256, 512, 1024, 2048)
    depths: tuple[int, ...] = (2, 2, 2, 2)  # blocks of each stage
    kernel: int = 7
    ff_ratio: int = 4
    eps: float = 1e-6

    @property
    def samples_per_token(self) -> int:
        return math.prod(self.patches)


@dataclass(frozen=True, kw_only=True)
class MuseSparkConfig:
    """The shape of a Muse Spark model; the defaults are the released one.

    Without `vision` or `audio` the model has no such encoder.
    """

    layers: int = 62
    hidden: int = 8192
    vocabulary: int = 202048
    query_heads: int = 128
    kv_heads: int = 16
    head_dim: int = 64
    window: int = 2048
    full_every: int = 4
    rope_theta: float = 500000.0
    q_factor: float = 5.4730064863875
    experts: int = 256
    expert_width: int = 4096  # of an expert's input and output, between pooler and unpooler
    expert_ff: int = 4096
    top_k: int = 8
    logit_scale: float = 0.1767766952966369  # of the router's logits and the head's
    gate_temperature: float = 0.3
    gate_floor: float = 1e-3
    eps: float = 1e-5
    post_eps: float = 1e-8  # of the norms between a sublayer and its residual
    soft_cap: float = 20.0
    image_id: int = 200092  # placeholder tokens
    video_id: int = 200091
    audio_id: int = 200038
    vision: VisionConfig | None = field(default_factory=VisionConfig)
    audio: AudioConfig | None = field(default_factory=AudioConfig)
    dtype: torch.dtype = torch.bfloat16
    tp: int = 1
    rank: int = 0
    prefill_attention: str = "fp32"  # or "sdpa": a library kernel, which rounds P to BF16
    gather_limit: int = 64  # at most so many token-expert pairs are served by gathered weights

    def is_full(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) attends to the whole sequence, without RoPE: the last one
        and every fourth before it."""
        return (self.layers - 1 - layer) % self.full_every == 0

    @property
    def note(self) -> str:
        """What a report has to say about the released model, or a shard of it."""
        if self == MuseSparkConfig():
            counts = parameter_count(self), active_parameter_count(self)
            counts += (active_parameter_count(self, ends=False),)
            total, active, inner = (f"{n / 1e9:.1f}B" for n in counts)
            return (
                f"{total} parameters, a text token uses {active}, {inner} of them not counting "
                "embedding and head"
            )
        if self.tp == 1:
            return ""
        return (
            f"what one of {self.tp} tensor-parallel ranks holds and computes, sums over ranks the "
            f"identity; {self.layers} of {MuseSparkConfig.layers} layers"
        )

    def shard(self, tp: int, rank: int = 0) -> "MuseSparkConfig":
        """What rank `rank` of `tp` tensor-parallel ranks holds and computes of the decoder.

        Heads, experts' inner width, vocabulary, and the inputs of pooler and unpooler are split.
        """
        if self.tp != 1:
            raise ValueError(f"tp={self.tp} is a shard already; shard the whole configuration")
        split = "query_heads", "kv_heads", "expert_ff", "vocabulary"
        for name in (*split, "hidden", "expert_width"):
            if getattr(self, name) % tp:
                raise ValueError(f"tp={tp} does not divide {name}={getattr(self, name)}")
        parts = {name: getattr(self, name) // tp for name in split}
        return replace(self, tp=tp, rank=rank, vision=None, audio=None, **parts)


PRESETS: dict[str, MuseSparkConfig] = {
    "full": MuseSparkConfig(),
    # What one of eight ranks holds of 36 layers of the 62, which are 191.4 GiB. 36 are 111.4 of the
    # 139 GiB of a 141 GB card, the caches of a decode and of a prefill 8 x 2048 at 100K take 4.1,
    # and what that prefill makes takes 10.5, twice where it is judged: one layer more would not
    # fit. Both kinds of layer, in about the model's ratio. No encoders.
    "tp8-rank": replace(MuseSparkConfig(layers=36).shard(8), prefill_attention="sdpa"),
    "mini": MuseSparkConfig(
        layers=5,
        hidden=256,
        vocabulary=512,
        query_heads=4,
        kv_heads=2,
        head_dim=64,
        window=32,
        experts=16,
        expert_width=128,
        expert_ff=128,
        top_k=4,
        image_id=509,
        video_id=510,
        audio_id=511,
        vision=VisionConfig(layers=4, hidden=64, heads=2, ff=128, patch=4, grid=4, adapter=128),
        audio=AudioConfig(patches=(8, 4), widths=(32, 64), depths=(1, 1)),
        gather_limit=16,
    ),
}


def parameter_count(config: MuseSparkConfig) -> int:
    """All parameters, the router's correction bias included, by arithmetic on the shape."""
    c = config
    width, kv = c.query_heads * c.head_dim, c.kv_heads * c.head_dim
    attention = c.hidden * (3 * width + 2 * kv)
    latent = 2 * c.hidden * c.expert_width // c.tp + 2 * c.expert_width
    moe = c.experts * (3 * c.expert_width * c.expert_ff + c.hidden + 1) + latent
    layers = c.layers * (attention + moe + 5 * c.hidden)  # three norms and two gates
    text = layers + 2 * c.vocabulary * c.hidden + c.hidden
    return text + _vision_count(c) + _audio_count(c)


def _vision_count(config: MuseSparkConfig) -> int:
    if (v := config.vision) is None:
        return 0
    attention, mlp = 4 * (v.hidden + 1) * v.hidden, 2 * v.hidden * v.ff + v.ff + v.hidden
    layers = v.layers * (attention + mlp + 4 * v.hidden)
    ends = (v.patch_values + v.grid**2 + 4) * v.hidden
    adapter = v.merge**2 * v.hidden * v.adapter + v.adapter**2 + v.adapter * config.hidden
    return layers + ends + adapter


def _audio_count(config: MuseSparkConfig) -> int:
    if (a := config.audio) is None:
        return 0
    total = (a.widths[-1] + 2) * config.hidden + a.widths[-1]
    before = 1
    for patch, width, depth in zip(a.patches, a.widths, a.depths, strict=True):
        total += (before * patch + 2) * width
        mlp = (2 * width + 1) * width * a.ff_ratio + width
        total += depth * ((a.kernel + 2) * width + mlp)
        before = width
    return total


def active_parameter_count(config: MuseSparkConfig, *, ends: bool = True) -> int:
    """Parameters that one text token uses: of the experts only the chosen, and no encoder.

    Without `ends`, the embedding and the head are left out, too.
    """
    c = config
    idle = (c.experts - c.top_k) * 3 * c.expert_width * c.expert_ff
    total = parameter_count(replace(c, vision=None, audio=None)) - c.layers * idle
    return total if ends else total - 2 * c.vocabulary * c.hidden


def kv_bytes_per_token(config: MuseSparkConfig) -> int:
    """Bytes that one more token of context adds to the cache (full layers only)."""
    full = sum(config.is_full(i) for i in range(config.layers))
    return full * 2 * config.kv_heads * config.head_dim * config.dtype.itemsize
