"""Slips at one operator: alterations, each offered where it applies.

Each function below takes a traced call and yields (kind, what, alteration) for what its operator
and operands allow. An alteration gets the run in progress, the operator and its arguments, and
returns the wrong result. Nothing here knows a model.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from harness import operators, substitutes
from harness.mutate import Alteration, Altered, Call, storage

Found = Iterator[tuple[str, str, Alteration]]

SWAPPED = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}
INTEGER = frozenset(("add", "sub", "rsub", "mul", "remainder", "floor_divide", *SWAPPED, "eq"))
TINY = 1e-2  # an additive constant below this guards a division


def in_bf16(x: Any) -> Any:
    """A tensor's values, or a number, rounded to BF16; its dtype stays."""
    if isinstance(x, Tensor):
        return x.bfloat16().to(x.dtype) if x.dtype == torch.float32 else x
    return float(torch.tensor(x).bfloat16()) if isinstance(x, float) else x


def _with(args: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*args[:place], value, *args[place + 1 :])


def constants(call: Call) -> Found:
    """Numbers beside floating-point tensors: another, none, or rounded to BF16."""
    called = call.key.called
    if called not in ("add", "sub", "mul", "div") or not float_result(call):
        return
    for i, value in enumerate(call.args[:2]):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        neutral = 1.0 if called in ("mul", "div") else 0.0
        changes = {"constant missing": neutral, "constant in BF16": in_bf16(float(value))}
        if neutral == 0.0:
            kind = "eps changed" if abs(value) < TINY else "constant changed"
            changes[kind] = value * 10.0
        for kind, other in changes.items():
            if other != value:
                yield (
                    kind,
                    f"{value:g} becomes {other:g}",
                    lambda run, func, args, kwargs, i=i, other=other: func(
                        *_with(args, i, other), **kwargs
                    ),
                )


def integers(call: Call) -> Found:
    """Counts and positions off by one, kept within the values that occur, so that no index leaves
    its tensor."""
    if call.key.called not in INTEGER or not isinstance(call.result, Tensor):
        return
    for i, value in enumerate(call.args[:2]):
        if isinstance(value, int) and not isinstance(value, bool) and call.tensors:
            if call.tensors[0].is_floating_point():
                continue

            def alter(run: Altered, func: Any, args: Any, kwargs: Any, i: int = i) -> Any:
                right = func(*args, **kwargs)
                wrong = func(*_with(args, i, args[i] + 1), **kwargs)
                if right.dtype == torch.bool or not right.numel():
                    return wrong
                return wrong.clamp(int(right.min()), int(right.max()))

            yield "integer off by one", f"{value} becomes {value + 1}", alter


def comparisons(call: Call) -> Found:
    """< for <=, and so on."""
    other = SWAPPED.get(call.key.called)
    if other is not None:
        yield (
            "comparison swapped",
            f"{call.key.called} becomes {other}",
            lambda run, func, args, kwargs: getattr(
                getattr(torch.ops.aten, other), func._overloadname
            )(*args, **kwargs),
        )


