"""The calls that a step of the model makes of each region: what single kernels are timed on.

Nothing here knows a region. One step of the reference runs; its nodes' calls are recorded where
their shapes differ, and for each kind of call as many nodes as it takes for their data to be more
than a cache holds: each has weights of its own, so that a chain of them reads memory as a step
does.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harness.cases import copied, storages
from harness.floors import LOOKUPS
from harness.modes import DispatchMode
from harness.operators import is_view
from harness.operators import name as called
from harness.threads import side_by_side
from harness.trees import leaves, map_tensors
from harness.workload import TARGETS, StepInputs, Target, Workload, target
from optimized.change import nodes, region_of

CACHE_FACTOR = 4  # a chain's data is so many times the last cache
CHAIN = 16  # calls in a chain, so that the clock's resolution and its start count for little
KEPT_BYTES = 2 << 30  # of recorded arguments of one job
CPU_CACHE = 32 << 20
COMPILED_AT_ONCE = 8
OTHER_CONTEXT = 8192  # of a decode whose batch no target has
STORES = frozenset(("index_put", "index_copy", "scatter"))


@dataclass(kw_only=True)
class Job:
    """Calls of one kind: nodes of `region` by name, each with its arguments in `calls`."""

    region: str
    shapes: str  # of arguments and parameters: "1x1x5120, 5120"
    rows: int  # tokens of the step that it was recorded in
    nbytes: int  # that one call has to read and write
    names: list[str] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    kept: int = 0  # bytes of `calls`

    @property
    def label(self) -> str:
        parts = self.names[0].split(".")
        return ".".join("*" if part.isdigit() else part for part in parts)

    def chain(self, cache: int) -> int:
        """How many calls are timed in a row: all nodes once, or more of a call that is small."""
        count = len(self.names)
        if self.nbytes * count >= cache:
            return count
        return count * -(-CHAIN // count)


def record_jobs(
    model: nn.Module, regions: Sequence[str], inputs: StepInputs, cache: int
) -> list[Job]:
    """Run one step of `model` and keep what the nodes of `regions` are called with, in order."""
    rows = inputs.ids.numel()
    fixed = storages(model)
    jobs: dict[tuple[str, str], Job] = {}
    busy = False

    def before(region: str, name: str, node: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal busy
        if busy or kwargs:
            return
        key = region, shapes((args, dict(node.named_parameters(recurse=False))))
        job = jobs.get(key)
        if job is not None and (
            job.nbytes * len(job.names) >= CACHE_FACTOR * cache or job.kept >= KEPT_BYTES
        ):
            return
        kept = map_tensors(lambda t: copied(t, fixed), args)
        if job is None:
            busy = True  # the node runs once more, to be counted
            try:
                job = Job(
                    region=region,
                    shapes=key[1],
                    rows=rows,
                    nbytes=moved_bytes(node, map_tensors(lambda t: copied(t, fixed), args)),
                )
            finally:
                busy = False
            jobs[key] = job
        job.names.append(name)
        job.calls.append(kept)
        job.kept += sum(
            t.nbytes for _, t in leaves(kept) if t.untyped_storage()._cdata not in fixed
        )

    with contextlib.ExitStack() as stack, torch.no_grad():
        for region in regions:
            for name in nodes(model, region):
                hook = model.get_submodule(name).register_forward_pre_hook(
                    lambda node, args, kwargs, region=region, name=name: before(
                        region, name, node, args, kwargs
                    ),
                    with_kwargs=True,
                )
                stack.callback(hook.remove)
        model(*inputs.args)
    return list(jobs.values())


def calls_of(model: nn.Module, region: str, steps: Iterable[StepInputs]) -> list[Job]:
    """One job for each kind of call of `region` in the first of the steps that calls it; ValueError
    if none does."""
    if not nodes(model, region):
        known = sorted({region_of(m) for name, m in model.named_modules() if name})
        raise ValueError(f"there is no region {region!r}; there are {', '.join(known)}")
    for inputs in steps:
        if found := record_jobs(model, [region], inputs, last_cache_bytes(inputs.ids.device)):
            return found
    raise ValueError(f"no step calls {region} with plain arguments")


def shapes(args: Any) -> str:
    return ", ".join("x".join(map(str, t.shape)) or "scalar" for _, t in leaves(args))


def call_side_by_side(calls: Sequence[Callable[[], Any]], deadline: float) -> None:
    """Make the calls in threads, none after `deadline` (on `time.monotonic`): their kernels are
    compiled then. What fails is for whoever times it to say."""

    def made(call: Callable[[], Any]) -> None:
        with contextlib.suppress(Exception), torch.no_grad():
            if time.monotonic() < deadline:
                call()

    side_by_side(made, calls, COMPILED_AT_ONCE)


def ends_first(counts: Sequence[int]) -> list[int]:
    """In the order in which a run that is stopped early still says most: the ends, then halves."""
    left = sorted(set(counts))
    found = [left.pop(0)] if left else []
    if left:
        found.append(left.pop())
    while left:
        found.append(left.pop(len(left) // 2))
    return found


def target_of(rows: int, workload: Workload) -> Target:
    """The target whose step has so many tokens, else a decode of that batch."""
    for known in TARGETS.values():
        if known.batch * known.tokens == rows:
            return target(known.name, toy=workload.toy)
    context = OTHER_CONTEXT // (64 if workload.toy else 1)
    return Target(name=f"decode-bs{rows}", batch=rows, tokens=1, context=context)


def last_cache_bytes(device: torch.device) -> int:
    """The size of the cache before memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    return CPU_CACHE


