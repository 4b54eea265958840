"""Cases from a node's FP32 tables: arguments that are wider than the model's dtype.

Tables of neighbouring positions are alike, so that one row passes for another, and products of
activations and tables seldom cancel, so that a fused multiply-add hardly shows. Both are sought
here: tables varied at random, and tables under which sums of products cancel.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from harness.cases import Case, results_of, with_values
from harness.operators import LOW, is_real
from harness.replay import named_arguments

REACH = 64.0  # how far a row of a table is stretched in search of a cancellation
HALVINGS = 36  # of the stretch: down to neighbouring FP32 values
SMALL = 2.0**12  # of a row's elements: far below the others


def tables(node: nn.Module, case: Case, fixed: set[int], besides: set[int]) -> dict[str, Tensor]:
    """The call's FP32 arguments that are no parameters; `besides` holds ids of activations."""
    return {
        name: t
        for name, t in named_arguments(node, case.args, case.kwargs).items()
        if is_real(t.dtype)
        and t.dtype not in LOW
        and t.numel() > 1
        and id(t) not in besides
        and t.untyped_storage()._cdata not in fixed
    }


def vary(
    node: nn.Module,
    case: Case,
    found: dict[str, Tensor],
    fixed: set[int],
    generator: torch.Generator,
) -> list[Case]:
    """The call with all tables varied, and for each result one in which sums cancel."""
    if not found:
        return []

    def stretched(t: Tensor) -> Tensor:
        return t * (0.5 + 1.5 * torch.rand(t.shape, generator=generator)).to(t.device)

    ids = {id(t): t for t in found.values()}
    cases = [with_values(case, "varied tables", ids, stretched)]
    results = results_of(node, case, fixed)
    for result, tensor in results.items():
        for name, table in found.items() if is_real(tensor.dtype) and tensor.numel() else ():
            cancelled = cancel(node, case, (name, table), result, fixed, generator)
            if cancelled is not None:
                cases.append(cancelled)
                break
    return cases


def cancel(
    node: nn.Module,
    case: Case,
    named: tuple[str, Tensor],
    result: str,
    fixed: set[int],
    generator: torch.Generator,
) -> Case | None:
    """The call with the table such that sums of products cancel: in each row of the result, one
    element, drawn at random, is as near zero as FP32 gets. None if no element changes its sign.

    Either whole rows of the table are stretched (against another table), or one of two entries to
    which a row is reduced (against the other); the one that cancels more is taken.
    """
    table = named[1]
    rows, width = table.shape[:-1], table.shape[-1]
    if not rows:
        return None
    stretched = torch.ones_like(table), torch.zeros_like(table)
    kept = torch.rand(table.shape, generator=generator).argsort(-1).to(table.device)
    pair = torch.zeros_like(table), torch.zeros_like(table)
    pair[0].scatter_(-1, kept[..., :1], 1.0)
    pair[1].scatter_(-1, kept[..., 1:2], 1.0)
    best: tuple[int, Case] | None = None
    for moved, still in (stretched, pair) if width > 1 else (stretched,):
        found = _bisect(node, case, named, result, fixed, (moved, still), generator)
        if found is not None and (best is None or found[0] > best[0]):
            best = found
    return None if best is None else best[1]


def _bisect(
    node: nn.Module,
    case: Case,
    named: tuple[str, Tensor],
    result: str,
    fixed: set[int],
    parts: tuple[Tensor, Tensor],
    generator: torch.Generator,
) -> tuple[int, Case] | None:
    """How many rows cancel, and the call: the table times (m * parts[0] + parts[1]), m for each row
    bisected towards where the drawn element changes its sign."""
    (name, table), (moved, still) = named, parts
    rows = table.shape[:-1]

    def scaled(by: Tensor) -> Case:
        factor = by[..., None] * moved + still
        text = f"cancelling {result} by {name}"
        varied = with_values(case, text, {id(table): table}, lambda t: t * factor)
        return replace(varied, telling=True)

    def elements(by: Tensor) -> Tensor:
        return results_of(node, scaled(by), fixed)[result].reshape(*rows, -1)

    if results_of(node, case, fixed)[result].shape[: len(rows)] != rows:
        return None
    low = torch.full(rows, -REACH, device=table.device)
    high = -low
    at_low = elements(low)
    count = at_low.shape[-1]
    drawn = torch.randint(count, (*rows, 1), generator=generator).to(table.device)

    def signs(values: Tensor) -> Tensor:
        return values.gather(-1, drawn)[..., 0] > 0

    below = signs(at_low)
    changes = below != signs(elements(high))
    for _ in range(HALVINGS if bool(changes.any()) else 0):
        middle = (low + high) / 2
        same = signs(elements(middle)) == below
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    chosen = torch.where(changes, high, torch.ones_like(high))
    at = elements(chosen).abs()
    # A row that is nothing but small was multiplied by zero: no sum cancels there.
    small = at.gather(-1, drawn)[..., 0] < at.amax(-1) / SMALL
    rest = at.amax(-1) > at_low.abs().amax(-1) / SMALL
    cancelled = int((changes & small & rest).sum())
    return (cancelled, scaled(chosen)) if cancelled else None
