"""Running a candidate on one case and seeing everything it did.

Every call gets fresh clones of the arguments. What it returns, what became of its arguments and
which integers its submodules returned are kept.
"""

import contextlib
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harness.cases import Case
from harness.operators import is_real
from harness.replay import named_arguments, named_results
from harness.trees import bits, leaves

# What a candidate in another process has to poison there: the results alike, and `poisoned`'s fill.
POISON: ContextVar[tuple[list[Tensor], bool] | None] = ContextVar("POISON", default=None)
SUMMED = 1 << 24  # elements of a checksum at once: they are summed as copies of 8 bytes each
POISON_COPIES = 4  # freed blocks of each result's size, filled with NaN, for the next call to get


class CandidateError(Exception):
    """The candidate itself raised."""


@dataclass
class Observed:
    """One call: `results` by the reference's names for them, `arguments` as they are afterwards.
    `declined` is why another process's own guard left the call to the reference."""

    results: dict[str, Tensor]
    arguments: dict[str, Tensor]
    integers: dict[str, list[Tensor]] = field(default_factory=dict)
    declined: str | None = None


def observe(node: nn.Module, reference: nn.Module, case: Case, fixed: set[int]) -> Observed:
    """Call `node` on the case; `reference` names what goes in and comes out.

    Raises CandidateError with the error's first line.
    """
    args, kwargs = case.clones(fixed)
    with watching_integers(node) as integers, torch.no_grad():
        try:
            result = node(*args, **kwargs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except CandidateError:
            raise
        except Exception as error:  # whatever a candidate raises is its failure, not ours
            first = (str(error).strip() or "no message").splitlines()[0]
            raise CandidateError(f"{type(error).__name__}: {first}") from error
    integers.update(getattr(node.forward, "integers", {}))  # seen where the candidate ran
    return Observed(
        results={name: t.clone() for name, t in named_results(reference, result).items()},
        arguments=named_arguments(reference, args, kwargs),
        integers=integers,
        declined=getattr(node.forward, "declined", None),
    )


@contextlib.contextmanager
def watching_integers(node: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the integer tensors that submodules return: routes."""
    found: dict[str, list[Tensor]] = {}

    def keep(name: str, result: Any) -> None:
        for path, tensor in leaves(result):
            if not is_real(tensor.dtype) and tensor.dtype != torch.bool:
                found.setdefault(f"{name}{path}", []).append(tensor.clone())

    with contextlib.ExitStack() as stack:
        for name, module in node.named_modules():
            if name:
                # A replaced module shares its hooks with the one that it may call in its place.
                handle = module.register_forward_hook(
                    lambda called, _, result, name=name, module=module: (
                        keep(name, result) if called is module else None
                    )
                )
                stack.callback(handle.remove)
        yield found


@contextlib.contextmanager
def poisoned(results: dict[str, Tensor], *, fill: bool) -> Iterator[None]:
    """Let memory that the candidate allocates hold NaN, so that what it does not write shows.

    Freed blocks of every result's size are filled with NaN, for the allocator to hand out again.
    With `fill`, torch.empty and its like fill what they return, too: PyTorch does that in
    deterministic mode, which is on for this call alone and only warns.
    """
    for tensor in results.values():
        blocks = [torch.empty_like(tensor) for _ in range(POISON_COPIES)]
        for block in blocks:
            block.fill_(torch.nan if is_real(block.dtype) else -1)
        del blocks
    token = POISON.set((list(results.values()), fill))
    try:
        with _filling(fill):
            yield
    finally:
        POISON.reset(token)


@contextlib.contextmanager
def _filling(fill: bool) -> Iterator[None]:
    if not fill:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            # A compiled candidate must not be compiled again for this mode.
            with torch.compiler.set_stance("eager_on_recompile"):
                yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warn_only)


def checksum(tensor: Tensor) -> tuple[int, int]:
    """Two sums over the bit patterns: of all, and of every other one."""
    pattern = bits(tensor).flatten()
    if pattern.dtype == torch.bool:
        pattern = pattern.to(torch.uint8)
    sums = torch.zeros(2, dtype=torch.int64, device=pattern.device)
    for part in pattern.split(SUMMED):
        sums[0] += part.sum(dtype=torch.int64)
        sums[1] += part[::2].sum(dtype=torch.int64)
    first, second = sums.tolist()
    return first, second


def checksums(node: nn.Module, cases: list[Case], fixed: set[int]) -> dict[str, tuple[int, int]]:
    """Checksums of the node's parameters and buffers, and of parameters passed as arguments."""
    tensors = dict(node.named_parameters()) | dict(node.named_buffers())
    for case in cases[:1]:
        for name, tensor in named_arguments(node, case.args, case.kwargs).items():
            if tensor.untyped_storage()._cdata in fixed:
                tensors[name] = tensor
    return {name: checksum(tensor) for name, tensor in tensors.items()}
