"""The routed SwiGLU experts of many tokens: two grouped matrix products over sorted pairs.

    gate, up = R(W_gate x), R(W_up x)      of each pair's token and expert
    hidden   = R(silu(gate) * up), or R(R(silu(gate)) * up)
    y        = R(W_down hidden)            [P, D], in the sorted order

R rounds to BF16; sums are FP32, on tensor cores. N tokens, K experts a token, P = N K pairs, E
experts, D hidden, F feed-forward width. All rounding points are kept; none is added.

The rows of x are read where they are, through the sorted pairs' tokens. Gate and up rows of the
weight alternate in a tile, so that both values of an output are neighbours in one thread and SwiGLU
needs no exchange. The second product's sums are short, and storing a tile by its threads would take
about half as long as making it: NVIDIA's copy engine stores full ones, while the next is made.

6 P D F operations: 1.29 TFLOP for 16384 tokens of a TP8 rank of Beam (K = 8, D = 5120, F = 320),
1.6 ms at an H200's 793 TFLOP/s (2026-11-29). Tiles are of one expert, so its last one is partly
empty; the half-empty ones are computed by halves.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from optimized.expert_sort import SortedPairs, sort_pairs
from optimized.grouped_down import grouped_down_kernel
from optimized.grouped_knobs import GroupedKnobs, parts
from optimized.grouped_up import grouped_up_kernel
from optimized.triton_support import OfflineCase, launch


def up_product(
    node: Any, x: Tensor, order: SortedPairs, knobs: GroupedKnobs, rounded: bool = False
) -> Tensor:
    """x [N, D] BF16 with contiguous rows -> every pair's hidden values [P, F] BF16, sorted; silu is
    `rounded` before its product, or not."""
    width, inner = node.down_proj.shape[1:]
    hidden = torch.empty((len(order.tokens), inner), dtype=x.dtype, device=x.device)
    wide, extra = parts(knobs.up_columns)
    boxes: list[Any] = [node.gate_up_proj, node.gate_up_proj]  # not read
    if knobs.up_bulk:
        weight = node.gate_up_proj.detach().view(-1, inner, width)
        for i, columns in enumerate((wide, extra or wide)):
            boxes[i] = TensorDescriptor.from_tensor(weight, [2, columns, knobs.up_block])
    launch(
        grouped_up_kernel,
        (len(order.tiles) * triton.cdiv(inner, knobs.up_columns * knobs.up_span),),
        x,
        order.tokens,
        order.tiles,
        order.used,
        node.gate_up_proj,
        *boxes,
        hidden,
        x.stride(0),
        D=width,
        F=inner,
        ROWS=knobs.row_tile,
        COLUMNS=wide,
        EXTRA=extra,
        BLOCK=knobs.up_block,
        STAGES=knobs.up_stages,
        SPAN=knobs.up_span,
        ROUNDED=rounded,
        BULK=knobs.up_bulk,
        num_warps=knobs.up_warps,
    )
    return hidden


def down_product(node: Any, hidden: Tensor, order: SortedPairs, knobs: GroupedKnobs) -> Tensor:
    """hidden [P, F] BF16, sorted -> every pair's output [P, D] BF16, sorted."""
    width, inner = node.down_proj.shape[1:]
    y = torch.empty((len(hidden), width), dtype=hidden.dtype, device=hidden.device)
    boxes: list[Any] = [hidden, node.down_proj, y]  # not read
    if knobs.down_bulk:
        rows, columns, block = knobs.row_tile, knobs.down_columns, knobs.down_block
        boxes = [
            TensorDescriptor.from_tensor(x, box)
            for x, box in (
                (hidden, [rows, block]),
                (node.down_proj.detach().flatten(0, 1), [columns, block]),
                (y, [rows, columns]),
            )
        ]
    launch(
        grouped_down_kernel,
        (len(order.tiles) * triton.cdiv(width, knobs.down_columns * knobs.down_span),),
        hidden,
        boxes[0],
        order.tiles,
        order.used,
        node.down_proj,
        boxes[1],
        y,
        boxes[2],
        D=width,
        F=inner,
        ROWS=knobs.row_tile,
        COLUMNS=knobs.down_columns,
        BLOCK=knobs.down_block,
        STAGES=knobs.down_stages,
        SPAN=knobs.down_span,
        BULK=knobs.down_bulk,
        num_warps=knobs.down_warps,
    )
    return y


def grouped_experts(
    node: Any, x: Tensor, experts: Tensor, knobs: GroupedKnobs | None, rounded: bool = False
) -> tuple[Tensor, SortedPairs]:
    """x [N, D] BF16 with contiguous rows, experts [N, K] int64 -> every pair's output [P, D] BF16
    in the sorted order, and that order. P may not be 0."""
    count, width, inner = node.down_proj.shape
    sizes = {"P": experts.numel(), "E": count, "D": width, "F": inner}
    chosen = knobs or GroupedKnobs.heuristic(sizes)
    order = sort_pairs(experts, count, chosen.row_tile)
    hidden = up_product(node, x, order, chosen, rounded)
    return down_product(node, hidden, order, chosen), order


def _cases(knobs: GroupedKnobs, width: int, inner: int, rounded: bool) -> list[OfflineCase]:
    pointers = {f"{name}_ptr": "*bf16" for name in ("x", "weight", "hidden", "y")}
    pointers |= {f"{name}_ptr": "*i32" for name in ("tokens", "tiles", "used")}
    pointers |= {"x_stride": "i32:16"}
    wide, extra = parts(knobs.up_columns)
    up_boxes = {"weight": (2, wide, knobs.up_block), "extra": (2, extra or wide, knobs.up_block)}
    rows, columns, block = knobs.row_tile, knobs.down_columns, knobs.down_block
    down_boxes = {"hidden": (rows, block), "weight": (columns, block), "y": (rows, columns)}
    cases = []
    for kernel, part, boxes in (
        (grouped_up_kernel, "up", up_boxes),
        (grouped_down_kernel, "down", down_boxes),
    ):
        values = {"D": width, "F": inner, "ROWS": knobs.row_tile}
        for name in ("columns", "block", "stages", "span", "bulk"):
            values[name.upper()] = getattr(knobs, f"{part}_{name}")
        if part == "up":
            values |= {"COLUMNS": wide, "EXTRA": extra, "ROUNDED": rounded}
        kinds = {**pointers, **dict.fromkeys(values, "constexpr")}
        for name, box in boxes.items():
            text = f"tensordesc<bf16[{','.join(map(str, box))}]>"
            kinds[f"{name}_box"] = text if values["BULK"] else "*bf16"
        signature = {name: kinds[name] for name in kernel.arg_names if name != "PDL"}
        cases.append(OfflineCase(kernel, signature, values, getattr(knobs, f"{part}_warps")))
    return cases


def offline_cases() -> list[OfflineCase]:
    """A prefill of 16384 tokens and a decode of 128, on one of eight tensor-parallel ranks: experts
    5120 wide, also with the other way to fetch the first weight, and the first product of experts
    4096 wide with silu rounded."""
    cases = []
    for pairs in (131072, 1024):
        knobs = GroupedKnobs.heuristic({"P": pairs, "E": 256, "D": 5120, "F": 320})
        cases += _cases(knobs, 5120, 320, False)
        if pairs == 131072:
            other = replace(knobs, up_bulk=not knobs.up_bulk)
            cases.append(_cases(other, 5120, 320, False)[0])
        knobs = GroupedKnobs.heuristic({"P": pairs, "E": 256, "D": 4096, "F": 512})
        cases.append(_cases(knobs, 4096, 512, True)[0])
    return cases
