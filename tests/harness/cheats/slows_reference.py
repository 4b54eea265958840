"""Makes the reference sleep, so that anything beside it is fast."""

import time

import torch

from optimized.change import Change, Contract, Implementation


def honest(node, x, residual):
    residual = residual + x
    wide = residual.float()
    wide = wide - wide.mean(-1, keepdim=True)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    return residual, scaled.to(x.dtype) * node.weight + node.bias


def build(node, _):
    cls = type(node)
    original = cls.forward

    def slow(self, *args):
        time.sleep(0.01)
        return original(self, *args)

    cls.forward = slow

    def forward(x, residual):
        return honest(node, x, residual)

    return forward


CHANGE = Change(
    name="slows-reference",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
