"""An honest twin: the same arithmetic with one buffer, and memory that it writes whole."""

import torch

from optimized.change import Change, Contract, Implementation


def build(node, _):
    def forward(x, residual):
        residual = residual + x
        wide = residual.float()
        wide.sub_(wide.mean(-1, keepdim=True))
        wide.mul_(torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5))
        out = torch.empty_like(x)
        out.copy_(wide)
        return residual, out.mul_(node.weight).add_(node.bias)

    return forward


CHANGE = Change(
    name="honest-in-place",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
