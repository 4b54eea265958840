"""A layer call of a teacher-forced step, compared without calling the reference again."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.cases import Case
from harness.faults import written_rows
from harness.observe import Observed
from harness.operators import is_real
from harness.replay import named_arguments, named_results
from harness.trees import bits


@dataclass
class Compared:
    """Results to be pooled: (name, the candidate's, the reference's, which elements count or None),
    and how many rows of choices agreed."""

    tensors: list[tuple[str, Tensor, Tensor, Tensor | None]]
    rows: int


def regular(
    reference: nn.Module,
    case: Case,
    done: tuple[Any, Any, Any],
    integers: dict[str, list[Tensor]],
    seen: Observed,
    fixed: set[int],
) -> Compared | None:
    """Pair what the candidate did (`seen`) with what the reference did: its arguments after the
    call, keyword arguments, and result (`done`), and the `integers` that its submodules returned.

    None if they part in anything but rounding: names, shapes, dtypes, integers, the rows written,
    values that are not finite. Whether that is wrong takes a full judgement.
    """
    args, kwargs, result = done
    results = named_results(reference, result)
    if not results or not _alike(results, seen.results):
        return None
    before = named_arguments(reference, case.args, case.kwargs)
    after = named_arguments(reference, args, kwargs)
    odd: list[Tensor] = []
    wrote: dict[str, tuple[Tensor, Tensor]] = {}  # the rows, and whether there are any
    tensors: list[tuple[str, Tensor, Tensor, Tensor | None]] = []
    for name, start in before.items():
        if start.untyped_storage()._cdata in fixed:
            continue
        rows = written_rows(start, after[name])
        odd.append((written_rows(start, seen.arguments[name]) != rows).any())
        wrote[name] = rows, rows.any()
    rows = 0
    for ours, mine in _integers(integers, seen.integers, results, seen.results):
        if mine is None or mine.shape != ours.shape:
            return None
        odd.append((mine != ours).any())
        rows += ours.shape[:-1].numel() if ours.ndim else 0
    for name, ours in results.items():
        if is_real(ours.dtype):
            odd.append(_not_finite(seen.results[name], ours))
            tensors.append((name, seen.results[name], ours, None))
    for name in wrote:
        odd.append(_not_finite(seen.arguments[name], after[name]))
    flags = odd + [written for _, written in wrote.values()]
    device = next(iter(results.values())).device
    flags = torch.stack([flag.to(device) for flag in flags]).tolist()  # one wait
    if any(flags[: len(odd)]):
        return None
    for (name, (mask, _)), written in zip(wrote.items(), flags[len(odd) :], strict=True):
        if not written:
            continue
        if not is_real(after[name].dtype):
            if not torch.equal(bits(after[name]), bits(seen.arguments[name])):
                return None
            continue
        tensors.append((name, seen.arguments[name], after[name], mask))
    return Compared(tensors, rows)


def _alike(ours: dict[str, Tensor], mine: dict[str, Tensor]) -> bool:
    return ours.keys() == mine.keys() and all(
        (t.shape, t.dtype, t.device) == (mine[n].shape, mine[n].dtype, mine[n].device)
        for n, t in ours.items()
    )


def _integers(
    ours: dict[str, list[Tensor]],
    mine: dict[str, list[Tensor]],
    results: dict[str, Tensor],
    theirs: dict[str, Tensor],
) -> list[tuple[Tensor, Tensor | None]]:
    """Choices of submodules that both have, and integer results."""
    found: list[tuple[Tensor, Tensor | None]] = [
        (a, b)
        for name, several in ours.items()
        for a, b in zip(several, mine.get(name, []), strict=False)
    ]
    return found + [(t, theirs[n]) for n, t in results.items() if not is_real(t.dtype)]


def _not_finite(mine: Tensor, ours: Tensor) -> Tensor:
    if not is_real(ours.dtype):
        return torch.zeros((), dtype=torch.bool, device=ours.device)
    return (~torch.isfinite(mine) & torch.isfinite(ours)).any()
