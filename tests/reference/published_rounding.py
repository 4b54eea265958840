"""The published implementation's roundings where they differ from the specification's, as modules
that stand in for the reference's own. There are two such places, and no more.

(a) The combine: each weighted expert output is rounded, they are added in BF16 in ascending expert
    order, and 2.5 is multiplied in BF16 after that.
(b) The interior of attention: scores, scaled scores, masked scores and probabilities are rounded.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference.beam import Attend, Beam, MoE
from tests.reference.layerwise import force


class PublishedMoE(nn.Module):
    """`moe` with its combine as in (a)."""

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.gate, self.experts, self.scale = moe.gate, moe.experts, moe.experts.combine.scale

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, experts = self.gate(rows)
        y = (self.experts.each(rows, experts) * weights[..., None]).to(x.dtype)
        order = experts.argsort(dim=-1)[..., None].expand_as(y)
        total = torch.zeros_like(rows)
        for term in y.gather(1, order).unbind(dim=1):
            total = total + term
        return (total * self.scale).view_as(x)


class PublishedAttend(Attend):
    """Attention with its interior as in (b); the arguments are the reference's."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for y in (k, v))
        scores = q @ k.transpose(2, 3) * self.scale
        lowest = torch.finfo(q.dtype).min
        scores = scores + torch.zeros_like(scores).masked_fill(~mask[:, None], lowest)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return (weights @ v).transpose(1, 2)


def as_published(model: Beam, *, combine: bool = True, attention: bool = True) -> Beam:
    """A copy of `model` with the published roundings, and routers that must be forced."""
    other = force(model)
    for layer in other.model.layers:
        if attention:
            layer.self_attn.attend = PublishedAttend(layer.self_attn.attend.scale)
        if combine and isinstance(layer.mlp, MoE):
            layer.mlp = PublishedMoE(layer.mlp)
    return other
