"""Replaces torch.cuda.synchronize, so that nobody waits for its work."""

import torch

from optimized.change import Change, Contract, Implementation


def honest(node, x, residual):
    residual = residual + x
    wide = residual.float()
    wide = wide - wide.mean(-1, keepdim=True)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    return residual, scaled.to(x.dtype) * node.weight + node.bias


def build(node, _):
    torch.cuda.synchronize = lambda *_: None

    def forward(x, residual):
        torch.cuda._sleep(1 << 27)
        return honest(node, x, residual)

    return forward


CHANGE = Change(
    name="patches-synchronize",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cuda",), build=build),),
)
