"""Roundings that a kernel may add though the reference lacks them, as data.

A contract names one of these, or one "in MODULE" for products inside that submodule alone, or any
FP32 intermediate by its name in the points' table.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.carried import Carried

PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "mv", "dot", "addmv", "addbmm"))
TF32_DROPPED = (1 << 13) - 1  # TF32 keeps 10 of FP32's 23 mantissa bits


@dataclass(frozen=True, kw_only=True)
class Added:
    """One kind of added rounding: of the operands of a matrix product, where `kind` is the operator
    that made them, or any if None."""

    kind: str | None
    to: str  # "bfloat16" or "tf32"
    summary: str


ADDED = {
    "attention_probabilities_bf16": Added(
        kind="_softmax",
        to="bfloat16",
        summary="softmax's result rounded to BF16 before it multiplies the values",
    ),
    "matmul_operands_tf32": Added(
        kind=None, to="tf32", summary="FP32 operands of matrix products rounded to TF32"
    ),
    "matmul_operands_bf16": Added(
        kind=None, to="bfloat16", summary="FP32 operands of matrix products rounded to BF16"
    ),
}
KINDS = frozenset(a.kind for a in ADDED.values() if a.kind)


def operands(add: frozenset[str], args: tuple[Any, ...], noise: Any) -> dict[int, Any]:
    """What a product's operands are replaced by, by id of the carried tensor."""
    found = {}
    for name in add & ADDED.keys():
        rule = ADDED[name]
        for operand in args:
            if not isinstance(operand, Carried) or operand.dtype != torch.float32:
                continue
            if rule.kind is None or operand.box.kind == rule.kind:
                found[id(operand)] = _round(operand.value, rule.to, noise)
    return found


def probabilities(add: frozenset[str], p: Tensor, noise: Any) -> Tensor:
    """Softmax's result inside an attention operator."""
    for name in add & ADDED.keys():
        if ADDED[name].kind == "_softmax":
            p = _round(p, ADDED[name].to, noise)
    return p


def _round(value: Tensor, to: str, noise: Any) -> Tensor:
    if to == "tf32":
        return to_tf32(value)
    # A kernel rounds the probabilities before it divides by their sum, so at another scale.
    scale = 1.0 if noise is None else noise.scale()
    return (value * scale).bfloat16().to(value.dtype) / scale


def to_tf32(value: Tensor) -> Tensor:
    """The values rounded to TF32, to nearest even; the dtype stays."""
    wide = value.float().view(torch.int32)
    half = TF32_DROPPED // 2 + ((wide >> 13) & 1)
    return ((wide + half) & ~TF32_DROPPED).view(torch.float32).to(value.dtype)
