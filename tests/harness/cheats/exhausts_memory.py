"""Takes memory until there is none. Raises RuntimeError. Raises MemoryError."""

import torch

from optimized.change import Change, Contract, Implementation


def build(node, _):
    held = []

    def forward(x, residual):
        while True:
            held.append(torch.ones(1 << 26))

    return forward


CHANGE = Change(
    name="exhausts-memory",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
