"""What calling a compiled region costs on the host, measured."""

import functools
import statistics
import time

import torch
from torch import Tensor, nn

from optimized.inductor import inductor_implementation

CALLS = 200
ROUNDS = 7


class _Nothing(nn.Module):
    """The smallest region there is: one addition of one element."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


@functools.cache
def compiled_call_us() -> float:
    """The time of one call of a compiled region that computes next to nothing, on a CPU."""
    call = inductor_implementation().build(_Nothing(), None)
    x = torch.zeros(1)
    rounds = []
    with torch.no_grad():
        for _ in range(ROUNDS):
            start = time.perf_counter_ns()
            for _ in range(CALLS):
                call(x)
            rounds.append((time.perf_counter_ns() - start) / 1e3 / CALLS)
    return statistics.median(rounds)
