"""Whose bytes, operations and line each kernel of a region of several is."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from optimized.launches import observers
from optimized.triton_support import launch
from tests.traces.device import eager_events, replay_events
from traces.assemble import assemble
from traces.capture import _record
from traces.footprint import Footprints, Spec
from traces.observed import Values, Work
from traces.origins import launched, read
from traces.outline import outline
from traces.split import Part, split
from traces.trace import Kernel, Trace

X, UP, DOWN, OUT, HIDDEN, IDLE = range(6)
# Two rows of three are gathered from UP and from DOWN; IDLE crosses the border and is not used.
REGION = Work(
    reads=((X, 10), (UP, 2000), (DOWN, 1000)),
    writes=((OUT, 10),),
    flops=3030,
    matmul=True,
    peak="bf16",
    products=((frozenset({X, UP}), 2000), (frozenset({DOWN}), 1000)),
    known=frozenset({X, UP, DOWN, OUT, IDLE}),
)
FIRST = Part(time_us=2.0, given={X: 10, UP: 3000, HIDDEN: 40, IDLE: 7})
SECOND = Part(time_us=1.0, given={HIDDEN: 40, DOWN: 1500, OUT: 10, X: 10})


def test_each_kernel_moves_what_it_is_given() -> None:
    first, second = split(REGION, [FIRST, SECOND])
    assert first is not None and second is not None
    assert dict(first.reads) == {X: 10, UP: 2000}
    assert dict(first.writes) == {HIDDEN: 40}
    assert dict(second.reads) == {X: 10, DOWN: 1000, HIDDEN: 40}  # X counts for both
    assert dict(second.writes) == {OUT: 10}
    assert (first.flops, second.flops) == (2020, 1010)
    assert first.matmul and second.matmul


def test_a_kernel_without_a_product_has_none() -> None:
    _, _, last = split(REGION, [FIRST, SECOND, Part(time_us=0.0, given={OUT: 10})])
    assert last is not None and (last.flops, last.matmul) == (0, False)


def test_a_view_counts_as_far_as_it_goes() -> None:
    halves = [Part(time_us=1.0, given={X: 10, UP: 1000})] * 2
    first, second, _ = split(REGION, [*halves, SECOND])
    assert first is not None and second is not None
    assert dict(first.reads)[UP] == dict(second.reads)[UP] == 1000
    assert first.flops == second.flops == round(1000 + 30 / 3)  # the product, too, by time


def test_kernels_of_unknown_arguments_share_what_is_left_by_their_time() -> None:
    library = [Part(time_us=3.0, given=None), Part(time_us=1.0, given=None)]
    first, long, short = split(REGION, [FIRST, *library])
    assert first is not None and long is not None and short is not None
    assert dict(first.reads)[UP] == 2000
    assert dict(long.reads) == {DOWN: 750} and dict(short.reads) == {DOWN: 250}
    assert (sum(n for _, n in long.writes), sum(n for _, n in short.writes)) == (8, 2)
    nothing = split(REGION, [FIRST, SECOND, library[0]])
    assert nothing[2] is None


def test_the_only_kernel_of_a_region_does_all_of_it() -> None:
    assert split(REGION, [Part(time_us=1.0, given={X: 10})]) == [REGION]


# --- through the recorder, with Triton's interpreter ----------------------------------------------

WIDTH, INNER, COUNT = 16, 8, 4


@triton.jit
def up_kernel(x_ptr, chosen_ptr, weight_ptr, hidden_ptr, D: tl.constexpr, F: tl.constexpr):
    pair, column, row = tl.program_id(0), tl.arange(0, F), tl.arange(0, D)
    which = tl.load(chosen_ptr + pair)
    w = tl.load(weight_ptr + which * F * D + column[:, None] * D + row[None, :])
    total = tl.sum(w * tl.load(x_ptr + row)[None, :], 1)
    tl.store(hidden_ptr + pair * F + column, total)


@triton.jit
def down_kernel(hidden_ptr, chosen_ptr, weight_ptr, out_ptr, D: tl.constexpr, F: tl.constexpr):
    pair, column, row = tl.program_id(0), tl.arange(0, F), tl.arange(0, D)
    which = tl.load(chosen_ptr + pair)
    w = tl.load(weight_ptr + which * F * D + row[:, None] * F + column[None, :])
    hidden = tl.load(hidden_ptr + pair * F + column)
    tl.store(out_ptr + pair * D + row, tl.sum(w * hidden[None, :], 1))


def small(*shape: int) -> Tensor:
    """Whole numbers, whose sums are exact in any order."""
    return torch.randint(-2, 3, shape).float()


class Chosen(nn.Module):
    """x [D], chosen [K] -> [K, D]: two products with the chosen matrices of each stack."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(small(COUNT, INNER, WIDTH))
        self.down = nn.Parameter(small(COUNT, WIDTH, INNER))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        hidden = torch.matmul(self.up[chosen], x[:, None])
        return torch.matmul(self.down[chosen], hidden).squeeze(-1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Chosen() for _ in range(2))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, chosen).mean(0)
        return x


