"""Cases from a node's FP32 tables: arguments that are wider than the model's dtype.

Tables of neighbouring positions are alike, so that one row passes for another, and products of
activations and tables seldom cancel, so that a fused multiply-add hardly shows. Both are sought
here: tables varied at random, and tables under which sums of products cancel.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from harness.cases import Case, with_values
from harness.operators import LOW, is_real
from harness.replay import NATIVE, named_arguments, replay

REACH = 64.0  # how far a row of a table is stretched in search of a cancellation
HALVINGS = 36  # of the stretch: down to neighbouring FP32 values


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
    node: nn.Module, case: Case, found: dict[str, Tensor], generator: torch.Generator
) -> list[Case]:
    """The call with all tables varied, and for each result one in which sums cancel."""
    if not found:
        return []

    def stretched(t: Tensor) -> Tensor:
        return t * (0.5 + 1.5 * torch.rand(t.shape, generator=generator)).to(t.device)

    ids = {id(t): t for t in found.values()}
    cases = [with_values(case, "varied tables", ids, stretched)]
    results = replay(node, case.args, NATIVE, None, case.kwargs).outputs
    for result, tensor in results.items():
        if not is_real(tensor.dtype) or not tensor.numel():
            continue
        for name, table in found.items():
            cancelled = cancel(node, case, name, table, result, generator)
            if cancelled is not None:
                cases.append(cancelled)
                break
    return cases


def cancel(
    node: nn.Module,
    case: Case,
    name: str,
    table: Tensor,
    result: str,
    generator: torch.Generator,
) -> Case | None:
    """The call with each row of `table` scaled so that one element of that row of the result, drawn
    at random, is as near zero as FP32 gets; None if no element changes its sign."""
    rows = table.shape[:-1]

    def scaled(by: Tensor) -> Case:
        text = f"cancelling {result} by {name}"
        varied = with_values(case, text, {id(table): table}, lambda t: t * by[..., None])
        return replace(varied, telling=True)

    def elements(by: Tensor) -> Tensor:
        made = scaled(by)
        return replay(node, made.args, NATIVE, None, made.kwargs).outputs[result]

    low = torch.full(rows, -REACH, device=table.device)
    at_low = elements(low)
    if not rows or at_low.shape[: len(rows)] != rows:
        return None
    count = at_low[(0,) * len(rows)].numel()
    drawn = torch.randint(count, (*rows, 1), generator=generator).to(table.device)

    def signs(values: Tensor) -> Tensor:
        return values.reshape(*rows, count).gather(-1, drawn)[..., 0] > 0

    high = -low
    below, above = signs(at_low), signs(elements(high))
    changes = below != above
    if not bool(changes.any()):
        return None
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        same = signs(elements(middle)) == below
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    return scaled(torch.where(changes, high, torch.ones_like(high)))
