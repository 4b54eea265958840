"""Several projections of one input as one product with a packed weight.

    y_i = R(x W_i^T)  for siblings i, all of them slices of  y = R(x W^T),  W = [W_1; W_2; ...]

x [B, T, D], W_i [O_i, D], BF16; FP32 accumulation, one rounding. The weights are packed into one
buffer when the change is applied (`optimized.packing`); state dict names and shapes stay. The
outputs are slices of one tensor: their rows are further apart than they are long.

Launches: one instead of one a sibling. "torch" leaves the product to the library; "triton" computes
it itself for up to 16 rows (`optimized.gemv`), beyond which it leaves it to the library too.
"inductor" packs nothing: it computes all products of a single row in one compiled call on a CPU
(`optimized.matvec`), and calls the library for each sibling where there are more rows.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimized import gemv, matvec
from optimized.change import Change, Contract, Implementation
from optimized.gemv import GemvKnobs
from optimized.packing import are_adjacent, pack, packed
from optimized.triton_support import outside_domain

# Where each node's weights were when they were last found to be adjacent.
_checked: WeakKeyDictionary[nn.Module, tuple[int, ...]] = WeakKeyDictionary()


def prepare(parent: nn.Module, node: Any) -> None:
    """Pack the weights of the siblings `node.names` of `parent`."""
    pack(tuple(getattr(parent, name).weight for name in node.names))


def guard(node: nn.Module, x: Tensor, *weights: Tensor) -> str | None:
    """Why the packed product cannot serve this call, or None."""
    if torch.compiler.is_compiling():
        return None
    places = tuple([weight.data_ptr() for weight in weights])
    if _checked.get(node) == places:
        return None
    if not weights or not are_adjacent(weights):
        return "the weights are not packed: they are not adjacent slices of one buffer"
    _checked[node] = places
    return None


def triton_guard(node: nn.Module, x: Tensor, *weights: Tensor) -> str | None:
    """Why the kernel cannot serve this call, or None."""
    if (reason := guard(node, x, *weights)) is not None:
        return reason
    if x.numel() > gemv.MAX_ROWS * x.shape[-1]:
        return None
    return outside_domain(x=x, weight=weights[0]) or gemv.outside_rows(x)


def shape(node: nn.Module, x: Tensor, *weights: Tensor) -> dict[str, int]:
    """M rows, O outputs of all siblings together, D inputs."""
    return gemv.sizes(x, sum(weight.shape[0] for weight in weights))


class _Packed:
    """The packed view of a node's weights, made again only when they have moved."""

    def __init__(self) -> None:
        self.place = 0
        self.weight: Tensor | None = None
        self.rows: list[int] = []

    def __call__(self, weights: tuple[Tensor, ...]) -> Tensor:
        if self.weight is None or weights[0].data_ptr() != self.place:
            self.place = weights[0].data_ptr()
            self.weight = packed(weights)
            self.rows = [weight.shape[0] for weight in weights]
        return self.weight


def build(node: nn.Module, knobs: Any):
    """(x [B, T, D], weights [Oi, D]...) -> tuple of [B, T, Oi], slices of one tensor."""
    view = _Packed()

    def forward(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():  # as a part of a larger region
            return node(x, *weights)
        weight = view(weights)
        return torch.split(F.linear(x, weight), view.rows, dim=-1)

    return forward


def build_triton(node: nn.Module, knobs: GemvKnobs | None):
    """The same, up to 16 rows by `optimized.gemv`."""
    gemv.check(knobs)
    view = _Packed()

    def forward(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():
            return node(x, *weights)
        weight = view(weights)
        few = x.numel() <= gemv.MAX_ROWS * x.shape[-1]
        y = gemv.multiply(x, weight, knobs) if few else F.linear(x, weight)
        return torch.split(y, view.rows, dim=-1)

    return forward


def build_inductor(node: nn.Module, knobs: Any):
    """The same from weights as they are, a single row by `optimized.matvec`."""
    products = matvec.row_products()

    def forward(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        if matvec.is_row(x) and not torch.compiler.is_compiling():
            return products(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    return forward


CHANGE = Change(
    name="parallel_projection",
    region="parallel_projection",
    summary="sibling projections packed into one product",
    contract=Contract(numerics="reduction"),
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build_triton,
            guard=triton_guard,
            prepare=prepare,
            knobs=GemvKnobs,
            shape=shape,
        ),
        Implementation(backend="inductor", devices=("cpu",), build=build_inductor),
        Implementation(
            backend="torch",
            devices=("cpu", "cuda"),
            build=build,
            guard=guard,
            prepare=prepare,
        ),
    ),
)
