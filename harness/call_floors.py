"""The least time of one call of a region: a time below it is an error, not a win.

Only what is certain counts: weights that products and look-ups touch, the products themselves, and
the arguments that hold a row for each token. Caches and masks, of which a kernel may read a part,
are left out, and so is what is written, which an L2 may hold back.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from harness.bench import require_possible
from harness.bench_jobs import Job, last_cache_bytes
from harness.ceilings import measure_ceilings
from harness.floors import least_work
from harness.operators import LOW
from harness.records import Ceilings
from harness.trees import leaves, map_tensors

ON_CPU = "a CPU's caches stay as they are, so single calls have no floor there"


def call_work(node: nn.Module, args: tuple[Any, ...], rows: int) -> tuple[int, int]:
    """(bytes to read, operations) that a call of `node` on `rows` tokens cannot do without; runs
    the node once, on copies of the arguments that are no weights."""
    weights = {t.untyped_storage()._cdata for t in (*node.parameters(), *node.buffers())}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.untyped_storage()._cdata in weights else tensor.clone()

    nbytes, flops = least_work(node, map_tensors(own, args))
    read = {
        id(t): t.nbytes
        for _, t in leaves(args)
        if t.dtype in LOW
        and t.untyped_storage()._cdata not in weights
        and rows == t.shape[: 1 if t.ndim < 3 else 2].numel()
        and 0 not in t.stride()
    }
    return nbytes + sum(read.values()), flops


@dataclass
class CallFloors:
    """Floors of single calls on one device; ceilings are measured when first needed."""

    device: torch.device
    ceilings: Ceilings | None = None
    known: dict[tuple[str, str, int], tuple[int, int]] = field(default_factory=dict)

    def require(
        self, node: nn.Module, job: Job, what: str, time_us: float, *, cached: int | None = None
    ) -> None:
        """Raise ImpossibleTimeError if one call of `job` cannot take as little as `time_us`.

        `cached` bytes of it may lie in a cache from the call before: none after a flush, by default
        as many as the last cache holds.
        """
        if self.device.type == "cpu":
            return
        if self.ceilings is None:
            self.ceilings = measure_ceilings(self.device)
        key = job.region, job.shapes, job.rows
        if key not in self.known:
            self.known[key] = call_work(node, job.calls[0], job.rows)
        nbytes, flops = self.known[key]
        held = last_cache_bytes(self.device) if cached is None else cached
        least = max(0, nbytes - held)
        require_possible(what, time_us, nbytes=least, flops=flops, ceilings=self.ceilings)
