"""Precision lost, or gained, at one operator: alterations, each offered where it changes a bit.

Other orders of summation in FP32 are missing on purpose: they are the reference's own noise.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness import operators, substitutes
from harness.added import to_tf32
from harness.mutate import Alteration, Altered, Call, storage
from harness.mutations import Found, float_result, in_bf16
from harness.operators import LOW

PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # where the left operand stands
REORDERED = "sum reordered"  # a mutant only where results are to be exact
PIECES = 2, 16  # partial sums, each rounded to BF16


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


def rounded_operands(call: Call) -> Found:
    """FP32 operands of matrix products in TF32 or BF16, of sums and other products in BF16."""
    called = call.key.called
    first = PRODUCTS.get(called, 0)
    if called not in PRODUCTS and called not in ("mul", "add", "sub", "div"):
        return
    if not float_result(call) or call.result.dtype != torch.float32:
        return
    kinds: dict[str, Callable[[Any], Any]] = {"operands in BF16": in_bf16}
    if called in PRODUCTS:
        kinds["operands in TF32"] = in_tf32
    operands = call.args[first : first + 2]
    for kind, low in kinds.items():
        if all(_same(low(x), x) for x in operands if isinstance(x, Tensor)):
            continue

        def alter(run: Altered, func: Any, args: Any, kwargs: Any, low: Any = low) -> Any:
            pair = [low(x) if isinstance(x, Tensor) else x for x in args[first : first + 2]]
            return func(*args[:first], *pair, *args[first + 2 :], **kwargs)

        yield kind, "before the product" if "mm" in called else f"before the {called}", alter


def in_tf32(x: Any) -> Any:
    return to_tf32(x) if isinstance(x, Tensor) and x.dtype == torch.float32 else x


def rounded_result(call: Call) -> Found:
    """An FP32 intermediate rounded to BF16, unless the next thing done to it is just that."""
    if not float_result(call) or call.result.dtype != torch.float32 or _passes(call):
        return
    if _same(in_bf16(call.result), call.result):
        return
    if _rounded_next(call):
        return
    yield (
        "rounding added",
        f"result of {call.key.called} in BF16",
        lambda run, func, args, kwargs: in_bf16(func(*args, **kwargs)),
    )


def _rounded_next(call: Call) -> bool:
    """Whether all that becomes of the result, beside being moved, is a rounding."""
    ends = []
    for user in call.users:
        if operators.is_view(user.func):
            continue  # who uses the view is a user, too
        converts = user.key.called == "_to_copy" and isinstance(user.result, Tensor)
        moves = operators.is_move(user.func, user.args, user.kwargs)
        low = converts and user.result.dtype in LOW
        ends.append(low or (moves and _rounded_next(user)))
    return bool(ends) and all(ends)


def fused(call: Call) -> Found:
    """A product and its sum with one rounding."""
    if call.key.called not in ("add", "sub") or not float_result(call):
        return
    if call.result.dtype != torch.float32 or call.kwargs.get("alpha", 1) != 1:
        return
    for i, operand in enumerate(call.args[:2]):
        if not isinstance(operand, Tensor) or operand.dtype != torch.float32:
            continue
        if not any(
            m.key.called == "mul" and storage(m.result) == storage(operand) for m in call.makers
        ):
            continue

        def alter(run: Altered, func: Any, args: Any, kwargs: Any, i: int = i) -> Any:
            other = args[1 - i]
            wide = other.double() if isinstance(other, Tensor) else float(torch.tensor(other))
            pair = [run.exact_product(args[i]), wide]
            return func(*(pair if i == 0 else pair[::-1]), **kwargs).float()

        yield "multiply-add fused", f"operand {i + 1} with its product", alter


def accumulation(call: Call) -> Found:
    """Sums whose partial sums are held in BF16."""
    called = call.key.called
    if not float_result(call):
        return
    for pieces in PIECES:
        kind = "BF16 accumulation" if pieces > 2 else "BF16 partial sums"
        if called in ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm"):
            if call.args[PRODUCTS.get(called, 0)].shape[-1] >= 2 * pieces:
                yield kind, f"{pieces} parts of the inner dimension", _product_in_pieces(pieces)
        elif called in ("sum", "mean") and len(call.args) > 1 and len(call.args[1] or ()) == 1:
            if call.args[0].shape[call.args[1][0]] >= 2 * pieces:
                yield kind, f"{pieces} parts", _sum_in_pieces(pieces)


def reordered(call: Call) -> Found:
    """A sum in another order, in FP32: wrong where a contract promises the reference's order."""
    called = call.key.called
    if called in ("sum", "mean") and len(call.args) > 1 and len(call.args[1] or ()) == 1:
        if call.args[0].shape[call.args[1][0]] > 2:
            yield (
                REORDERED,
                "terms in reverse",
                lambda run, func, args, kwargs: func(args[0].flip(args[1][0]), *args[1:], **kwargs),
            )
    parts = call.result if called == "unbind" else ()
    if len(parts) > 2 and call.users and all(u.key.called == "add" for u in call.users):
        yield (
            REORDERED,
            "terms in reverse",
            lambda run, func, args, kwargs: list(func(*args, **kwargs))[::-1],
        )


def _product_in_pieces(pieces: int) -> Alteration:
    def product(a: Tensor, b: Tensor) -> Tensor:
        parts = a.tensor_split(pieces, dim=-1), b.tensor_split(pieces, dim=-2)
        total: Any = 0.0
        for x, y in reversed(list(zip(*parts, strict=True))):
            total = (total + (x.float() @ y.float())).bfloat16().float()
        return total

    def alter(run: Altered, func: Any, args: Any, kwargs: Any) -> Any:
        called = operators.name(func)
        given = substitutes.keywords(func, args, kwargs)
        if called == "_grouped_mm":
            a, b, offs = given["self"], given["mat2"], given["offs"]
            return substitutes.grouped_mm(a, b, offs, product, torch.float32).to(a.dtype)
        first = PRODUCTS[called]
        total = product(args[first], args[first + 1])
        if first:
            total = total * given["alpha"] + args[0].float() * given["beta"]
        return total.to(args[first].dtype)

    return alter


def _sum_in_pieces(pieces: int) -> Alteration:
    def alter(run: Altered, func: Any, args: Any, kwargs: Any) -> Any:
        right, dim = func(*args, **kwargs), args[1][0]
        keepdim = len(args) > 2 and args[2]
        total: Any = 0.0
        for part in reversed(args[0].float().tensor_split(pieces, dim=dim)):
            total = (total + part.sum(dim, keepdim=keepdim)).bfloat16().float()
        if operators.name(func) == "mean":
            total = total / args[0].shape[dim]
        return total.to(right.dtype)

    return alter


def _passes(call: Call) -> bool:
    """Whether the operator computes nothing: a view, a copy, a conversion, a new tensor."""
    return (
        operators.is_view(call.func)
        or operators.is_move(call.func, call.args, call.kwargs)
        or call.key.called == "_to_copy"
        or call.key.called in operators.FACTORIES
    )


PRECISION: tuple[Callable[[Call], Found], ...] = (
    rounded_operands,
    rounded_result,
    fused,
    accumulation,
    reordered,
)
