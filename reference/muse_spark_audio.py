"""Muse Spark's audio encoder: a mono waveform to rows of the decoder's width, without attention.

A pyramid of stages: each folds some neighbouring inputs into one and mixes them by causal
depthwise convolutions. Shapes: C clips, S samples or steps of each, D width of a stage.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference.layers import RMSNorm
from reference.muse_spark_config import AudioConfig
from reference.muse_spark_vision import GeluMLP


class AudioPatchEmbedder(nn.Module):
    """x [C, S, inputs] -> [C, S / patch, D]: neighbours side by side, projected, normed."""

    def __init__(self, inputs: int, width: int, patch: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Linear(patch * inputs, width, dtype=dtype)
        self.norm = RMSNorm(width, eps, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x.unflatten(1, (-1, self.patch)).flatten(2)))


class ConvBlock(nn.Module):
    """h [C, S, D] -> h + mlp(norm(conv(h))); a step sees itself and the kernel's steps before."""

    def __init__(self, config: AudioConfig, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, config.kernel, groups=width, dtype=dtype)
        self.norm = RMSNorm(width, config.eps, dtype)
        self.mlp = GeluMLP(width, config.ff_ratio * width, dtype)

    def forward(self, h: Tensor) -> Tensor:
        before = self.conv.kernel_size[0] - 1
        mixed = self.conv(F.pad(h.transpose(1, 2), (before, 0))).transpose(1, 2)
        return self.mlp(self.norm(mixed)) + h


class AudioStage(nn.Module):
    kind = "audio"

    def __init__(self, config: AudioConfig, stage: int, dtype: torch.dtype) -> None:
        super().__init__()
        inputs = config.widths[stage - 1] if stage else 1
        width, patch = config.widths[stage], config.patches[stage]
        self.patch_embedder = AudioPatchEmbedder(inputs, width, patch, config.eps, dtype)
        blocks = (ConvBlock(config, width, dtype) for _ in range(config.depths[stage]))
        self.conv_blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch_embedder(x)
        for block in self.conv_blocks:
            h = block(h)
        return h


class AudioEncoder(nn.Module):
    """Samples [C, S] at 24 kHz -> [C, S / samples_per_token, hidden], in the weights' dtype.

    Raises ValueError unless S is a whole number of tokens; pad with zeros at the end.
    """

    def __init__(self, config: AudioConfig, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.samples_per_token, self.dtype = config.samples_per_token, dtype
        stages = (AudioStage(config, i, dtype) for i in range(len(config.widths)))
        self.layers = nn.ModuleList(stages)
        self.norm = RMSNorm(config.widths[-1], config.eps, dtype)
        self.proj = nn.Linear(config.widths[-1], hidden, dtype=dtype)
        self.post_proj_norm = RMSNorm(hidden, config.eps, dtype)

    def forward(self, samples: Tensor) -> Tensor:
        if samples.shape[1] % self.samples_per_token:
            raise ValueError(
                f"clips have {samples.shape[1]} samples; pad them with zeros to a multiple of "
                f"{self.samples_per_token}"
            )
        h = samples.to(self.dtype)[..., None]
        for stage in self.layers:
            h = stage(h)
        return self.post_proj_norm(self.proj(self.norm(h)))
