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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from optimized.change import KnobValue
from optimized.expert_sort import SortedPairs, sort_pairs
from optimized.grouped_kernels import grouped_down_kernel, grouped_up_kernel
from optimized.triton_support import OfflineCase, launch

MAX_SHARED = 232_448  # bytes of shared memory for staged tiles, and half a tile of outputs
FULL_TILES = 192  # pairs an expert, from which large tiles are mostly full
MIN_COLUMNS = 16  # of a tensor core's product
# Gate and up of these for 128 rows are as many sums as 8 warps have registers for. What limits an
# H200 is how fast tiles come from its L2 cache, about 7.5 TB/s: with 128 columns the first product
# ran at 577 TFLOP/s (F = 320, 2026-11-30), and these read 12% less.
WIDE_COLUMNS = 160


@dataclass(frozen=True, kw_only=True)
class GroupedKnobs:
    """`row_tile` pairs a program. Per product: its `columns`, the `block` of the sum at a time,
    `stages` of its loads, `warps`. The first computes gate and up of its columns, which need be no
    power of two (160 are 128 and 32). A program goes on through `span` tiles of columns. The second
    leaves its full tiles to the copy engine if `down_bulk`."""

    row_tile: int
    up_columns: int
    up_block: int
    up_stages: int
    up_warps: int
    up_span: int
    down_columns: int
    down_block: int
    down_stages: int
    down_warps: int
    down_span: int
    down_bulk: bool = False

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "GroupedKnobs":
        an_expert = shape["P"] // shape["E"]
        up = min(128, _power(shape["F"]))
        if an_expert >= FULL_TILES and shape["F"] % WIDE_COLUMNS == 0:
            up = WIDE_COLUMNS
        down = min(256, _power(shape["D"]))
        up_block, down_block = (min(64, _power(shape[name])) for name in ("D", "F"))
        if an_expert >= FULL_TILES:
            return cls(
                row_tile=128,
                up_columns=up,
                up_block=up_block,
                up_stages=4,
                up_warps=8,
                up_span=1,
                down_columns=down,
                down_block=down_block,
                down_stages=3,
                down_warps=8,
                down_span=4,
                down_bulk=_boxes(shape),
            )
        row_tile = min(64, max(16, triton.next_power_of_2(an_expert)))
        return cls(
            row_tile=row_tile,
            up_columns=min(32, up),
            up_block=min(128, _power(shape["D"])),
            up_stages=4,
            up_warps=4,
            up_span=1,
            down_columns=min(64, down),
            down_block=down_block,
            down_stages=4,
            down_warps=4,
            down_span=1,
        )

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        many = shape["P"] // shape["E"] >= FULL_TILES
        return {
            "row_tile": (64, 128) if many else (16, 32, 64),
            "up_columns": (64, 128, WIDE_COLUMNS) if many else (32, 64),
            "up_block": (64,) if many else (64, 128),
            "up_stages": (3, 4),
            "up_warps": (4, 8),
            "up_span": (1, 5) if many else (1,),
            "down_columns": (128, 256) if many else (64, 128),
            "down_block": (32, 64),
            "down_stages": (2, 3, 4),
            "down_warps": (4, 8),
            "down_span": (1, 2, 4, 10) if many else (1, 2),
            "down_bulk": (False, True) if many and _boxes(shape) else (False,),
        }

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        up = self.up_block, self.up_stages, self.up_warps, self.up_span, shape["D"]
        down = self.down_block, self.down_stages, self.down_warps, self.down_span, shape["F"]
        return (
            (self.up_span == 1 or _parts(self.up_columns)[1] == 0)
            and self._fits(2 * self.up_columns, *up)
            and self._fits(self.down_columns, *down)
            and (not self.down_bulk or self._fits_boxes(shape))
        )

    def _fits(
        self, columns: int, block: int, stages: int, warps: int, span: int, depth: int
    ) -> bool:
        # Where the loop goes on, half a tile of outputs has its place beside the staged tiles, and
        # a thread holds 128 sums, otherwise 160.
        outputs = self.row_tile * columns if span > 1 else 0
        return (
            columns >= MIN_COLUMNS
            and MIN_COLUMNS <= block < 2 * max(MIN_COLUMNS, depth)
            and 2 * (self.row_tile + columns) * block * stages + outputs <= MAX_SHARED
            and self.row_tile * columns <= (4096 if span > 1 else 5120) * warps
        )

    def _fits_boxes(self, shape: Mapping[str, int]) -> bool:
        tile = self.row_tile * self.down_columns
        staged = (self.row_tile + self.down_columns) * self.down_block * self.down_stages
        return _boxes(shape) and self.down_columns <= 256 and 2 * (tile + staged) <= MAX_SHARED - 64


