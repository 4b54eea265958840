"""Makes the card fail with an access to memory that is nobody's. Raises AcceleratorError."""

import torch

from optimized.change import Change, Contract, Implementation


def build(node, _):
    def forward(x, residual):
        far = torch.full(x.shape[:-1], 1 << 40, device=x.device)
        return residual + x, node.weight[far][..., None] + torch.zeros_like(x)

    return forward


CHANGE = Change(
    name="card-fault",
    region="add_norm",
    summary="adds and normalises in one pass",
    contract=Contract(numerics="reduction"),
    implementations=(Implementation(backend="torch", devices=("cuda",), build=build),),
)