def two_kernels(node: Chosen) -> Callable[[Tensor, Tensor], Tensor]:
    def forward(x: Tensor, chosen: Tensor) -> Tensor:
        hidden, out = torch.empty(len(chosen), INNER), torch.empty(len(chosen), WIDTH)
        sizes: dict[str, Any] = {"D": WIDTH, "F": INNER, "num_warps": 1}
        grid = (len(chosen),)
        launch(up_kernel, grid, x, chosen, node.up, hidden, **sizes)  # the first
        shared_helper(down_kernel, grid, hidden, chosen, node.down, out, **sizes)  # the second
        return out

    return forward


def shared_helper(*arguments: Any, **options: Any) -> None:
    __tracebackhide__ = True
    launch(*arguments, **options)


def line_of(text: str) -> str:
    with open(__file__) as file:
        line = next(n for n, found in enumerate(file, 1) if text in found)
    return f"tests/traces/test_split.py:{line}"


@pytest.fixture(scope="module")
def traced() -> Trace:
    model = Model().requires_grad_(False)
    inputs = small(WIDTH), torch.tensor([2, 0])
    expected = model(*inputs)
    for layer in model.layers:
        assert isinstance(layer, Chosen)
        layer.forward = two_kernels(layer)
    assert torch.equal(model(*inputs), expected)
    recorder, host = _record(model, inputs, torch.device("cpu"))
    eager = eager_events(host, recorder)
    names = [(kernel.name, 2.0) for kernel in launched(recorder, eager)]
    launches, timed = read(recorder, eager, replay_events(names), "cuda")
    return assemble(
        recorder,
        launches,
        timed,
        outline=outline(model),
        device="cuda",
        mode="graph",
        step_times_us=[100.0],
        title="chosen",
    )


def named(trace: Trace, name: str) -> list[Kernel]:
    return [k for k in trace.kernels if k.name == name]


def test_a_kernel_is_at_the_line_that_calls_the_launch(traced: Trace) -> None:
    up, down = named(traced, "up_kernel"), named(traced, "down_kernel")
    assert [traced.module(k) for k in up] == ["layers.0", "layers.1"]
    assert {k.source for k in up} == {line_of("# the first")}
    assert {k.source for k in down} == {line_of("# the second")}


def test_two_kernels_share_a_region_by_the_tensors_they_are_given(traced: Trace) -> None:
    rows, chosen = 2 * INNER * WIDTH * 4, 2 * 8
    hidden, x, out = 2 * INNER * 4, WIDTH * 4, 2 * WIDTH * 4
    for up, down in zip(named(traced, "up_kernel"), named(traced, "down_kernel"), strict=True):
        assert sorted(n for _, n in up.reads) == sorted([rows, chosen, x])
        assert [n for _, n in up.writes] == [hidden]
        assert sorted(n for _, n in down.reads) == sorted([rows, chosen, hidden])
        assert [n for _, n in down.writes] == [out]
        assert up.flops == down.flops == 2 * 2 * INNER * WIDTH
        assert {v for v, _ in up.writes} < {v for v, _ in down.reads}


def test_each_call_has_intermediates_of_its_own(traced: Trace) -> None:
    """The first call's memory is free when the second asks for some."""
    first, second = (k.writes[0][0] for k in named(traced, "up_kernel"))
    assert first != second


