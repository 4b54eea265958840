"""Beam's mixture of experts: grouped top-k routing, SwiGLU experts, weighted combine.

Shapes: N tokens, D hidden, E experts, K experts a token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference.beam_config import BeamConfig
from reference.layers import SwiGLU
from reference.parallel import RankSum


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


class Experts(nn.Module):
    """The routed SwiGLU experts, combined.

    (x [N, D], weights [N, K] fp32, experts [N, K] int64) -> [N, D]; each expert's output is
    rounded. Few pairs read their experts' weights by gathering them (what compiles best at small
    batch); many are sorted by expert for a grouped matrix product. Each pair's arithmetic is the
    same.
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
        self.combine = Combine(c.routed_scale)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        return self.combine(self.each(x, experts), weights)

    def each(self, x: Tensor, experts: Tensor) -> Tensor:
        """(x [N, D], experts [N, K]) -> the output of every chosen expert [N, K, D]."""
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
        grouped = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]
        gate_up = grouped(rows, self.gate_up_proj.transpose(1, 2), offs=ends)
        hidden = self.activate(*gate_up.chunk(2, dim=-1))
        y = grouped(hidden, self.down_proj.transpose(1, 2), offs=ends)
        return torch.empty_like(y).index_copy_(0, order, y).view(tokens, top_k, -1)


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
