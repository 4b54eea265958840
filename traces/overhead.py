"""What calling a compiled region costs on the host, measured."""

import functools
import statistics
import time

import torch
from torch import Tensor, nn

from optimized.inductor import inductor_implementation

CALLS = 200
WIDTH = 256
SETTLING = 20


class _Next(nn.Module):
    """A region that computes next to nothing, with as many tensors as a small region has."""

    def forward(self, a: Tensor, b: Tensor, c: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return a + 1, b * weight + c


@functools.cache
def compiled_call_us() -> float:
    """The time of one call of a small compiled region on a CPU, as a step calls it.

    A step runs other code between two calls of a region, and that is most of the cost: called in a
    loop it took 5 us, after the operators of another region 20 to 30 (two CPU cores, 2026-11-29).
    """
    node = _Next()
    node.forward = inductor_implementation().build(node, None)
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(1, WIDTH, generator=generator) for _ in "abc")
    weights = [torch.randn(WIDTH, WIDTH, generator=generator) for _ in "123"]
    weight = nn.Parameter(c[0].clone(), requires_grad=False)
    taken, idle = [], []
    with torch.no_grad():
        for _ in range(SETTLING):
            node(a, b, c, weight)
        for _ in range(CALLS):
            _other_work(a, weights)
            start = time.perf_counter_ns()
            node(a, b, c, weight)
            taken.append((time.perf_counter_ns() - start) / 1e3)
            _other_work(a, weights)
            start = time.perf_counter_ns()
            idle.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(taken) - statistics.median(idle)


def _other_work(x: Tensor, weights: list[Tensor]) -> Tensor:
    """What runs between two calls: products and element-wise operators."""
    for weight in weights:
        x = torch.tanh(x @ weight) * torch.sigmoid(x)
        x = x / (x.abs().sum(-1, keepdim=True) + 1)
    return x
