"""Watches one step: every operator, the module and line it came from, and what it must move.

Each operator, module call and direct kernel launch runs in a profiler range whose name carries its
index here, so that the profiler's kernels can be told whose they are.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch._ops import OpOverload
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from harness.modes import DispatchMode
from optimized.launches import LibraryKernel, observers
from traces.costs import Cost, cost, gather, name_of
from traces.footprint import Footprints, Spec
from traces.names import CALL, LAUNCH, OPERATOR
from traces.observed import Launch, ModuleCall, Operator, Pending, Values, Work
from traces.outline import class_files, forward_line, frame_line, model_frame, passes

COMPILER = "torch._inductor"


class Recorder(DispatchMode):
    """A dispatch mode and module hooks over one step of `model`; see `recording`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.files = class_files(model)
        self.operators: list[Operator] = []
        self.calls: list[ModuleCall] = []
        self.launches: list[Launch] = []
        self.values = Values()
        self.outputs: tuple[int, ...] = ()
        self.stack: list[tuple[int, Any]] = []
        self.ranges: list[Any] = []
        self.pending: list[Pending] = []
        # Look-ups: the operator's index, the value looked up in, bytes of a row, and which rows.
        self.gathers: list[tuple[int, int, int, Tensor]] = []
        self.hidden = 0  # opaque calls that we are inside of
        self.told = 0  # announced launches that we are inside of

    # --- operators ----------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or func.namespace == "profiler":
            return func(*args, **kwargs)
        frame = model_frame(sys._getframe(1), self.files)
        with record_function(f"{OPERATOR}{len(self.operators)}"):
            out = func(*args, **kwargs)
        found = cost(func, args, kwargs, out)
        if (rows := gather(func, args)) is not None:
            value = self.values.number(rows.source)
            self.gathers.append((len(self.operators), value, rows.row_bytes, rows.index))
        inputs = tensors((args, kwargs))
        for tensor in inputs:
            self.values.number(tensor)
        self.values.made(tensors(out), inputs)
        self.operators.append(
            Operator(
                name=f"{func.namespace}::{name_of(func)}",
                call=self.call,
                source=frame_line(frame) if frame else self.call_source,
                work=self.numbered(found),
            )
        )
        return out

    def numbered(self, found: Cost) -> Work:
        return Work(
            reads=tuple((self.values.number(t), n) for t, n in found.reads),
            writes=tuple((self.values.number(t), n) for t, n in found.writes),
            flops=found.flops,
            matmul=found.matmul,
            peak=found.peak,
        )

    @property
    def call(self) -> int | None:
        return self.stack[-1][0] if self.stack else None

    @property
    def call_source(self) -> str | None:
        return self.calls[self.call].source if self.call is not None else None

    # --- module calls -------------------------------------------------------------------------

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        # A replaced forward may be compiled, and torch.compile does not run under a dispatch mode.
        opaque = "forward" in vars(module)
        index = len(self.calls)
        self.calls.append(
            ModuleCall(module=name, parent=self.call, opaque=opaque, source=forward_line(module))
        )
        pending = None
        if opaque and not self.hidden:
            spec = Spec.of(module, args, kwargs)
            pending = Pending(
                call=index,
                node=module,
                spec=spec,
                values={
                    **{
                        ("argument", i): self.values.number(x)
                        for i, x in enumerate(tree_leaves((args, kwargs)))
                        if isinstance(x, Tensor)
                    },
                    **{("parameter", k): self.values.number(t) for k, t in spec.parameters.items()},
                    **{("held", k): self.values.number(t) for k, t in spec.held.items()},
                },
                first_launch=len(self.launches),
            )
        self.stack.append((index, pending))
        if opaque:
            if not self.hidden:
                super().__exit__(None, None, None)
            self.hidden += 1
        scope = record_function(f"{CALL}{index}")
        scope.__enter__()
        self.ranges.append(scope)

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        self.ranges.pop().__exit__(None, None, None)
        index, pending = self.stack.pop()
        if self.calls[index].opaque:
            self.hidden -= 1
            if not self.hidden:
                super().__enter__()
        if pending is not None:
            self.values.made(tensors(out), tensors((args, kwargs)))
            for i, tensor in enumerate(tensors(out)):
                pending.values[("output", i)] = self.values.number(tensor)
            for launch in self.launches[pending.first_launch :]:
                if launch.storages is not None:
                    launch.given = self.values.located(launch.storages)
            self.pending.append(pending)
        if name == "":
            self.outputs = tuple({self.values.number(t) for t in tensors(out)})

    def finish(self) -> None:
        """Find the costs of opaque calls and of rows looked up; once the profiler no longer
        listens."""
        for index, value, row_bytes, rows in self.gathers:
            most, work = rows.unique().numel() * row_bytes, self.operators[index].work
            reads = tuple((v, min(n, most) if v == value else n) for v, n in work.reads)
            self.operators[index].work = replace(work, reads=reads)
        self.gathers.clear()
        footprints = Footprints()
        for pending in self.pending:
            found = footprints.of(pending.node, pending.spec)
            self.calls[pending.call].work = None if found is None else pending.located(found)
        self.pending.clear()

    # --- kernels that Triton launches past the dispatcher ---------------------------------------

    @contextmanager
    def launching(self, kernel: Any, arguments: tuple[Any, ...]) -> Iterator[None]:
        """Around a launch that says what it is given, as `optimized.triton_support.launch` does."""
        storages = self.values.storages(tensors(arguments))
        library = isinstance(kernel, LibraryKernel)
        name = self.noted(kernel.__name__, sys._getframe(1), storages, library=library)
        with record_function(name):
            self.told += 1
            try:
                yield
            finally:
                self.told -= 1

    def launch_enter(self, metadata: Any) -> None:
        """Triton's hook: also called for launches that nobody announced."""
        if self.told:
            return
        name = str(metadata.get().get("name", "")) if metadata is not None else ""
        scope = record_function(self.noted(name, sys._getframe(1), None))
        scope.__enter__()
        self.ranges.append(scope)

    def launch_exit(self, metadata: Any) -> None:
        if not self.told:
            self.ranges.pop().__exit__(None, None, None)

    def noted(
        self,
        name: str,
        near: FrameType,
        storages: dict[int, int] | None,
        *,
        library: bool = False,
    ) -> str:
        """Notes a launch made at or above the frame `near`; the name of its range. A library's
        kernel is not written, whoever calls it."""
        # A compiler launches its own kernels: they are its line's that was compiled, not written.
        frame = None if passes(near, COMPILER) else model_frame(near, self.files)
        self.launches.append(
            Launch(
                name=name,
                call=self.call,
                source=frame_line(frame) if frame else self.call_source,
                # Past the model's own files, only code that replaces parts of it launches kernels.
                written=not library
                and frame is not None
                and frame.f_code.co_filename not in self.files,
                storages=storages,
            )
        )
        return f"{LAUNCH}{len(self.launches) - 1}"


def tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


@contextmanager
def recording(model: nn.Module) -> Iterator[Recorder]:
    """Record what runs inside; the model's hooks and Triton's are as before when it ends."""
    recorder = Recorder(model)
    handles = []
    for name, module in model.named_modules():
        enter, leave = partial(recorder.enter, name), partial(recorder.leave, name)
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(leave, with_kwargs=True, always_call=True))
    chains = _triton_hooks()
    for chain, hook in zip(chains, (recorder.launch_enter, recorder.launch_exit), strict=False):
        chain.add(hook)
    observers.append(recorder.launching)
    try:
        with recorder:
            yield recorder
    finally:
        observers.remove(recorder.launching)
        for chain, hook in zip(chains, (recorder.launch_enter, recorder.launch_exit), strict=False):
            chain.remove(hook)
        for handle in handles:
            handle.remove()


def _triton_hooks() -> tuple[Any, ...]:
    """Triton's launch hooks (enter, exit), or none where it has no such thing."""
    try:
        from triton import knobs
    except ImportError:
        return ()
    chains = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return chains if all(hasattr(chain, "add") for chain in chains) else ()
