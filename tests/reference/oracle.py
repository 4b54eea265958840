"""The published implementation (transformers' `beam`) with a reference model's weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

from reference.beam import Beam, BeamConfig

transformers = pytest.importorskip(
    "transformers", reason="the published Beam is in the test extra: pip install -e '.[test]'"
)
published_beam = pytest.importorskip(
    "transformers.models.beam.modeling_beam",
    reason="transformers >= 5.24 has Beam, this one hasn't",
)


def published_config(c: BeamConfig) -> Any:
    """The transformers configuration of the same shape, with its plain code for every part."""
    kinds = ["full_attention" if c.is_full(i) else "sliding_attention" for i in range(c.layers)]
    return transformers.BeamConfig(
        vocab_size=c.vocabulary,
        hidden_size=c.hidden,
        intermediate_size=c.dense_ff,
        num_hidden_layers=c.layers,
        num_attention_heads=c.query_heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.eps,
        sliding_window=c.window,
        moe_intermediate_size=c.expert_ff,
        num_experts=c.experts,
        num_experts_per_tok=c.top_k,
        n_group=c.groups,
        topk_group=c.top_groups,
        routed_scaling_factor=c.routed_scale,
        final_logit_softcapping=c.soft_cap,
        layer_types=kinds,
        mlp_layer_types=["dense" if c.is_dense(i) else "sparse" for i in range(c.layers)],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": c.rope_theta},
            "full_attention": None,
        },
        attn_implementation="eager",
        experts_implementation="eager",
    )


def published(model: Beam) -> Any:
    """transformers' BeamForCausalLM holding copies of `model`'s weights, in its dtypes."""
    with torch.device("meta"):
        other = published_beam.BeamForCausalLM(published_config(model.config))
    # Positions' tables are not in the state dict, so they are made again off the meta device.
    other.model.rotary_emb = published_beam.BeamRotaryEmbedding(other.config)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other.load_state_dict(state, assign=True)
    return other.eval().requires_grad_(False)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Our mask [B, T, S] bool as transformers' [B, 1, T, S]: zero, or the lowest finite value."""
    hidden = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, hidden)[:, None]