def counts(call: Call) -> Found:
    if call.key.called != "mean":
        return
    n = call.args[0].numel() // max(1, call.result.numel())

    def alter(run: Altered, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        terms = args[0].numel() // max(1, result.numel())
        return result * (terms / (terms + 1))

    yield "count of a mean off by one", f"{n} becomes {n + 1}", alter


def writes(call: Call) -> Found:
    """Writes left out, or to the neighbouring slot."""
    places = operators.written(call.func)
    if not places or len(places) > 1 or not operators.is_move(call.func, call.args, call.kwargs):
        return
    yield "write left out", "memory stays as it was", lambda run, func, args, kwargs: args[0]
    called = call.key.called
    if called in ("index_put", "_index_put_impl"):

        def neighbour(run: Altered, func: Any, args: Any, kwargs: Any) -> Any:
            last = max(i for i, index in enumerate(args[1]) if index is not None)
            moved = (args[1][last] + 1) % args[0].shape[last]
            return func(args[0], [*args[1][:last], moved, *args[1][last + 1 :]], *args[2:])

        if any(i is not None and i.dtype != torch.bool for i in call.args[1]):
            yield "write misplaced", "to the neighbouring slot", neighbour
    elif called in ("index_copy", "scatter"):

        def shifted(run: Altered, func: Any, args: Any, kwargs: Any) -> Any:
            moved = (args[2] + 1) % args[0].shape[args[1]]
            return func(*_with(args, 2, moved), **kwargs)

        yield "write misplaced", "to the neighbouring slot", shifted


def missing(call: Call) -> Found:
    """One operand of a sum left out; a parameter or a broadcast factor left out."""
    called = call.key.called
    if called in ("addmm", "baddbmm"):
        yield (
            "addend missing",
            "the bias is left out",
            lambda run, func, args, kwargs: func(torch.zeros_like(args[0]), *args[1:], **kwargs),
        )
    if called not in ("add", "sub", "mul") or not float_result(call):
        return
    operands = call.args[:2]
    if not all(isinstance(a, Tensor) for a in operands):
        return
    sizes = [a.numel() for a in operands]
    if called == "mul" and sizes[0] == sizes[1]:
        return
    keep = 0 if sizes[0] >= sizes[1] else 1

    def alter(run: Altered, func: Any, args: Any, kwargs: Any) -> Any:
        right = func(*args, **kwargs)
        kept = -args[1] if called == "sub" and keep == 1 else args[keep]
        return right.copy_(kept)

    kind = "factor missing" if called == "mul" else "addend missing"
    shape = " x ".join(map(str, operands[1 - keep].shape))
    yield kind, f"operand {2 - keep} ({shape}) is left out", alter


def halves(call: Call) -> Found:
    """Parts of a dimension in another order, or every other element in the place of a half."""
    called = call.key.called
    whole: Any = call.result
    given: Any = call.args
    parts: Any = call.result if isinstance(call.result, (list, tuple)) else ()
    if called in ("split", "split_with_sizes", "unbind") and len(parts) > 1:
        summed = call.users and all(u.key.called == "add" for u in call.users)
        alike = len({p.shape for p in parts}) == 1
        if alike and not summed:
            yield (
                "parts swapped",
                "in reverse order",
                lambda run, func, args, kwargs: list(func(*args, **kwargs))[::-1],
            )
        dim = given[2] if len(given) > 2 else 0
        count = len(parts)  # the parts themselves must not outlive the trace
        if called == "split" and alike and dim in (-1, given[0].ndim - 1):
            yield (
                "parts interleaved",
                f"every {count}th element for a part",
                lambda run, func, args, kwargs: [args[0][..., i::count] for i in range(count)],
            )
    if called == "cat" and len({t.shape for t in given[0]}) == 1 < len(given[0]):
        dim = given[1] if len(given) > 1 else 0
        yield (
            "parts swapped",
            "joined in reverse order",
            lambda run, func, args, kwargs: func(list(args[0])[::-1], *args[1:], **kwargs),
        )
        if dim in (-1, whole.ndim - 1):
            yield (
                "parts interleaved",
                "joined element by element",
                lambda run, func, args, kwargs: torch.stack(args[0], dim=-1).flatten(-2),
            )
    if called == "slice" and float_result(call):
        source, dim = given[0], given[1] if len(given) > 1 else 0
        size = whole.shape[dim]
        if dim in (-1, source.ndim - 1) and 0 < size <= source.shape[dim] // 2:

            def other(run: Altered, func: Any, args: Any, kwargs: Any) -> Any:
                length, size = args[0].shape[args[1]], func(*args, **kwargs).shape[args[1]]
                first = args[2] if len(args) > 2 and args[2] is not None else 0
                first = first + size if first + 2 * size <= length else first - size
                return args[0].narrow(args[1], first, size)

            yield "parts swapped", "the neighbouring part", other


def ties(call: Call) -> Found:
    """Equal values ordered the other way round, where the order is promised: in stable sorts."""
    if call.key.called != "sort" or not substitutes.keywords(call.func, call.args, call.kwargs).get(
        "stable"
    ):
        return

    def alter(run: Altered, func: Any, args: Any, kwargs: Any) -> Any:
        given = substitutes.keywords(func, args, kwargs)
        dim, x = given["dim"], args[0]
        found = x.flip(dim).sort(dim=dim, descending=given["descending"], stable=True)
        return found.values, x.shape[dim] - 1 - found.indices

    yield "tie order", "equal values in the opposite order", alter


def sources(call: Call) -> Found:
    """A sum used where one of its operands is meant, as biased scores for unbiased ones."""
    if call.key.called not in ("gather", "index", "index_select") or not float_result(call):
        return
    source = call.args[0]
    sums = [
        c
        for c in (u for m in call.makers for u in m.users)
        if c.key.called == "add"
        and isinstance(c.result, Tensor)
        and c.result.shape == source.shape
        and any(isinstance(a, Tensor) and storage(a) == storage(source) for a in c.args)
    ]
    if not sums:
        return

    def alter(run: Altered, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*_with(args, 0, run.sums[storage(args[0])]), **kwargs)

    yield "sum used for an operand", f"`{sums[0].key.label}` in its place", alter


def float_result(call: Call) -> bool:
    return isinstance(call.result, Tensor) and call.result.is_floating_point()


SLIPS: tuple[Callable[[Call], Found], ...] = (
    constants,
    integers,
    comparisons,
    counts,
    writes,
    missing,
    halves,
    ties,
    sources,
)
