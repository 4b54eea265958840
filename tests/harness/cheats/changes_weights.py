"""Changes the weights in place, for the reference too."""

import torch

from optimized.change import Change, Contract, Implementation


def build(node, _):
    def forward(x, residual):
        node.weight.zero_()
        node.bias.zero_()
        return residual + x, torch.zeros_like(x)

    return forward


CHANGE = Change(
    name="changes-weights",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
