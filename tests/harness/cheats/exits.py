"""Ends the process with status 0, as if all had gone well."""

import os

from optimized.change import Change, Contract, Implementation


def build(node, _):
    def forward(x, residual):
        os._exit(0)

    return forward


CHANGE = Change(
    name="exits",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
