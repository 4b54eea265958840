"""Jumps to address 0."""

import ctypes

from optimized.change import Change, Contract, Implementation


def build(node, _):
    def forward(x, residual):
        return ctypes.CFUNCTYPE(ctypes.c_int)(0)()

    return forward


CHANGE = Change(
    name="crashes",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
