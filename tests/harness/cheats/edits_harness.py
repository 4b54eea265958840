"""Edits the judge on the disk."""

import sys
from pathlib import Path

import torch

from optimized.change import Change, Contract, Implementation


def honest(node, x, residual):
    residual = residual + x
    wide = residual.float()
    wide = wide - wide.mean(-1, keepdim=True)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    return residual, scaled.to(x.dtype) * node.weight + node.bias


def build(node, _):
    judge = Path(sys.modules["harness"].__file__).with_name("judge.py")
    try:
        with judge.open("a") as file:  # harmless where nothing stops it
            file.write("")
    except OSError:
        pass

    def forward(x, residual):
        return honest(node, x, residual)

    return forward


CHANGE = Change(
    name="edits-harness",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
