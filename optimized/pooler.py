"""A projection, summed over tensor-parallel ranks, and the centred norm of its rows.

    y = R(x W^T), summed over ranks
    z = R(y / rms(y) * R(1 + w))

x [N, D], W [P, D], w [P] BF16; FP32 sums. Of up to 16 rows the product is `gemv`'s, of more the
library's; the norm needs whole rows, which many programs make, so it is a kernel of its own
(`row_norm`). All rounding points are kept; none is added. The weight is nearly all the traffic of a
few rows: 8.4 MB or 1.9 us at an H200's 4.33 TB/s (2026-11-29) for 4096 x 1024.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from optimized import gemv
from optimized.change import Change, Contract, Implementation
from optimized.gemv import GemvKnobs
from optimized.inductor import inductor_implementation
from optimized.row_norm import outside_norm, row_norm
from optimized.triton_support import outside_domain


def guard(node: Any, x: Tensor, weight: Tensor, norm_weight: Tensor) -> str | None:
    """Why the kernels do not take this call, or None."""
    if not weight.is_contiguous() or weight.shape[1] != x.shape[-1]:
        return f"weight {tuple(weight.shape)} is no contiguous one for x {tuple(x.shape)}"
    few = x.numel() <= gemv.MAX_ROWS * x.shape[-1]
    outside = (gemv.outside_rows(x) if few else None) or outside_norm(len(weight), norm_weight)
    return outside or outside_domain(x=x, weight=weight, norm_weight=norm_weight)


def shape(node: Any, x: Tensor, weight: Tensor, norm_weight: Tensor) -> dict[str, int]:
    """M rows, O outputs, D inputs of the product."""
    return gemv.sizes(x, weight.shape[0])


def build(node: Any, knobs: GemvKnobs | None):
    """(x [N, D], weight [P, D], norm_weight [P]) -> [N, P], BF16."""
    gemv.check(knobs)

    def forward(x: Tensor, weight: Tensor, norm_weight: Tensor) -> Tensor:
        if x.numel() <= gemv.MAX_ROWS * x.shape[-1]:
            y = gemv.multiply(x, weight, knobs)
        else:
            y = F.linear(x, weight)
        return row_norm(node.rank_sum(y), norm_weight, node.eps, "centred")

    return forward


CHANGE = Change(
    name="pooler",
    region="pooler",
    summary="projection of a few rows by a kernel made for them, and its norm in one kernel",
    contract=Contract(numerics="reduction"),
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build,
            guard=guard,
            knobs=GemvKnobs,
            shape=shape,
        ),
        inductor_implementation(),
    ),
)