def test_what_a_replaced_step_must_read_is_what_the_reference_must(traced: Trace) -> None:
    rows, chosen, x = 2 * INNER * WIDTH * 4, 2 * 8, WIDTH * 4
    assert traced.compulsory_bytes == 2 * 2 * rows + chosen + x
    older = replace(traced, must_read_bytes=None)
    assert older.compulsory_bytes == traced.compulsory_bytes


def test_nobody_watches_when_the_step_has_ended(traced: Trace) -> None:
    assert traced.kernels
    assert observers == []


def test_a_storages_number_is_its_own_though_its_memory_is_used_again() -> None:
    values, numbers = Values(), set()
    for _ in range(50):
        numbers.add(values.number(torch.empty(64)))
    assert len(numbers) == 50


def test_views_of_one_storage_are_added_up_and_equal_ones_count_once() -> None:
    values, packed = Values(), torch.zeros(10, 4)
    found = values.storages([packed[:3], packed[3:7], packed[:3], packed.T])
    assert list(found.values()) == [packed.nbytes]
    assert list(values.storages([packed[:3], packed[3:7], packed[:3]]).values()) == [7 * 4 * 4]


# --- footprints -----------------------------------------------------------------------------------


@dataclass
class Store:
    keys: Tensor


class Keeping(nn.Module):
    """Writes one row to a store and reads all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, store: Store) -> Tensor:
        store.keys[2:3] = self.scale(x)
        return store.keys @ x[0]


def test_what_an_argument_holds_crosses_the_border() -> None:
    node, store = Keeping().requires_grad_(False), Store(torch.zeros(8, 4))
    found = Footprints().of(node, Spec.of(node, (torch.ones(1, 4), store), {}))
    assert found is not None
    assert found.reads[("held", (1, "keys"))] == store.keys.nbytes
    assert found.writes[("held", (1, "keys"))] == 4 * 4
    assert not store.keys.any()  # only stand-ins were written


def test_what_is_replaced_inside_runs_as_written_and_stays_replaced() -> None:
    node, store = Keeping().requires_grad_(False), Store(torch.zeros(8, 4))

    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("a kernel takes no fake tensors")

    node.scale.forward = broken
    found = Footprints().of(node, Spec.of(node, (torch.ones(1, 4), store), {}))
    assert found is not None and found.reads[("parameter", "scale.weight")] == 64
    assert node.scale.forward is broken


def test_parameters_in_one_storage_count_together() -> None:
    node = Twice().requires_grad_(False)
    found = Footprints().of(node, Spec.of(node, (torch.ones(4),), {}))
    assert found is not None
    weights = sum(n for (kind, _), n in found.reads.items() if kind == "parameter")
    assert weights == 2 * 3 * 4 * 4


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        packed = torch.randn(6, 4)
        self.a, self.b = nn.Parameter(packed[:3]), nn.Parameter(packed[3:])

    def forward(self, x: Tensor) -> Tensor:
        return self.a @ x + self.b @ x


def test_a_row_that_is_looked_up_twice_counts_once() -> None:
    node, x = Chosen().requires_grad_(False), small(WIDTH)
    row = INNER * WIDTH * 4
    for chosen, count in (([2, 0, 2], 2), ([1, 1, 1], 1), ([0, 1, 2], 3)):
        found = Footprints().of(node, Spec.of(node, (x, torch.tensor(chosen)), {}))
        assert found is not None
        assert found.reads[("parameter", "up")] == found.reads[("parameter", "down")] == count * row


def test_the_references_own_look_ups_count_a_row_once() -> None:
    model = Model().requires_grad_(False)
    recorder, _ = _record(model, (small(WIDTH), torch.tensor([2, 0, 2])), torch.device("cpu"))
    row = INNER * WIDTH * 4
    looked_up = [o.work for o in recorder.operators if o.name == "aten::index"]
    assert len(looked_up) == 4
    for work in looked_up:
        assert sorted(n for _, n in work.reads) == [3 * 8, 2 * row]
        assert [n for _, n in work.writes] == [3 * row]
