"""Exact ties: a call in which equal values are to be ordered, and no noise can tell them apart.

All activations are zero, so whatever order a sum has, its result is zero; and while the call lasts
the node's own vectors with one value for each option repeat every `PERIOD` values. What the
reference chooses then is what its order of equal values promises.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from harness.cases import Case, with_values
from harness.replay import Choice

PERIOD = 4  # distinct values that stay: some options are above others, and many are equal


def exact_ties(
    node: nn.Module, case: Case, chosen: dict[int, Tensor], choices: Sequence[Choice]
) -> Case | None:
    """The call with zero activations and tied options; None if nothing is chosen."""
    if not choices or not chosen:
        return None
    names = tuple(_by_option(node, {c.values.shape[-1] for c in choices}))
    zeros = with_values(case, "exact ties", chosen, torch.zeros_like)
    return replace(zeros, tied=names)


def _by_option(node: nn.Module, counts: set[int]) -> Iterator[str]:
    """The names of the node's vectors that hold a value for each option."""
    for name, tensor in (*node.named_parameters(), *node.named_buffers()):
        if tensor.ndim == 1 and tensor.is_floating_point() and tensor.numel() in counts:
            yield name


@contextlib.contextmanager
def tied(node: nn.Module, case: Case) -> Iterator[None]:
    """While the case is run, its vectors repeat; all that share them see it. They come back."""
    vectors = [_find(node, name) for name in case.tied]
    before = [vector.clone() for vector in vectors]
    try:
        with torch.no_grad():
            for vector in vectors:
                places = torch.arange(len(vector), device=vector.device) % PERIOD
                vector.copy_(vector[places])
        yield
    finally:
        with torch.no_grad():
            for vector, values in zip(vectors, before, strict=True):
                vector.copy_(values)


def shared(node: nn.Module, candidate: nn.Module, case: Case) -> bool:
    """Whether the candidate reads the very vectors that the case changes."""
    theirs = dict((*candidate.named_parameters(), *candidate.named_buffers()))
    return all(theirs.get(name) is _find(node, name) for name in case.tied)


def _find(node: nn.Module, name: str) -> Tensor:
    return dict((*node.named_parameters(), *node.named_buffers()))[name]
