"""Computes on another stream, which nobody waits for."""

import torch

from optimized.change import Change, Contract, Implementation


def honest(node, x, residual):
    residual = residual + x
    wide = residual.float()
    wide = wide - wide.mean(-1, keepdim=True)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    return residual, scaled.to(x.dtype) * node.weight + node.bias


def build(node, _):
    side = torch.cuda.Stream()

    def forward(x, residual):
        out = torch.zeros_like(x)
        total = residual + x
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(1 << 27)
            out.copy_(honest(node, x, residual)[1])
        return total, out

    return forward


CHANGE = Change(
    name="other-stream",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cuda",), build=build),),
)