def _boxes(shape: Mapping[str, int]) -> bool:
    """Whether there is a copy engine, and rows are multiples of 16 bytes apart, as it needs."""
    return torch.version.hip is None and shape["D"] % 8 == 0 and shape["F"] % 8 == 0


def _parts(columns: int) -> tuple[int, int]:
    """The largest power of two in `columns`, and what is left, 0 or a smaller one."""
    wide = 1 << columns.bit_length() - 1
    return wide, columns - wide


def _power(width: int) -> int:
    """The smallest power of two that covers `width` and that a tensor core takes."""
    return max(MIN_COLUMNS, triton.next_power_of_2(width))


def up_product(
    node: Any, x: Tensor, order: SortedPairs, knobs: GroupedKnobs, rounded: bool = False
) -> Tensor:
    """x [N, D] BF16 with contiguous rows -> every pair's hidden values [P, F] BF16, sorted; silu is
    `rounded` before its product, or not."""
    width, inner = node.down_proj.shape[1:]
    hidden = torch.empty((len(order.tokens), inner), dtype=x.dtype, device=x.device)
    wide, extra = _parts(knobs.up_columns)
    launch(
        grouped_up_kernel,
        (len(order.tiles) * triton.cdiv(inner, knobs.up_columns * knobs.up_span),),
        x,
        order.tokens,
        order.tiles,
        order.used,
        node.gate_up_proj,
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


def offline_cases() -> list[OfflineCase]:
    """A prefill of 16384 tokens and a decode of 128, on one of eight tensor-parallel ranks: experts
    5120 wide, and the first product of experts 4096 wide with silu rounded."""
    pointers = {f"{name}_ptr": "*bf16" for name in ("x", "weight", "hidden", "y")}
    pointers |= {f"{name}_ptr": "*i32" for name in ("tokens", "tiles", "used")}
    cases = []
    for width, inner, rounded in ((5120, 320, False), (4096, 512, True)):
        for pairs in (131072, 1024):
            knobs = GroupedKnobs.heuristic({"P": pairs, "E": 256, "D": width, "F": inner})
            products = (grouped_up_kernel, "up"), (grouped_down_kernel, "down")
            for kernel, part in products[: 1 if rounded else 2]:
                values = {"D": width, "F": inner, "ROWS": knobs.row_tile}
                for name in ("columns", "block", "stages", "span"):
                    values[name.upper()] = getattr(knobs, f"{part}_{name}")
                if part == "up":
                    wide, extra = _parts(knobs.up_columns)
                    values |= {"COLUMNS": wide, "EXTRA": extra, "ROUNDED": rounded}
                else:
                    values["BULK"] = knobs.down_bulk
                kinds = {**pointers, "x_stride": "i32:16", **dict.fromkeys(values, "constexpr")}
                rows, columns, block = knobs.row_tile, knobs.down_columns, knobs.down_block
                boxes = {"hidden": (rows, block), "weight": (columns, block), "y": (rows, columns)}
                for name, (high, wide) in boxes.items():
                    box = f"tensordesc<bf16[{high},{wide}]>"
                    kinds[f"{name}_box"] = box if knobs.down_bulk else "*bf16"
                signature = {name: kinds[name] for name in kernel.arg_names if name != "PDL"}
                warps = getattr(knobs, f"{part}_warps")
                cases.append(OfflineCase(kernel, signature, values, warps))
    return cases
