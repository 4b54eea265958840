"""Reflection Beam 1.0 (501B-A23B), plain PyTorch: what is right.

Shapes: B sequences, T tokens of each in a step, N = B * T, D hidden, H query heads, Hkv KV heads,
d head dimension, E experts, K experts a token, F feed-forward width, V vocabulary.

Every tensor that this file makes in `config.dtype` (BF16) is a rounding point; everything else is
FP32. Modules named with a `region` are the units that a fused kernel may replace: each is one call,
a function of its arguments alone. Parameter names are those of the published checkpoint.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from reference.cache import KVCache, LayerCache, ring_positions, write_slots
from reference.numerics import set_numerics
from reference.parallel import RankSum

SCORES_PER_BLOCK = 1 << 28  # FP32 attention scores held at once: 1 GiB


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

    def shard(self, tp: int) -> "BeamConfig":
        """What one of `tp` tensor-parallel ranks holds and computes."""
        split = ("query_heads", "kv_heads", "dense_ff", "expert_ff", "vocabulary")
        for name in split:
            if getattr(self, name) % tp:
                raise ValueError(f"tp={tp} does not divide {name}={getattr(self, name)}")
        return replace(self, tp=self.tp * tp, **{n: getattr(self, n) // tp for n in split})


configs: dict[str, BeamConfig] = {
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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension: FP32 inside, rounded once."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Linear(nn.Module):
    """y = x W^T, weight [out, in], no bias."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


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


class ParallelProjection(nn.Module):
    """Several projections of one input: (x [B, T, D], weights [Oi, D]...) -> tuple of [B, T, Oi].

    `names` are the siblings that own the weights, in the order in which they are passed.
    """

    region = "parallel_projection"

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names

    def forward(self, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.linear(x, weight) for weight in weights)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head: x [B, T, H, d], cos and sin [B, T, d / 2]; FP32, one rounding."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


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


class Attend(nn.Module):
    """Grouped-query attention over the keys that `mask` allows.

    (q [B, T, H, d], k, v [B, S, Hkv, d], mask [B, T, S] bool) -> [B, T, H, d]; scores and
    probabilities stay FP32, one rounding at the end. Without a mask, the queries are the last T of
    S positions and see what is not after them.
    """

    region = "attention"

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
        self.prefill_attention = c.prefill_attention
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
        if self.is_full:
            slots = cache.k, cache.v, step.full_slots
            q, _ = self.prepare(q, k, v, *norms, step.q_scale, *slots)
            k, v = cache.k[:, : step.extent], cache.v[:, : step.extent]
            a = self.mix(q, k, v, step.full_mask)
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
            a = self.mix(q, k, v, step.ring_mask)
        a = self.gate(a, gate, self.gate_bias)
        return self.rank_sum(self.o_proj(a.reshape(batch, steps, -1)))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention over k, v [B, S, Hkv, d]; `mask` [B, T, S], or None for causal rows that end
        at S. Long prefills may use PyTorch's kernel, which adds a rounding: P to BF16 before P V.
        """
        if q.shape[1] == 1 or self.prefill_attention == "fp32":
            return self.attend(q, k, v, mask)
        allowed = causal_lower_right(q.shape[1], k.shape[1]) if mask is None else mask[:, None]
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=1) for y in (k, v))
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=self.attend.scale)
        return a.transpose(1, 2)


class SwiGLU(nn.Module):
    """silu(gate) * up: FP32 inside, rounded once; (gate [..., F], up [..., F]) -> [..., F]."""

    region = "swiglu"

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return (F.silu(gate.float()) * up.float()).to(gate.dtype)


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


class Router(nn.Module):
    """Grouped top-k routing, FP32 throughout: x [N, D] -> (weights [N, K] fp32, experts [N, K]).

    Ties go to the lower index, hence the stable sorts.
    """

    region = "router"

    def __init__(self, config: BeamConfig) -> None:
        super().__init__()
        self.groups, self.top_groups, self.top_k = config.groups, config.top_groups, config.top_k
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden))
        self.e_score_correction_bias = nn.Buffer(torch.empty(config.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(F.linear(x.float(), self.weight))
        return self.choose(scores)

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores [N, E], unbiased -> the experts of each token and their normalised weights."""
        biased = scores + self.e_score_correction_bias
        grouped = biased.unflatten(-1, (self.groups, -1))
        group_scores = grouped.topk(2, dim=-1).values.sum(dim=-1)
        best = group_scores.sort(dim=-1, descending=True, stable=True).indices
        open_groups = torch.zeros_like(group_scores, dtype=torch.bool)
        open_groups = open_groups.scatter(-1, best[:, : self.top_groups], True)
        allowed = grouped.masked_fill(~open_groups[..., None], -torch.inf).flatten(-2)
        order = allowed.sort(dim=-1, descending=True, stable=True).indices
        experts = order[:, : self.top_k]
        weights = scores.gather(-1, experts)
        return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20), experts


