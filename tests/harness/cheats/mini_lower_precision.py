"""Multiplies before it widens, in BF16, in a model that ships. Against beam mini."""

import torch.nn.functional as F

from optimized.change import Change, Contract, Implementation


def build(node, _):
    def forward(gate, up):
        return F.silu(gate) * up

    return forward


CHANGE = Change(
    name="mini-lower-precision",
    region="swiglu",
    summary="silu and the product, each in BF16",
    contract=Contract(numerics="transcendental"),
    implementations=(Implementation(backend="torch", devices=("cpu", "cuda"), build=build),),
)
