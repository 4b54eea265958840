"""A toy Muse Spark with every kind of layer, ways to run it, and its reorderings."""

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference import muse_spark
from reference.cache import KVCache
from reference.muse_spark import MuseSpark, MuseSparkConfig
from reference.muse_spark_moe import LatentMoE, Router
from tests.reference import noise, small
from tests.reference.layerwise import ForcedRouter
from tests.reference.noise import permutation
from tests.reference.published_rounding import PublishedAttend

SMALL = MuseSparkConfig(
    layers=4,
    hidden=96,
    vocabulary=160,
    query_heads=4,
    kv_heads=2,
    head_dim=32,
    window=8,
    full_every=2,  # sliding, full, sliding, full
    experts=16,
    expert_width=64,
    expert_ff=48,
    top_k=4,
    vision=None,
    audio=None,
    gather_limit=16,
)


def build(dtype: torch.dtype, seed: int = 0, **changes: object) -> MuseSpark:
    return muse_spark.build(replace(SMALL, dtype=dtype, **changes), "cpu", seed)


def run(model: MuseSpark, ids: Tensor, cuts: list[int], cache: KVCache | None = None) -> Tensor:
    """Logits [B, T, V] of `ids` fed in steps that end at `cuts` (the last one is T)."""
    if cache is None:
        cache = muse_spark.cache(model.config, ids.shape[0], ids.shape[1], "cpu")
    logits = []
    for first, end in zip([0, *cuts], cuts, strict=False):
        place = small.positions(ids.shape[0], first, end)
        logits.append(model(ids[:, first:end], place, cache, "all"))
    return torch.cat(logits, dim=1)


class PublishedMoE(nn.Module):
    """`moe` with the published combine: each weighted output is rounded, and they are added in the
    model's dtype in ascending expert order."""

    def __init__(self, moe: LatentMoE) -> None:
        super().__init__()
        self.gate, self.pool, self.experts = moe.gate, moe.pool, moe.experts
        self.pre_expert_proj, self.pre_expert_norm = moe.pre_expert_proj, moe.pre_expert_norm
        self.post_expert_proj = moe.post_expert_proj

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, experts = self.gate(rows)
        z = self.pool(rows, self.pre_expert_proj.weight, self.pre_expert_norm.weight)
        y = self.experts.post_expert_norm(self.experts.each(z, experts))
        y = (y * weights[..., None]).to(x.dtype)
        order = experts.argsort(dim=-1)[..., None].expand_as(y)
        total = torch.zeros_like(z)
        for term in y.gather(1, order).unbind(dim=1):
            total = total + term
        return self.post_expert_proj(total).view_as(x)


class ToldRouter(ForcedRouter):
    """A router whose choice is made for it: `experts` [N, K]; the weights are still its own."""

    def __init__(self, router: Router) -> None:
        super().__init__(router)
        self.weigh, self.logit_scale = router.weigh, router.logit_scale

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        assert self.experts is not None
        scores = torch.sigmoid(F.linear(x.float(), self.weight) * self.logit_scale)
        return self.weigh(scores, self.experts), self.experts


def as_published(model: MuseSpark, *, combine: bool = True, attention: bool = True) -> MuseSpark:
    """A copy of `model` with the published roundings, and routers that must be forced."""
    other = copy.deepcopy(model)
    for layer in other.model.language_model.layers:
        layer.mlp.gate = ToldRouter(layer.mlp.gate)
        if attention:
            layer.self_attn.attend = PublishedAttend(layer.self_attn.attend.scale)
        if combine:
            layer.mlp = PublishedMoE(layer.mlp)
    return other


def reorderings(model: nn.Module, config: MuseSparkConfig, count: int) -> Iterator:
    """`noise.reorderings` of a Muse Spark."""
    return noise.reorderings(model, config, count, permuted=_permuted)


