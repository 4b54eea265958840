"""RMSNorm of whole rows in one kernel, `optimized.row_norm`'s: a model's first norm.

    y = R(x / rms(x) * w)

R rounds to BF16; all else is FP32. x [..., D] -> [..., D], BF16. Moves 2 D BF16 values a row. There
is no interior rounding point, and none is added.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from optimized.change import Change, Contract, Implementation
from optimized.inductor import inductor_implementation
from optimized.row_norm import RowNormKnobs, outside_norm, row_norm
from optimized.triton_support import outside_domain, row_stride


def shape(node: Any, x: Tensor) -> Mapping[str, int]:
    """N rows and D values a row of a call."""
    return {"N": x.numel() // max(1, x.shape[-1]), "D": x.shape[-1]}


def guard(node: Any, x: Tensor) -> str | None:
    """Why the kernel does not take this call, or None."""
    if row_stride(x) is None:
        return f"x has strides {x.stride()}, the kernel takes evenly spaced rows"
    return outside_norm(x.shape[-1], node.weight) or outside_domain(x=x, weight=node.weight)


def norm_change(name: str, region: str, kind: str) -> Change:
    """Of nodes (x [..., D] BF16 -> [..., D] BF16) with a `weight` [D] and an `eps`, by a kind of
    norm that `row_norm` names."""

    def build(node: Any, knobs: RowNormKnobs | None):
        return lambda x: row_norm(x, node.weight, node.eps, kind, knobs)

    return Change(
        name=name,
        region=region,
        summary="a norm that is no part of a boundary in one kernel",
        contract=Contract(numerics="reduction", batch_invariant=True),
        implementations=(
            Implementation(
                backend="triton",
                devices=("cuda",),
                build=build,
                guard=guard,
                knobs=RowNormKnobs,
                shape=shape,
            ),
            inductor_implementation(),
        ),
    )


CHANGE = norm_change("rms_norm", "rmsnorm", "weighted")
