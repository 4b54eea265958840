"""The published implementation (transformers' `muse_spark`) with a reference model's weights."""

from typing import Any

import pytest
import torch

from reference.muse_spark import MuseSpark
from reference.muse_spark_config import AudioConfig, MuseSparkConfig, VisionConfig

transformers = pytest.importorskip(
    "transformers", reason="the published Muse Spark is in the test extra: pip install -e '.[test]'"
)
modeling = pytest.importorskip(
    "transformers.models.muse_spark.modeling_muse_spark",
    reason="transformers >= 5.24 has Muse Spark, this one hasn't",
)


def text_config(c: MuseSparkConfig) -> Any:
    """The transformers configuration of the decoder, with its plain code for every part."""
    full = [c.is_full(i) for i in range(c.layers)]
    return transformers.MuseSparkTextConfig(
        vocab_size=c.vocabulary,
        hidden_size=c.hidden,
        num_hidden_layers=c.layers,
        num_attention_heads=c.query_heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.eps,
        post_norm_eps=c.post_eps,
        sliding_window=c.window,
        layer_types=["full_attention" if f else "sliding_attention" for f in full],
        layer_rope_theta=[0 if f else c.rope_theta for f in full],
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        qk_scale_factor=c.q_factor,
        output_multiplier=c.logit_scale,
        final_logit_softcapping=c.soft_cap,
        residual_gate_temperature=c.gate_temperature,
        moe_intermediate_size=c.expert_ff,
        moe_hidden_size=c.expert_width,
        num_local_experts=c.experts,
        num_experts_per_tok=c.top_k,
        attn_implementation="eager",
        experts_implementation="eager",
    )


def vision_config(v: VisionConfig) -> Any:
    kinds = ["full_attention" if v.is_full(i) else "window_attention" for i in range(v.layers)]
    return transformers.MuseSparkVisionConfig(
        patch_size=v.patch,
        pos_emb_height=v.grid,
        pos_emb_width=v.grid,
        max_position_embeddings=v.grid**2,
        num_attention_heads=v.heads,
        num_hidden_layers=v.layers,
        hidden_size=v.hidden,
        intermediate_size=v.ff,
        patch_temporal=v.patch_frames,
        merge_size=v.merge,
        layer_norm_eps=v.eps,
        layer_types=kinds,
        rope_parameters={"rope_type": "axial", "rope_theta": v.rope_theta},
        attn_implementation="eager",
    )


def audio_config(a: AudioConfig, hidden: int) -> Any:
    return transformers.MuseSparkAudioConfig(
        patch_sizes=a.patches,
        hidden_sizes=a.widths,
        depths=a.depths,
        num_hidden_layers=len(a.widths),
        mlp_ratio=float(a.ff_ratio),
        conv_kernel_size=a.kernel,
        rms_norm_eps=a.eps,
        out_hidden_size=hidden,
    )


def published_config(c: MuseSparkConfig) -> Any:
    """The whole configuration; encoders that `c` lacks are small ones, which nothing calls."""
    v = c.vision or VisionConfig(layers=1, hidden=8, heads=1, ff=8, patch=1, grid=1, adapter=8)
    a = c.audio or AudioConfig(patches=(2,), widths=(8,), depths=(1,))
    return transformers.MuseSparkConfig(
        text_config=text_config(c),
        vision_config=vision_config(v),
        audio_config=audio_config(a, c.hidden),
        out_hidden_size=v.merge**2 * v.hidden,
        projector_hidden_size=v.adapter,
        image_token_id=c.image_id,
        video_token_id=c.video_id,
        audio_token_id=c.audio_id,
        attn_implementation="eager",
        experts_implementation="eager",
    )


def published(model: MuseSpark) -> Any:
    """transformers' MuseSparkForConditionalGeneration holding copies of `model`'s weights, in its
    dtypes."""
    config = published_config(model.config)
    with torch.device("meta"):
        other = modeling.MuseSparkForConditionalGeneration(config)
    # Positions' tables are not in the state dict, so they are made again off the meta device.
    rotary = modeling.MuseSparkTextRotaryEmbedding(config.text_config)
    other.model.language_model.rotary_emb = rotary
    rotary = modeling.MuseSparkVisionRotaryEmbedding(config.vision_config)
    other.model.vision_tower.rotary_emb = rotary
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    missing, unexpected = other.load_state_dict(state, assign=True, strict=False)
    c = model.config
    absent = [*["vision"] * (c.vision is None), *["audio"] * (c.audio is None)]
    assert not unexpected
    assert all(name.startswith(tuple(f"model.{part}_" for part in absent)) for name in missing)
    return other.eval().requires_grad_(False)
