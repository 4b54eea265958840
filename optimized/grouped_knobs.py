"""Launch knobs of the grouped products of many pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton

from optimized.change import KnobValue

MAX_SHARED = 232_448  # bytes of shared memory for staged tiles, and half a tile of outputs
FULL_TILES = 192  # pairs an expert, from which large tiles are mostly full
MIN_COLUMNS = 16  # of a tensor core's product
MAX_BOX = 256  # rows that the copy engine moves at a time
BARRIERS = 256  # bytes of shared memory at most that tell when its copies are done
# Gate and up of these for 128 rows are as many sums as 8 warps have registers for. They read 12%
# less than 128 columns do, but were slower on an H200 (F = 320, 2026-11-30): 1522 us, 1489 with the
# copy engine, against 1476 for 128 columns without it (1635 with it).
WIDE_COLUMNS = 160


@dataclass(frozen=True, kw_only=True)
class GroupedKnobs:
    """`row_tile` pairs a program. Per product: its `columns`, the `block` of the sum at a time,
    `stages` of its loads, `warps`. The first computes gate and up of its columns, which need be no
    power of two (160 are 128 and 32). A program goes on through `span` tiles of columns. With
    `bulk` the copy engine fetches the first one's weight, and all of the second one's full tiles.
    """

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
    up_bulk: bool = False
    down_bulk: bool = False

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "GroupedKnobs":
        an_expert = shape["P"] // shape["E"]
        up = min(128, _power(shape["F"]))
        down = min(256, _power(shape["D"]))
        up_block, down_block = (min(64, _power(shape[name])) for name in ("D", "F"))
        if an_expert >= FULL_TILES:
            # The second product took 950 us of an H200 through 10 tiles with the copy engine, 957
            # through 4, and 1007 without it (16384 tokens of a TP8 rank of Beam, 2026-11-30).
            bulk = _boxes(shape)
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
                down_span=10 if bulk else 4,
                down_bulk=bulk,
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
        bulk = (False, True) if many and _boxes(shape) else (False,)
        return {
            "row_tile": (64, 128) if many else (16, 32, 64),
            "up_columns": (128, WIDE_COLUMNS) if many else (32, 64),
            "up_block": (64,) if many else (64, 128),
            "up_stages": (3, 4),
            "up_warps": (8,) if many else (4, 8),
            "up_span": (1,),
            "up_bulk": bulk,
            "down_columns": (128, 256) if many else (64, 128),
            "down_block": (64,) if many else (32, 64),
            "down_stages": (3, 4) if many else (2, 3, 4),
            "down_warps": (4, 8),
            "down_span": (4, 10) if many else (1, 2),
            "down_bulk": bulk,
        }

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        up = self.up_block, self.up_stages, self.up_warps, self.up_span, shape["D"]
        down = self.down_block, self.down_stages, self.down_warps, self.down_span, shape["F"]
        return (
            (self.up_span == 1 or parts(self.up_columns)[1] == 0)
            and self._fits(2 * self.up_columns, *up)
            and self._fits(self.down_columns, *down)
            and (_boxes(shape) or not (self.up_bulk or self.down_bulk))
            and (self._fits_bulk() or not self.down_bulk)
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
            and 2 * (self.row_tile + columns) * block * stages + outputs + BARRIERS <= MAX_SHARED
            and self.row_tile * columns <= (4096 if span > 1 else 5120) * warps
        )

    def _fits_bulk(self) -> bool:
        tile = self.row_tile * self.down_columns
        staged = (self.row_tile + self.down_columns) * self.down_block * self.down_stages
        return self.down_columns <= MAX_BOX and 2 * (tile + staged) + BARRIERS <= MAX_SHARED


def _boxes(shape: Mapping[str, int]) -> bool:
    """Whether there is a copy engine, and rows are multiples of 16 bytes apart, as it needs."""
    return torch.version.hip is None and shape["D"] % 8 == 0 and shape["F"] % 8 == 0


def parts(columns: int) -> tuple[int, int]:
    """The largest power of two in `columns`, and what is left, 0 or a smaller one."""
    wide = 1 << columns.bit_length() - 1
    return wide, columns - wide


def _power(width: int) -> int:
    """The smallest power of two that covers `width` and that a tensor core takes."""
    return max(MIN_COLUMNS, triton.next_power_of_2(width))
