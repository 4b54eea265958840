"""Ends the process with status 0 when it is imported."""

import os

from optimized.change import Change, Contract, Implementation

os._exit(0)


def build(node, _):
    return None


CHANGE = Change(
    name="exits-on-import",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
