"""Returns zeros."""

import torch

from optimized.change import Change, Contract, Implementation


def build(node, _):
    def forward(x, residual):
        return torch.zeros_like(residual), torch.zeros_like(x)

    return forward


CHANGE = Change(
    name="returns-zeros",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