class Experts(nn.Module):
    """The routed SwiGLU experts: (x [N, D], experts [N, K]) -> [N, K, D], each output rounded.

    Few pairs read their experts' weights by gathering them (what compiles best at small batch);
    many are sorted by expert for a grouped matrix product. Each pair's arithmetic is the same.
    """

    region = "experts"

    def __init__(self, config: BeamConfig) -> None:
        super().__init__()
        c = config
        self.gather_limit = c.gather_limit
        shape = c.experts, 2 * c.expert_ff, c.hidden
        self.gate_up_proj = nn.Parameter(torch.empty(shape, dtype=c.dtype))
        shape = c.experts, c.hidden, c.expert_ff
        self.down_proj = nn.Parameter(torch.empty(shape, dtype=c.dtype))
        self.activate = SwiGLU()

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        tokens, top_k = experts.shape
        if tokens * top_k <= self.gather_limit:
            chosen = experts.flatten()
            rows = x[:, None].expand(-1, top_k, -1).reshape(tokens * top_k, -1, 1)
            gate, up = torch.bmm(self.gate_up_proj[chosen], rows).squeeze(-1).chunk(2, dim=-1)
            hidden = self.activate(gate, up)
            y = torch.bmm(self.down_proj[chosen], hidden[..., None])
            return y.view(tokens, top_k, -1)
        by_expert, order = experts.flatten().sort(stable=True)
        every = torch.arange(self.gate_up_proj.shape[0], device=x.device)
        ends = torch.searchsorted(by_expert, every, right=True).to(torch.int32)
        rows = x[order // top_k]
        gate_up = torch._grouped_mm(rows, self.gate_up_proj.transpose(1, 2), offs=ends)
        hidden = self.activate(*gate_up.chunk(2, dim=-1))
        y = torch._grouped_mm(hidden, self.down_proj.transpose(1, 2), offs=ends)
        return torch.empty_like(y).index_copy_(0, order, y).view(tokens, top_k, -1)


class Combine(nn.Module):
    """sum_k weight_k * y_k in slot order, times the routed scale: FP32, rounded once.

    (y [N, K, D], weights [N, K] fp32) -> [N, D]
    """

    region = "combine"

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, y: Tensor, weights: Tensor) -> Tensor:
        terms = (y.float() * weights[..., None]).unbind(dim=1)
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return (total * self.scale).to(y.dtype)


