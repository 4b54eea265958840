"""Works while a profiler looks, and returns zeros otherwise."""

import sys

import torch

from optimized.change import Change, Contract, Implementation


def honest(node, x, residual):
    residual = residual + x
    wide = residual.float()
    wide = wide - wide.mean(-1, keepdim=True)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    return residual, scaled.to(x.dtype) * node.weight + node.bias


def build(node, _):
    def forward(x, residual):
        if sys.getprofile() is not None or torch._C._autograd._profiler_enabled():
            return honest(node, x, residual)
        return torch.zeros_like(residual), torch.zeros_like(x)

    return forward


CHANGE = Change(
    name="skips-when-profiled",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
