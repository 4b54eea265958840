"""What the equations give in FP64."""

import torch
from torch import Tensor


def attention_fp64(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    share = q.shape[2] // k.shape[2]
    wide_k, wide_v = (y.double().repeat_interleave(share, dim=2) for y in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q.double(), wide_k) * scale
    weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(dim=-1)
    return torch.einsum("bhts,bshd->bthd", weights, wide_v)
