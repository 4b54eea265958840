"""What the recorder sees past PyTorch's dispatcher, and in forwards that were replaced."""

from typing import Any

import pytest
import torch

from optimized.launches import LibraryKernel, observed, observers
from tests.traces.toy_stack import WIDTH, line_of, tower
from traces.footprint import Footprints, Spec
from traces.outline import layers, outline
from traces.recorder import recording

triton = pytest.importorskip("triton")


class Metadata:
    """What Triton hands to its launch hooks."""

    def get(self) -> dict[str, Any]:
        return {"name": "fused_kernel", "stream": 7}


def test_a_kernel_launched_by_a_replaced_forward_is_written_and_has_its_line() -> None:
    model, inputs = tower(1)
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook

    def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        hooks[0](Metadata())  # the launch
        hooks[1](Metadata())
        return a

    model.storeys[0].meld.forward = forward
    with torch.no_grad(), recording(model) as recorder:
        model(*inputs)
    (launch,) = recorder.launches
    assert (launch.name, launch.written) == ("fused_kernel", True)
    assert recorder.calls[launch.call or 0].module == "storeys.0.meld"
    with open(__file__) as file:
        line = next(n for n, text in enumerate(file, 1) if "# the launch" in text)
    assert launch.source == f"tests/traces/test_recorder.py:{line}"
    assert not hooks[0].calls
    assert not hooks[1].calls


def test_a_launch_that_says_what_it_is_given_is_noted_once() -> None:
    """On a GPU Triton's hooks are called inside it."""
    model, inputs = tower(1)
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook

    def kernel() -> None: ...

    def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with observed(kernel, (a, b, 4)):
            hooks[0](Metadata())
            hooks[1](Metadata())
        return a

    model.storeys[0].meld.forward = forward
    with torch.no_grad(), recording(model) as recorder:
        model(*inputs)
    (launch,) = recorder.launches
    assert launch.name == "kernel"
    assert launch.given is not None
    assert sorted(launch.given.values()) == [4 * WIDTH * 2] * 2
    assert observers == []


def test_a_librarys_kernel_that_a_replaced_forward_launches_is_not_written() -> None:
    model, inputs = tower(1)

    def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with observed(LibraryKernel("tinygemm_bf16", library="FlashInfer"), (a, b)):
            return a

    model.storeys[0].meld.forward = forward
    with torch.no_grad(), recording(model) as recorder:
        model(*inputs)
    (launch,) = recorder.launches
    assert (launch.name, launch.written) == ("tinygemm_bf16", False)
    assert launch.given is not None and len(launch.given) == 2


def test_a_kernel_that_a_compiler_launches_is_not_written() -> None:
    """Inductor hands Triton's hooks on; its kernels come from the line that was compiled."""
    model, inputs = tower(1)
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    generated: dict[str, Any] = {"__name__": "torch._inductor.runtime.launcher", "hooks": hooks}
    exec("def launch(metadata):\n    for hook in hooks:\n        hook(metadata)", generated)

    def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        generated["launch"](Metadata())
        return a

    model.storeys[0].meld.forward = forward
    with torch.no_grad(), recording(model) as recorder:
        model(*inputs)
    (launch,) = recorder.launches
    assert not launch.written
    assert launch.source == line_of("def forward(self, a: Tensor, b: Tensor)")


def test_calls_nest_and_name_their_parents() -> None:
    model, inputs = tower(1)
    with torch.no_grad(), recording(model) as recorder:
        out = model(*inputs)
    assert [(c.module, c.parent) for c in recorder.calls] == [
        ("", None),
        ("storeys.0", 0),
        ("storeys.0.squash", 1),
        ("storeys.0.twins", 1),
        ("storeys.0.meld", 1),
    ]
    assert recorder.outputs == (recorder.values.number(out),)


def test_an_error_inside_a_replaced_forward_leaves_no_hooks_and_no_mode() -> None:
    model, inputs = tower(1)

    def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken kernel")

    model.storeys[0].meld.forward = forward
    with pytest.raises(ValueError, match="broken kernel"), recording(model):
        model(*inputs)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_footprint_counts_the_border_only() -> None:
    model, (h,) = tower(1)
    storey = model.storeys[0]
    footprints = Footprints()
    found = footprints.of(storey, Spec.of(storey, (h,), {}))
    assert found is not None
    weight, rows = WIDTH * WIDTH * 2, h.numel() * 2
    assert found.reads == {
        ("argument", 0): rows,
        ("parameter", "scale"): WIDTH * 2,
        ("parameter", "twins.left"): weight,
        ("parameter", "twins.right"): weight,
    }
    assert found.writes == {("output", 0): rows}
    assert found.matmul
    assert footprints.of(storey, Spec.of(storey, (h.clone(),), {})) is found


class Choosing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > x.mean().item()]


def test_a_forward_that_depends_on_data_has_no_footprint() -> None:
    assert Footprints().of(Choosing(), Spec.of(Choosing(), (torch.randn(4),), {})) is None


def test_the_outline_has_regions_and_the_outermost_list() -> None:
    model, _ = tower(3)
    found = outline(model)
    assert found.layers == layers(model) == ("storeys.0", "storeys.1", "storeys.2")
    assert found.by_name["storeys.1.twins"].region == "twins"
    assert found.by_name[""].region is None
    assert found.by_name["storeys.0.meld"].source == line_of(
        "def forward(self, a: Tensor, b: Tensor)"
    )
    assert layers(torch.nn.Linear(2, 2)) == ()