class Moved(DispatchMode):
    """Counts what operators touch of the tensors that a call is given: of each the most that one
    operator reads or writes, so that a second look costs nothing."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.given = {t.untyped_storage()._cdata for t in given}
        self.most: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_view(func):
            return result  # nothing moves
        touched: dict[int, int] = {}
        for path, tensor in leaves((args, kwargs or {})):
            storage = tensor.untyped_storage()._cdata
            if storage in self.given:
                count = self._count(called(func), path, tensor, args, result)
                touched[storage] = touched.get(storage, 0) + count
        for storage, count in touched.items():
            self.most[storage] = max(self.most.get(storage, 0), count)
        return result

    @staticmethod
    def _count(name: str, path: str, tensor: Tensor, args: tuple[Any, ...], result: Any) -> int:
        first = path.startswith("[0][0]")
        if name in LOOKUPS and first:
            return _looked_up(args, result)
        if name in STORES and first:
            return min(tensor.nbytes, sum(t.nbytes for _, t in leaves(args[-1:])))
        if name == "_grouped_mm" and path.startswith("[0][1]") and len(args) > 2:
            ends = args[2].tolist()
            used = sum(last > start for start, last in zip([0, *ends], ends, strict=False))
            return distinct_bytes(tensor) * used // max(1, len(ends))
        return distinct_bytes(tensor)


def _looked_up(args: tuple[Any, ...], result: Tensor) -> int:
    """The bytes of the rows that were picked, each once."""
    picked = [t for _, t in leaves(args[1:])]
    if len(picked) == 1 and picked[0].numel():
        distinct = picked[0].unique().numel()
        return result.nbytes * distinct // picked[0].numel()
    return result.nbytes


def distinct_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor, without what it repeats by strides of zero."""
    sizes = (n for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s or n == 0)
    count = 1
    for n in sizes:
        count *= n
    return count * tensor.element_size()


def moved_bytes(node: nn.Module, args: tuple[Any, ...]) -> int:
    """The bytes that a call of `node` has to read of its arguments and parameters, and to write;
    runs it once."""
    given = [t for _, t in leaves(args)] + [*node.parameters(), *node.buffers()]
    with torch.no_grad(), Moved(given) as moved:
        result = node.forward(*args)
    written = sum(
        t.nbytes for _, t in leaves(result) if t.untyped_storage()._cdata not in moved.given
    )
    return sum(moved.most.values()) + written
