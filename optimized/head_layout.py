"""Where attention's heads lie in memory: side by side, or with tokens and heads transposed."""

from typing import NamedTuple

from torch import Tensor

from optimized.triton_support import row_stride


class HeadLayout(NamedTuple):
    """Strides of x [..., T, H, d], in elements: from one sequence of T = `tokens` tokens, from one
    token and from one head to the next. Evenly spaced tokens are one sequence."""

    tokens: int
    sequence: int
    token: int
    head: int

    @property
    def aligned(self) -> bool:
        """Whether every head starts at a multiple of 8 elements from the first."""
        return all(stride % 8 == 0 for stride in (self.sequence, self.token, self.head))


def head_layout(x: Tensor) -> HeadLayout | None:
    """The layout of x [..., H, d] or [..., T, H, d]. None where a head's values do not lie side by
    side, or sequences are not equally far apart; tokens and heads may be transposed."""
    if x.dim() < 2 or (x.shape[-1] != 1 and x.stride(-1) != 1):
        return None
    heads = x.stride(-2) if x.shape[-2] != 1 else x.shape[-1]
    every = row_stride(x, inner=2)
    if every is not None:
        return HeadLayout(x.numel() // max(1, x.shape[-1] * x.shape[-2]), 0, every, heads)
    if x.dim() < 3:
        return None
    one = x[..., :1, :1, :1].flatten(-3)
    sequence = row_stride(one) if one.numel() > 1 else 0
    return None if sequence is None else HeadLayout(x.shape[-3], sequence, x.stride(-3), heads)
