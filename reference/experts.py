"""Routed experts that mixture-of-experts models share: dispatch and the weighted sum.

Shapes: N tokens, D width of an expert's input and output, F its inner width, E experts, K experts a
token.
"""

import torch
from torch import Tensor, nn


class Combine(nn.Module):
    """sum_k weight_k * y_k in slot order, times a scale: FP32, rounded once.

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
        if self.scale != 1.0:
            total = total * self.scale
        return total.to(y.dtype)


class RoutedExperts(nn.Module):
    """Gated experts: down_e(activate(gate_e x, up_e x)), each product rounded.

    Few pairs read their experts' weights by gathering them (what compiles best at small batch);
    many are sorted by expert for a grouped matrix product. Each pair's arithmetic is the same.
    """

    def __init__(
        self,
        experts: int,
        width: int,
        inner: int,
        dtype: torch.dtype,
        activate: nn.Module,
        gather_limit: int,
    ) -> None:
        super().__init__()
        self.gather_limit = gather_limit
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, width, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(experts, width, inner, dtype=dtype))
        self.activate = activate

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
