"""Running a change's Triton kernel, on CUDA if there is one and in the interpreter if not, and what
its outputs may differ by: derived from the reference itself, run again with its noise moved."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from optimized.change import Change
from optimized.triton_support import INTERPRETED
from reference.numerics import set_numerics

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

needs_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED,
    reason="Triton kernels need CUDA, or TRITON_INTERPRET=1 before the first import",
)

set_numerics()


def run_triton(change: Change, node: nn.Module, *args: Tensor, knobs: Any = None) -> Any:
    """The change's Triton kernel on arguments that its guard must accept."""
    implementation = change.implementation("triton")
    assert implementation.guard is not None and implementation.guard(node, *args) is None
    with np.errstate(over="ignore", invalid="ignore"):  # a GPU does not warn of inf and NaN either
        return implementation.build(node, knobs)(*args)


def refusal(change: Change, node: nn.Module, *args: Tensor) -> str:
    """Why the change's guard refuses these arguments; "" where it takes them."""
    guard = change.implementation("triton").guard
    assert guard is not None
    return guard(node, *args) or ""


def all_knobs(change: Change, shape: dict[str, int]) -> Iterator[Any]:
    """Every valid combination of the change's candidate knobs for `shape`, one value varied at a
    time from the heuristic's."""
    kind = change.implementation("triton").knobs
    assert kind is not None
    start = kind.heuristic(shape)
    assert start.is_valid(shape)
    for name, values in kind.candidates(shape).items():
        for value in values:
            knobs = kind(**{**vars(start), name: value})
            if knobs.is_valid(shape):
                yield knobs


def bf16(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Normal values times `scale`, drawn on the device from `seed`."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    values = torch.randn(shape, generator=generator, device=DEVICE)
    return (values * scale).to(torch.bfloat16)


def elements(x: Tensor) -> Tensor:
    """Each element as a row of its own: for functions whose noise stays in its element."""
    return x.reshape(-1, 1)


def nudged(function: Callable[..., Tensor]) -> Iterator[Callable[..., Tensor]]:
    """`function`, an FP32 one, with its result one ULP up, and one ULP down."""
    for towards in (torch.inf, -torch.inf):

        def moved(*args: Any, towards: float = towards) -> Tensor:
            y = function(*args)
            return torch.nextafter(y, torch.full_like(y, towards))

        yield moved


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal, with -0.0 unlike 0.0 and NaN like NaN."""
    return torch.equal(a.view(torch.int16), b.view(torch.int16))
