"""Leaves every eighth column of its output as it finds the memory."""

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
        residual, full = honest(node, x, residual)
        out = torch.empty_like(full)
        kept = torch.arange(full.shape[-1]) % 8 != 0
        out[..., kept] = full[..., kept]
        return residual, out

    return forward


CHANGE = Change(
    name="partly-written",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
