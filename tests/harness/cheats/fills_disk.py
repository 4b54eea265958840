"""Writes to its folder until the disk is full. Raises OSError."""

import itertools

from optimized.change import Change, Contract, Implementation


def build(node, _):
    def forward(x, residual):
        for number in itertools.count():
            with open(f"filler-{number}", "wb") as file:
                for _ in range(64):
                    file.write(bytes(1 << 20))

    return forward


CHANGE = Change(
    name="fills-disk",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
