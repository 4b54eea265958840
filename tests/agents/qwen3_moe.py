"""Qwen3's mixture of experts, a small one with random weights: the modules are those of
`transformers`, the step and the cache around them are ours."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeModel

from reference.cache import KVCache, write_slots

configs = {
    "mini": Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        pad_token_id=None,
        attn_implementation="sdpa",
        experts_implementation="batched_mm",
        dtype=torch.bfloat16,
    )
}


class Slots:
    """What an attention layer asks its cache: keep these keys and values, and give back all."""

    def __init__(self, cache: KVCache, positions: Tensor) -> None:
        self.layers, self.slots = cache.layers, write_slots(positions, cache.capacity, None)

    def update(self, k: Tensor, v: Tensor, layer: int, **_: Any) -> tuple[Tensor, Tensor]:
        """k, v [B, Hkv, T, D] -> [B, Hkv, S + 1, D]."""
        kept = self.layers[layer]
        kept.write(k.transpose(1, 2), v.transpose(1, 2), self.slots)
        return kept.k.transpose(1, 2), kept.v.transpose(1, 2)


class Qwen3Moe(nn.Module):
    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.model = Qwen3MoeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """ids, positions [B, T] -> the last token's logits [B, 1, V] FP32."""
        model, slots = self.model, Slots(cache, positions)
        at = positions.clamp_min(0)
        seen = torch.arange(cache.capacity + 1, device=ids.device) <= at[..., None]
        h = model.embed_tokens(ids)
        rotary = model.rotary_emb(h, position_ids=at)
        for layer in model.layers:
            h = layer(h, attention_mask=seen[:, None], cache=slots, position_embeddings=rotary)
        return self.lm_head(model.norm(h[:, -1:])).float()


def build(config: Qwen3MoeConfig, device: str | torch.device, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Qwen3Moe(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.to(device, torch.bfloat16).eval().requires_grad_(False)


def cache(config: Qwen3MoeConfig, batch: int, capacity: int, device: str | torch.device) -> KVCache:
    row = config.num_key_value_heads, config.head_dim
    windows = [None] * config.num_hidden_layers
    return KVCache.empty(windows, batch, capacity, row, torch.bfloat16, device)
