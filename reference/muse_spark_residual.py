"""Muse Spark's gated residuals: what stands between two sublayers.

Shapes: B sequences, T tokens of each in a step, D hidden.
"""

import torch
from torch import Tensor, nn

from reference.layers import centred_norm, input_scaled_norm, rms_norm, unit_norm
from reference.muse_spark_config import MuseSparkConfig


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
