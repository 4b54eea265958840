"""The shape of a Beam model, its presets, and what follows from them by arithmetic."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True)
class BeamConfig:
    """The shape of a Beam model; the defaults are the released one."""

    layers: int = 52
    hidden: int = 5120
    vocabulary: int = 151936
    query_heads: int = 48
    kv_heads: int = 8
    head_dim: int = 128
    window: int = 512
    full_every: int = 6
    rope_theta: float = 10000.0
    ssmax_length: float = 2048.0
    dense_layers: int = 3
    dense_ff: int = 20480
    experts: int = 256
    expert_ff: int = 2560
    top_k: int = 8
    groups: int = 8
    top_groups: int = 4
    routed_scale: float = 2.5
    eps: float = 1e-6
    soft_cap: float = 30.0
    dtype: torch.dtype = torch.bfloat16
    tp: int = 1
    prefill_attention: str = "fp32"  # or "sdpa": a library kernel, which rounds P to BF16
    gather_limit: int = 64  # at most so many token-expert pairs are served by gathered weights

    def is_full(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) attends to the whole sequence, without RoPE."""
        return (layer + 1) % self.full_every == 0 or layer == self.layers - 1

    def is_dense(self, layer: int) -> bool:
        return layer < self.dense_layers

    @property
    def note(self) -> str:
        """What a report has to say about a shard."""
        if self.tp == 1:
            return ""
        return (
            f"what one of {self.tp} tensor-parallel ranks holds and computes, sums over ranks the "
            f"identity; {self.layers} of {BeamConfig.layers} layers"
        )

    def shard(self, tp: int) -> "BeamConfig":
        """What one of `tp` tensor-parallel ranks holds and computes."""
        split = ("query_heads", "kv_heads", "dense_ff", "expert_ff", "vocabulary")
        for name in split:
            if getattr(self, name) % tp:
                raise ValueError(f"tp={tp} does not divide {name}={getattr(self, name)}")
        return replace(self, tp=self.tp * tp, **{n: getattr(self, n) // tp for n in split})


PRESETS: dict[str, BeamConfig] = {
    "full": BeamConfig(),
    "tp8-rank": replace(BeamConfig().shard(8), prefill_attention="sdpa"),
    # Twelve layers are what fits one of two 141 GB cards; every kind of layer is among them.
    "tp2-rank": replace(BeamConfig().shard(2), layers=12, prefill_attention="sdpa"),
    "mini": BeamConfig(
        layers=6,
        hidden=256,
        vocabulary=512,
        query_heads=4,
        kv_heads=2,
        head_dim=64,
        window=32,
        full_every=3,
        dense_layers=2,
        dense_ff=512,
        experts=16,
        expert_ff=64,
        top_k=4,
        groups=4,
        top_groups=2,
        gather_limit=16,
    ),
}


def parameter_count(config: BeamConfig) -> int:
    """All parameters, the router's correction bias included, by arithmetic on the shape."""
    c = config
    width, kv = c.query_heads * c.head_dim, c.kv_heads * c.head_dim
    attention = c.hidden * (3 * width + 2 * kv) + 2 * c.head_dim + c.query_heads
    dense = 3 * c.hidden * c.dense_ff
    moe = c.experts * (3 * c.hidden * c.expert_ff + c.hidden + 1)
    dense_layers = min(c.dense_layers, c.layers)
    layers = c.layers * (attention + 4 * c.hidden)
    layers += dense_layers * dense + (c.layers - dense_layers) * moe
    return layers + 2 * c.vocabulary * c.hidden + c.hidden


def active_parameter_count(config: BeamConfig) -> int:
    """Parameters that one token uses: of the experts, only the chosen."""
    idle = (config.experts - config.top_k) * 3 * config.hidden * config.expert_ff
    return parameter_count(config) - max(0, config.layers - config.dense_layers) * idle


def kv_bytes_per_token(config: BeamConfig) -> int:
    """Bytes that one more token of context adds to the cache (full layers only)."""
    full = sum(config.is_full(i) for i in range(config.layers))
    return full * 2 * config.kv_heads * config.head_dim * config.dtype.itemsize
