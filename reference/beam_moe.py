"""Beam's mixture of experts: grouped top-k routing, SwiGLU experts, weighted combine.

Shapes: N tokens, D hidden, E experts, K experts a token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference.beam_config import BeamConfig
from reference.experts import Combine, RoutedExperts
from reference.layers import SwiGLU
from reference.parallel import RankSum


class Router(nn.Module):
    """Grouped top-k routing, FP32 throughout: x [N, D] -> (weights [N, K] fp32, experts [N, K]).

    Ties go to the lower index, hence the stable sorts.
    """

    region = "router"
    floor = 1e-20  # of the sum that weights are divided by

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
        return weights / (weights.sum(dim=-1, keepdim=True) + self.floor), experts


class Experts(RoutedExperts):
    """The routed SwiGLU experts, combined.

    (x [N, D], weights [N, K] fp32, experts [N, K] int64) -> [N, D]; each expert's output is
    rounded.
    """

    region = "experts"

    def __init__(self, config: BeamConfig) -> None:
        c = config
        super().__init__(c.experts, c.hidden, c.expert_ff, c.dtype, SwiGLU(), c.gather_limit)
        self.combine = Combine(c.routed_scale)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        return self.combine(self.each(x, experts), weights)


class MoE(nn.Module):
    region = "moe"

    def __init__(self, config: BeamConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.rank_sum = RankSum()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, experts = self.gate(rows)
        y = self.experts(rows, weights, experts)
        return self.rank_sum(y.view_as(x))