class MoE(nn.Module):
    def __init__(self, config: BeamConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.combine = Combine(config.routed_scale)
        self.rank_sum = RankSum()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, experts = self.gate(rows)
        y = self.combine(self.experts(rows, experts), weights)
        return self.rank_sum(y.view_as(x))


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

    def forward(
        self, h: Tensor, x: Tensor, step: Step, cache: LayerCache, next_norm: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(residual h, normed input x) -> the same for the next layer; next_norm [D] is its weight."""
        y = self.self_attn(x, step, cache)
        norms = self.post_attention_layernorm.weight, self.pre_feedforward_layernorm.weight
        h, x = self.attn_boundary(y, h, *norms)
        y = self.mlp(x)
        return self.mlp_boundary(y, h, self.post_feedforward_layernorm.weight, next_norm)


class Decoder(nn.Module):
    def __init__(self, config: BeamConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden, dtype=config.dtype)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps, config.dtype)


class Beam(nn.Module):
    """forward(ids [B, T], positions [B, T], cache) -> logits [B, 1, V] fp32 of each last token.

    A step is a prefill (T > 1, any part of the prompt, rows padded with position -1 at the end) or
    a decode (T = 1). With `logits="all"` the result is [B, T, V].
    """

    def __init__(self, config: BeamConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = Linear(config.hidden, config.vocabulary, config.dtype)

    def forward(
        self, ids: Tensor, positions: Tensor, cache: KVCache, logits: str = "last"
    ) -> Tensor:
        step = self.step(positions, cache)
        layers = self.model.layers
        h = self.model.embed_tokens(ids)
        x = layers[0].input_layernorm(h)
        for i, layer in enumerate(layers):
            following = layers[i + 1].input_layernorm if i + 1 < len(layers) else self.model.norm
            h, x = layer(h, x, step, cache.layers[i], following.weight)
        if logits == "last" and x.shape[1] > 1:
            last = positions.argmax(dim=1)
            x = x[torch.arange(x.shape[0], device=x.device), last][:, None]
        cap = self.config.soft_cap
        return cap * torch.tanh(self.lm_head(x).float() / cap)

    def step(self, positions: Tensor, cache: KVCache) -> Step:
        c = self.config
        p = positions.float()
        exponents = torch.arange(0, c.head_dim, 2, device=p.device).float() / c.head_dim
        angles = p[..., None] * (1.0 / c.rope_theta**exponents)
        query = positions[..., None]  # [B, T, 1]
        decode = positions.shape[1] == 1
        held = ring_positions(positions[:, 0] + int(decode), c.window)
        held = (held if decode else torch.cat((held, positions), dim=1))[:, None]  # [B, 1, S]
        causal = cache.ends_aligned and not decode
        every = torch.arange(cache.extent, device=p.device)
        return Step(
            positions=positions,
            cos=angles.cos(),
            sin=angles.sin(),
            q_scale=torch.exp(0.1 * torch.log1p((p + 1) / c.ssmax_length)),
            full_slots=write_slots(positions, cache.capacity, None),
            ring_slots=write_slots(positions, cache.capacity, c.window),
            full_mask=None if causal else every <= query,
            ring_mask=(held >= 0) & (held <= query) & (held > query - c.window),
            extent=cache.extent,
        )


def build(config: BeamConfig, device: str | torch.device, seed: int) -> Beam:
    """A Beam with random weights drawn on `device` from `seed`; `device="meta"` draws nothing."""
    set_numerics()
    with torch.device("meta"):
        model = Beam(config)
    model.eval().requires_grad_(False)
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if "norm" in name:
            tensor.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith("bias"):
            tensor.normal_(std=0.1 if "correction" in name else 1.0, generator=generator)
        elif "embed" in name:
            tensor.normal_(generator=generator)
        else:
            tensor.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)
    return model


def cache(config: BeamConfig, batch: int, capacity: int, device: str | torch.device) -> KVCache:
    """An empty cache for `batch` sequences of up to `capacity` positions."""

    def layer(i: int) -> LayerCache:
        window = None if config.is_full(i) else config.window
        shape = batch, (window or capacity) + 1, config.kv_heads, config.head_dim
        k, v = (torch.zeros(shape, dtype=config.dtype, device=device) for _ in "kv")
        return LayerCache(k, v, window)

    return KVCache([layer(i) for i in range(config.layers)], capacity)


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
