"""Layers that transformer models share; FP32 inside, rounded once, to the tensors' dtype."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension: FP32 inside, rounded once."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension: FP32 inside, rounded once."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def centred_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * (1 + weight): the factor is rounded to the weight's dtype, the rest once."""
    return rms_norm(x, 1 + weight, eps)


def input_scaled_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of x * (1 + weight): factor, product and result are rounded."""
    scaled = x.float() * (1 + weight).float()
    return unit_norm(scaled.to(x.dtype), eps)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class CentredNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return centred_norm(x, self.weight, self.eps)


class Linear(nn.Module):
    """y = x W^T, weight [out, in], no bias."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class ParallelProjection(nn.Module):
    """Several projections of one input: (x [B, T, D], weights [Oi, D]...) -> tuple of [B, T, Oi].

    `names` are the siblings that own the weights, in the order in which they are passed.
    """

    region = "parallel_projection"

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names

    def forward(self, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.linear(x, weight) for weight in weights)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head's halves, x [B, T, H, d], by cos, sin [B, T, d / 2]: FP32, rounded once."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def rope_in_dtype(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Like `rope`, with tables in x's dtype and all four products and both sums rounded to it."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class SwiGLU(nn.Module):
    """silu(gate) * up: FP32 inside, rounded once; (gate [..., F], up [..., F]) -> [..., F]."""

    region = "swiglu"

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return (F.silu(gate.float()) * up.float()).to(gate.dtype)


class RoundedSwiGLU(nn.Module):
    """silu(gate) * up, both rounded; (gate [..., F], up [..., F]) -> [..., F]."""

    region = "rounded_swiglu"

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up
