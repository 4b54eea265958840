"""A projection of a few rows by a kernel made for them, more by the library.

    y = R(x W^T)

x [..., D], W [O, D], BF16; FP32 accumulation, one rounding. Serves what no sibling shares its input
with: output and down projections, the LM head (18992 x 5120 on a TP8 rank: 194 MB, 45 us at least
on an H200). "triton" takes up to 16 rows (`optimized.gemv`), "inductor" one row on a CPU
(`optimized.matvec`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized import gemv, matvec
from optimized.change import Change, Contract, Implementation
from optimized.gemv import GemvKnobs
from optimized.triton_support import outside_domain


def guard(node: Any, x: Tensor) -> str | None:
    """Why the kernel cannot serve this call, or None."""
    if torch.compiler.is_compiling() or x.numel() > gemv.MAX_ROWS * x.shape[-1]:
        return None
    if not node.weight.is_contiguous():
        return f"weight has strides {node.weight.stride()}, the kernel takes contiguous ones"
    return outside_domain(x=x, weight=node.weight) or gemv.outside_rows(x)


def shape(node: Any, x: Tensor) -> dict[str, int]:
    """M rows, O outputs, D inputs."""
    return gemv.sizes(x, node.weight.shape[0])


def build(node: Any, knobs: GemvKnobs | None):
    """x [..., D] -> [..., O]."""
    gemv.check(knobs)

    def forward(x: Tensor) -> Tensor:
        few = x.numel() <= gemv.MAX_ROWS * x.shape[-1]
        if few and not torch.compiler.is_compiling():
            return gemv.multiply(x, node.weight, knobs)
        return F.linear(x, node.weight)

    return forward


def build_inductor(node: Any, knobs: Any):
    """x [..., D] -> [..., O]."""
    products = matvec.row_products()

    def forward(x: Tensor) -> Tensor:
        if matvec.is_row(x) and not torch.compiler.is_compiling():
            return products(x, node.weight)[0]
        return F.linear(x, node.weight)

    return forward


CHANGE = Change(
    name="linear_decode",
    region="linear",
    summary="projections of a few rows by a kernel that keeps more loads in flight",
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
        Implementation(backend="inductor", devices=("cpu",), build=build_inductor),
    ),
)
