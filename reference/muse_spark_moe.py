"""Muse Spark's latent mixture of experts: a router on the full width, a pooler to the experts'
width, gated experts with an output norm each, their weighted sum, an unpooler.

Shapes: N tokens, D hidden, P width of the experts' inputs and outputs, E experts, K experts a
token, R tensor-parallel ranks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference.experts import Combine, RoutedExperts
from reference.layers import CentredNorm, Linear, RoundedSwiGLU, centred_norm, input_scaled_norm
from reference.muse_spark_config import MuseSparkConfig
from reference.parallel import RankSum


class Router(nn.Module):
    """Top-k routing, FP32 throughout: x [N, D] -> (weights [N, K] fp32, experts [N, K]).

    The bias serves the choice alone. Ties go to the lower index, hence the stable sort.
    """

    region = "biased_router"
    floor = 1e-15  # of the sum that weights are divided by

    def __init__(self, config: MuseSparkConfig) -> None:
        super().__init__()
        self.top_k, self.logit_scale = config.top_k, config.logit_scale
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden))
        self.e_score_correction_bias = nn.Buffer(torch.empty(config.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(F.linear(x.float(), self.weight) * self.logit_scale)
        biased = scores + self.e_score_correction_bias
        order = biased.sort(dim=-1, descending=True, stable=True).indices
        experts = order[:, : self.top_k]
        return self.weigh(scores, experts), experts

    def weigh(self, scores: Tensor, experts: Tensor) -> Tensor:
        """scores [N, E], unbiased; the weights of the chosen `experts` [N, K], normalised."""
        weights = scores.gather(-1, experts)
        return weights / (weights.sum(dim=-1, keepdim=True) + self.floor)


class Pooler(nn.Module):
    """Projection to the experts' width, summed over the ranks, and its centred norm.

    (x [N, D / R], weight [P, D / R], norm_weight [P]) -> [N, P]; two roundings besides the factor.
    """

    region = "pooler"

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.rank_sum = RankSum()

    def forward(self, x: Tensor, weight: Tensor, norm_weight: Tensor) -> Tensor:
        return centred_norm(self.rank_sum(F.linear(x, weight)), norm_weight, self.eps)


class OutputNorm(nn.Module):
    """The input-scaled norm of every expert's output: (y [N, K, P]) -> [N, K, P]."""

    region = "expert_output_norm"

    def __init__(self, config: MuseSparkConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.expert_width, dtype=config.dtype))
        self.eps = config.post_eps

    def forward(self, y: Tensor) -> Tensor:
        return input_scaled_norm(y, self.weight, self.eps)


class Experts(RoutedExperts):
    """The routed experts, each output normed, combined.

    (z [N, P], weights [N, K] fp32, experts [N, K] int64) -> [N, P]. Ranks split the inner width, so
    outputs are summed over them before the norm.
    """

    region = "normed_experts"

    def __init__(self, config: MuseSparkConfig) -> None:
        c = config
        sizes = c.experts, c.expert_width, c.expert_ff, c.dtype
        super().__init__(*sizes, RoundedSwiGLU(), c.gather_limit)
        self.rank_sum = RankSum()
        self.post_expert_norm = OutputNorm(c)
        self.combine = Combine(1.0)

    def forward(self, z: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        y = self.post_expert_norm(self.rank_sum(self.each(z, experts)))
        return self.combine(y, weights)


class Unpooler(Linear):
    """(y [N, P / R]) -> [N, D], the rank's part of the sum."""

    region = "unpooler"


class LatentMoE(nn.Module):
    region = "latent_moe"

    def __init__(self, config: MuseSparkConfig) -> None:
        super().__init__()
        c = config
        self.part, self.expert_part = c.hidden // c.tp, c.expert_width // c.tp
        self.rank = c.rank
        self.gate = Router(c)
        self.pre_expert_proj = Linear(self.part, c.expert_width, c.dtype)
        self.pre_expert_norm = CentredNorm(c.expert_width, c.eps, c.dtype)
        self.pool = Pooler(c.eps)
        self.experts = Experts(c)
        self.post_expert_proj = Unpooler(self.expert_part, c.hidden, c.dtype)
        self.rank_sum = RankSum()

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]; of pooler and unpooler a rank serves its part of the inputs."""
        rows = x.flatten(0, 1)
        weights, experts = self.gate(rows)
        pooler = self.pre_expert_proj.weight, self.pre_expert_norm.weight
        z = self.pool(rows.narrow(1, self.rank * self.part, self.part), *pooler)
        y = self.experts(z, weights, experts)
        y = y.narrow(1, self.rank * self.expert_part, self.expert_part)
        return self.rank_sum(self.post_expert_proj(y)).view_as(x)
