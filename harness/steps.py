"""The steps that the judge runs a model on: prefills and decodes of several sizes and positions."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.trees import leaves, map_tensors
from harness.workload import TARGETS, StepInputs, Workload, free_bytes, give_back

BATCH = 3  # sequences of a batch: odd, and rarely another dimension's size
# What kernels for larger batches are judged on, where the model is no toy: those of the targets.
BATCHES = sorted({t.batch for t in TARGETS.values() if t.kind == "decode" and t.batch > BATCH})
PRIMES = 17, 37, 67, 131, 257, 521, 1031  # prompt lengths, also rarely another dimension's size
LONG = 1 << 20  # positions of the longest context
PROBES = 97, 193  # two capacities, to tell fixed cache lengths from growing ones

LabelledStep = tuple[str, StepInputs]


def decode_label(n: int) -> str:
    """Of the n-th decode step after the prefill, counted from 0."""
    return "decode after it" if n == 0 else f"decode {n + 1} after it"


def window_edges(workload: Workload) -> tuple[int, ...]:
    """Positions around the end of each fixed-length cache: W - 1, W, W + 1 for slots of W or W + 1.

    A length is fixed if it does not follow the capacity. Without one, the empty tuple.
    """
    shapes = []
    for capacity in PROBES:
        cache = workload.file.cache(workload.config, 1, capacity, "meta")
        shapes.append([t.shape for _, t in leaves(cache)])
    fixed: set[int] = set()
    for a, b in zip(*shapes, strict=True):
        if len(a) > 1 and a == b:
            fixed.add(a[1])
    edges: set[int] = set()
    for length in fixed:
        edges.update(p for p in (length - 2, length - 1, length) if p >= 0)
    return tuple(sorted(edges))


def prompt_length(edges: tuple[int, ...]) -> int:
    """The first prime that passes the window, within reason."""
    return next((p for p in PRIMES if p > max(edges, default=0)), PRIMES[-1])


def steps(
    workload: Workload,
    seed: int,
    *,
    sizes: bool = True,
    decodes: int = 1,
    note: Callable[[str], None] = lambda text: None,
) -> Iterator[LabelledStep]:
    """Labelled inputs; later steps may continue the caches of earlier ones, so run them in order.

    The prefill is followed by `decodes` decode steps of one token after the other.
    With `sizes`, also larger batches, a target's own context and, where memory allows, a million
    positions.
    """
    if sizes:
        give_back(workload.device)  # which sizes are judged must not depend on what ran before
    maker = _Maker(workload, torch.Generator(workload.device).manual_seed(seed))
    edges = window_edges(workload)
    length = prompt_length(edges)
    room = max((*edges, 0)) + 2 * length + 1 + decodes
    cache = maker.cache(BATCH, room, random=False)
    lengths = [length, max(1, length - 5), 1]
    positions = torch.arange(length).repeat(BATCH, 1)
    ragged = positions.masked_fill(positions >= torch.tensor(lengths)[:, None], -1)
    yield "ragged prefill", maker.inputs(ragged, cache)
    for n in range(decodes):
        yield decode_label(n), maker.inputs(torch.tensor(lengths)[:, None] + n, cache)
    around = list(edges[-BATCH:]) or list(range(BATCH))
    around = (around * BATCH)[:BATCH]
    at_edges = maker.cache(BATCH, room, random=True)
    yield "decode at the window's edges", maker.inputs(torch.tensor(around)[:, None], at_edges)
    start = max(edges, default=length)
    extent = start + length
    continued = maker.cache(BATCH, extent, random=True, aligned=True)
    yield "continued prefill", maker.inputs(positions + start, continued)
    one = maker.cache(1, room, random=True)
    yield "decode at position 0", maker.inputs(torch.zeros(1, 1, dtype=torch.int64), one)
    if not sizes:
        return
    if not workload.toy:
        for batch in BATCHES:
            if not maker.fits(batch, room):
                note(f"decode of {batch} sequences is not judged: its caches do not fit")
                continue
            many = maker.cache(batch, room, random=True)
            at = torch.randint(room - 1, (batch, 1), generator=torch.Generator().manual_seed(seed))
            yield f"decode of {batch} sequences", maker.inputs(at, many)
            del many
    # Below 256 every position is exact in BF16: a toy's context would not tell it from FP32.
    context = max(workload.target("decode-bs1").context, PRIMES[-1])
    deep = maker.cache(1, context, random=True)
    yield "decode of one sequence", maker.inputs(torch.tensor([[context - 1]]), deep)
    del deep
    far = maker.far_cache()
    if far is None:
        note(f"position {LONG - 1} is not judged: its cache would be read whole, or does not fit")
        return
    far.extent = min(room, LONG)  # full layers need not read a million keys for it
    yield f"decode at position {LONG - 1}", maker.inputs(torch.tensor([[LONG - 1]]), far)


class _Maker:
    def __init__(self, workload: Workload, generator: torch.Generator) -> None:
        self.workload = workload
        self.generator = generator

    def inputs(self, positions: Tensor, cache: Any) -> StepInputs:
        device = self.workload.device
        ids = torch.randint(
            self.workload.vocabulary, positions.shape, generator=self.generator, device=device
        )
        return StepInputs(ids=ids, positions=positions.to(device), cache=cache)

    def far_cache(self) -> Any:
        """A cache of LONG positions whose layers need not read them all; None if there is none.

        Memory of a CPU that nobody touches costs nothing, so there it may be larger than is free.
        """
        workload = self.workload
        shape = workload.file.cache(workload.config, 1, LONG, "meta")
        if not hasattr(shape, "extent"):
            return None
        if workload.device.type == "cpu":
            return map_tensors(_untouched_zeros, shape)
        if not self.fits(1, LONG):
            return None
        return workload.file.cache(workload.config, 1, LONG, workload.device)

    def fits(self, batch: int, capacity: int) -> bool:
        """Whether such caches take at most half of the free memory."""
        shape = self.workload.file.cache(self.workload.config, batch, capacity, "meta")
        size = sum(t.nbytes for _, t in leaves(shape))
        return size <= free_bytes(self.workload.device) // 2

    def cache(self, batch: int, capacity: int, *, random: bool, aligned: bool = False) -> Any:
        """A cache for `batch` sequences, empty or filled with random values."""
        workload = self.workload
        cache = workload.file.cache(workload.config, batch, capacity, workload.device)
        if random:
            for _, tensor in leaves(cache):
                if tensor.is_floating_point():
                    tensor.normal_(generator=self.generator)
        if aligned and hasattr(cache, "ends_aligned"):
            cache.ends_aligned = True
        return cache


def _untouched_zeros(like: Tensor) -> Tensor:
    """Zeros on the CPU whose pages exist once they are written to."""
    buffer = torch.from_numpy(np.zeros(max(1, like.nbytes), dtype=np.uint8))
    return buffer[: like.nbytes].view(like.dtype).view(like.shape)
