"""One step of a model, ready to be run again and again: eager, or one captured CUDA graph.

A step is repeatable. A decode runs at the same position each time and writes the same keys and
values to the same slots. A prefill overwrites the sliding layers' rings with its own tokens, which
its next run then sees as the past: other values, the same work, so the same time.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from torch import nn

from harness.errors import UserError
from harness.trees import leaves
from optimized.change import share

Mode = Literal["eager", "graph"]
MODES = "eager", "graph"
WARM_UPS = 3  # runs before a capture: cuBLAS and Triton set themselves up in the first


class HasArgs(Protocol):
    """Anything with the positional arguments of one call, such as `StepInputs`."""

    @property
    def args(self) -> tuple[Any, ...]: ...


class Step:
    """`model(*inputs.args)`, repeatable; calling it runs it once, and `output` is the last result.

    `model` is a module or any function, `inputs` has `.args` or is a tuple of arguments. In mode
    "graph" the call is captured once in a CUDA graph and replayed: write fresh values into the
    tensors of `inputs` to run it on those, and copy `output`, which the next replay overwrites.
    Everything runs under `torch.no_grad()`, never inference mode, whose tensors would make compiled
    code recompile. UserError for a graph on a CPU, or for one whose memory the card has not free.
    """

    def __init__(
        self, model: Callable[..., Any], inputs: HasArgs | tuple[Any, ...], mode: Mode
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; choose one of {', '.join(MODES)}")
        self.model = model
        self.inputs = inputs
        self.args: tuple[Any, ...] = inputs if isinstance(inputs, tuple) else inputs.args
        self.mode: Mode = mode
        self.device = device_of(model, self.args)
        if mode == "graph" and self.device.type != "cuda":
            raise UserError(f"{self.device.type} has no CUDA graphs; use mode 'eager'")
        self.graph: torch.cuda.CUDAGraph | None = None
        self.output: Any = None
        self.launch_us = 0.0  # host time to start one replay of the graph
        self._eager()
        if mode == "graph":
            self._capture()

    def __call__(self) -> Any:
        if self.mode == "graph":
            if self.graph is None:
                raise ValueError("this step was closed; make a new one")
            self.graph.replay()
        else:
            self._eager()
        return self.output

    def __enter__(self) -> "Step":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the graph's memory back to the card; the step cannot be run any more."""
        self.output = None
        if self.graph is not None:
            torch.cuda.synchronize(self.device)  # a replay that still runs would lose its memory
            self.graph.reset()
            self.graph = None
            torch.cuda.empty_cache()

    def twin(self) -> "Step":
        """The same step built once more as a candidate's would be: its own module tree over the
        same weights, its own graph. What differs between the two is noise."""
        model = share(self.model) if isinstance(self.model, nn.Module) else self.model
        return Step(model, self.inputs, self.mode)

    def _eager(self) -> None:
        with torch.no_grad():
            self.output = self.model(*self.args)

    def _capture(self) -> None:
        with torch.cuda.device(self.device):
            self._warm_up()
            graph = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(graph):
                self.output = self.model(*self.args)
            self.graph = graph
            self.launch_us = self._measure_launch()

    def _warm_up(self) -> None:
        """Run on a side stream, as a capture needs, and make sure that a graph fits: its pool holds
        a run's temporary tensors for as long as the graph lives."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._eager()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        needed = torch.cuda.max_memory_allocated() - held
        self.output = None
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        if needed > free:
            raise UserError(
                f"a CUDA graph of this step would hold {needed / 2**30:.1f} GiB, the card has "
                f"{free / 2**30:.1f} GiB free; run it in mode 'eager', or choose a smaller preset"
            )

    def _measure_launch(self) -> float:
        assert self.graph is not None
        times = []
        for _ in range(WARM_UPS):
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            self.graph.replay()
            times.append((time.perf_counter_ns() - start) / 1e3)
        torch.cuda.synchronize()
        return statistics.median(times)


def default_mode(device: torch.device) -> Mode:
    """How a step is best run on `device`: one graph on CUDA, eager on a CPU."""
    return "graph" if device.type == "cuda" else "eager"


def device_of(model: Callable[..., Any], args: tuple[Any, ...]) -> torch.device:
    """The device of the first tensor among `args`, else of the model's first parameter."""
    for _, tensor in leaves(args):
        return tensor.device
    if isinstance(model, nn.Module):
        for tensor in model.parameters():
            return tensor.device
    return torch.device("cpu")
