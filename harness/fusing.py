"""Fused multiply-adds: a*b + c with one rounding instead of two, in FP32.

Compilers contract FP32 products and sums unless told not to, and that changes bits that reach BF16.
The FP64 product of two FP32 values is exact, so the sum in FP64, rounded to FP32, is the FMA.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.carried import Carried
from harness.replay import Plan


def remember(product: Any, args: tuple[Any, ...], plan: Plan) -> None:
    """Keep the factors of an FP32 product that no rounding followed."""
    if isinstance(product, Carried) and product.dtype == torch.float32:
        factors = [_wide(a, plan) for a in args[:2]]
        product.box.product = factors[0], factors[1]


def sums(
    called: str, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan
) -> list[Callable[[], Tensor]]:
    """For each operand of a sum that is such a product, how to compute the sum as an FMA."""
    if called not in ("add", "sub") or not (plan.name or plan.fuse) or kwargs.get("alpha", 1) != 1:
        return []
    found = []
    for i, operand in enumerate(args[:2]):
        if not isinstance(operand, Carried) or operand.box.product is None:
            continue
        found.append(_fma(operand, args[1 - i], i, called, plan))
    return found


def _fma(operand: Carried, other: Any, place: int, called: str, plan: Plan) -> Callable[[], Tensor]:
    def compute() -> Tensor:
        product, rest = _exact(operand), _wide(other, plan)
        rest = rest.double() if isinstance(rest, Tensor) else rest
        if called == "add":
            return (product + rest).float()
        return (product - rest if place == 0 else rest - product).float()

    return compute


def _exact(operand: Carried) -> Tensor:
    """The FP64 product that the operand, a product or part of one, was rounded from."""
    assert operand.box.product is not None
    a, b = (f.double() if isinstance(f, Tensor) else f for f in operand.box.product)
    root, value = operand.box.root, operand.value
    product = torch.empty_strided(
        root.shape, root.stride(), dtype=torch.float64, device=root.device
    ).copy_(torch.as_tensor(a * b))
    return product.as_strided(value.shape, value.stride(), value.storage_offset())


def _wide(value: Any, plan: Plan) -> Any:
    """A factor as FP32 arithmetic sees it."""
    if isinstance(value, Carried):
        return value.value.to(plan.wide(value.dtype))
    if isinstance(value, (int, float)):
        return float(torch.tensor(value, dtype=torch.float32))
    return value
