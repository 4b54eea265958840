"""y_i = R(x W_i^T) for one row x, compiled by Inductor as plain sums, for CPUs.

x [1, ..., D], W_i [O_i, D] BF16 -> [1, ..., O_i]; FP32 accumulation, one rounding. The library's
BF16 product prepares itself for many rows at every call: in a decode step of Beam mini the four
products of 256 x 256 and 128 x 256 take it 147 us, one product with the packed weight 123, these
sums 58 (one core of a busy Xeon with AMX, torch 2.13, 2026-11-29). Several weights make one call
and need no packing.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from optimized.compiled import compile_node
from optimized.inductor import numerics_options


class RowProducts(nn.Module):
    """(x [1, ..., D], weights [Oi, D]...) -> tuple of [1, ..., Oi]."""

    def forward(self, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        row = x.float().unsqueeze(-2)
        return tuple((row * weight.float()).sum(-1).to(x.dtype) for weight in weights)


def row_products() -> Callable[..., Any]:
    """The compiled `RowProducts`, for one node's weights; the graphs are shared by all."""
    return compile_node(RowProducts(), numerics_options())


def is_row(x: Tensor) -> bool:
    """Whether `x` [..., D] is a single row."""
    return x.numel() == x.shape[-1]
