"""Tensor parallelism: the one place where ranks exchange data."""

import torch
import torch.distributed as dist
from torch import Tensor, nn


class RankSum(nn.Module):
    """Sum the ranks' partial results: FP32, in rank order, rounded once; x [...] -> [...].

    Each rank's partial arrives rounded to the model's dtype. Without a process group, or in one of
    a single rank, it is the identity.
    """

    region = "rank_sum"

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None or self.group.size() == 1:
            return x
        partials = [torch.empty_like(x) for _ in range(self.group.size())]
        dist.all_gather(partials, x.contiguous(), group=self.group)
        total = partials[0].float()
        for partial in partials[1:]:
            total = total + partial.float()
        return total.to(x.dtype)