def _permuted(
    state: dict[str, Tensor], c: MuseSparkConfig, order: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """The hidden dimension, the experts' widths, heads, value dimensions and (without RoPE) query
    and key dimensions, each in another order."""
    prefix = "model.language_model."
    out = dict(state)
    for name in (f"{prefix}embed_tokens.weight", "lm_head.weight"):
        out[name] = state[name][:, order]
    out[f"{prefix}norm.weight"] = state[f"{prefix}norm.weight"][order]
    out |= _permuted_encoders(state, c, order, generator)
    for i in range(c.layers):
        start = f"{prefix}layers.{i}."
        layer = {n.removeprefix(start): t for n, t in state.items() if n.startswith(start)}
        for name, tensor in layer.items():
            if name.endswith(("layernorm.weight", "residual_gate.gate")):
                layer[name] = tensor[order]
        layer |= _permuted_attention(layer, c, c.is_full(i), order, generator)
        layer |= _permuted_experts(layer, c, order, generator)
        out |= {start + name: tensor for name, tensor in layer.items()}
    return {name: tensor.contiguous() for name, tensor in out.items()}


def _permuted_attention(
    layer: dict[str, Tensor],
    c: MuseSparkConfig,
    full: bool,
    order: Tensor,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    share = c.query_heads // c.kv_heads
    kv_heads = permutation(c.kv_heads, generator)
    heads = torch.cat([h * share + permutation(share, generator) for h in kv_heads])
    values = permutation(c.head_dim, generator)
    keys = permutation(c.head_dim, generator) if full else torch.arange(c.head_dim)

    def rows(heads: Tensor, dims: Tensor) -> Tensor:
        return (heads[:, None] * c.head_dim + dims).flatten()

    chosen = {
        "q_proj": rows(heads, keys),
        "k_proj": rows(kv_heads, keys),
        "v_proj": rows(kv_heads, values),
        "gate_proj": rows(heads, values),
    }
    names = {leaf: f"self_attn.{leaf}.weight" for leaf in (*chosen, "o_proj")}
    out = {names[leaf]: layer[names[leaf]][row][:, order] for leaf, row in chosen.items()}
    out[names["o_proj"]] = layer[names["o_proj"]][order][:, rows(heads, values)]
    return out


def _permuted_experts(
    layer: dict[str, Tensor], c: MuseSparkConfig, order: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    mlp = {n.removeprefix("mlp."): t for n, t in layer.items() if n.startswith("mlp.")}
    pooled, inner = permutation(c.expert_width, generator), permutation(c.expert_ff, generator)
    gate_up = mlp["experts.gate_up_proj"].unflatten(1, (2, -1))
    norm = "experts.post_expert_norm.weight"
    out = {
        "gate.weight": mlp["gate.weight"][:, order],
        "pre_expert_proj.weight": mlp["pre_expert_proj.weight"][pooled][:, order],
        "pre_expert_norm.weight": mlp["pre_expert_norm.weight"][pooled],
        "experts.gate_up_proj": gate_up[:, :, inner][..., pooled].flatten(1, 2),
        "experts.down_proj": mlp["experts.down_proj"][:, pooled][..., inner],
        norm: mlp[norm][pooled],
        "post_expert_proj.weight": mlp["post_expert_proj.weight"][order][:, pooled],
    }
    return {f"mlp.{name}": tensor for name, tensor in out.items()}


def _permuted_encoders(
    state: dict[str, Tensor], c: MuseSparkConfig, order: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """What the encoders return in the decoder's `order`; within the vision encoder, its hidden
    dimension, heads, value dimensions and inner widths, each in another order."""
    names = "model.audio_tower.proj.weight", "model.audio_tower.proj.bias"
    names += "model.audio_tower.post_proj_norm.weight", "model.vision_projection.weight"
    out = {name: state[name][order] for name in names if name in state}
    if (v := c.vision) is None:
        return out
    hidden = permutation(v.hidden, generator)
    prefix = "model.vision_tower."
    for name, tensor in state.items():
        if not name.startswith(prefix):
            continue
        if name.endswith(("patch_embedding.weight", "mlp.fc2.weight", "attn.proj.weight")):
            out[name] = tensor[hidden]
        elif name.endswith(("_proj.weight", "fc1.weight", "table.weight")):
            out[name] = tensor[:, hidden]
        elif name.endswith(("_proj.bias", "fc1.bias")):
            out[name] = tensor
        else:  # norms, and biases of what adds to the residual
            out[name] = tensor[hidden]
    for i in range(v.layers):
        layer = f"{prefix}layers.{i}."
        dim = v.hidden // v.heads
        heads, values = permutation(v.heads, generator), permutation(dim, generator)
        keys = torch.arange(dim)  # tied to frequencies
        for leaf, dims in (("q_proj", keys), ("k_proj", keys), ("v_proj", values)):
            rows = (heads[:, None] * dim + dims).flatten()
            for kind in ("weight", "bias"):
                name = f"{layer}attn.{leaf}.{kind}"
                out[name] = out[name][rows]
        columns = (heads[:, None] * dim + values).flatten()
        out[f"{layer}attn.proj.weight"] = out[f"{layer}attn.proj.weight"][:, columns]
        inner = permutation(v.ff, generator)
        for kind in ("weight", "bias"):
            out[f"{layer}mlp.fc1.{kind}"] = out[f"{layer}mlp.fc1.{kind}"][inner]
        out[f"{layer}mlp.fc2.weight"] = out[f"{layer}mlp.fc2.weight"][:, inner]
    one, two = permutation(v.adapter, generator), permutation(v.adapter, generator)
    channels = (hidden[:, None] * v.merge**2 + torch.arange(v.merge**2)).flatten()
    out["model.vision_adapter.fc1.weight"] = state["model.vision_adapter.fc1.weight"][one][
        :, channels
    ]
    out["model.vision_adapter.fc2.weight"] = state["model.vision_adapter.fc2.weight"][two][:, one]
    out["model.vision_projection.weight"] = out["model.vision_projection.weight"][:, two]
    return out
