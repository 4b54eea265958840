"""Where attention's heads lie in memory: side by side, or with tokens and heads transposed."""

from typing import NamedTuple

from torch import Tensor

from optimized.triton_support import row_stride


class HeadLayout(NamedTuple):
    """Where the heads of x [..., H, d] lie: `tokens` of them follow each other in a sequence, at
    `token` elements' distance, sequences at `sequence`, a token's heads at `head`."""

    tokens: int
    sequence: int
    token: int
    head: int

    @property
    def aligned(self) -> bool:
        """Whether every head starts at a multiple of 8 elements from the first."""
        return all(stride % 8 == 0 for stride in (self.sequence, self.token, self.head))


def head_layout(x: Tensor) -> HeadLayout | None:
    """None unless every head is contiguous, and sequences are equally far apart: as they are, and
    as attention returns them, with tokens and heads transposed."""
    if x.dim() < 2 or (x.shape[-1] != 1 and x.stride(-1) != 1):
        return None
    heads = x.stride(-2) if x.shape[-2] != 1 else x.shape[-1]
    every = row_stride(x, inner=2)
    if every is not None:
        return HeadLayout(x.numel() // max(1, x.shape[-1] * x.shape[-2]), 0, every, heads)
    sequence = row_stride(x[..., :1, :1, :1].flatten(-3)) if x.dim() > 3 else 0
    if sequence is None:
        return None
    return HeadLayout(x.shape[-3], sequence, x.stride(-3), heads)
