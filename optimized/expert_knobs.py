"""Launch knobs of the routed experts: of few pairs, with weights read in place, and of many."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import triton

from optimized import experts_cute
from optimized.change import KnobValue
from optimized.gemv_engines import CUTE, OWN
from optimized.grouped_experts import GroupedKnobs

MAX_PAIRS = 64  # beyond, pairs share experts and a grouped matrix product reads less
MAX_UNROLL = 20  # steps of the unrolled loops; more run out of registers and compile slowly
MAX_TILE = 8192  # partial sums a program holds, of each matrix
MAX_HELD = 160  # weights that a thread holds, in half as many registers
LOOPING = 660  # programs of a loop over tiles: five on each of 132 SMs
MAX_STAGED = 100_000  # bytes of shared memory a program, so that two fit an SM
# What says nothing to the CuTe DSL kernels.
UNSAID = {"up_rows": 1, "up_block": 256, "down_block": 64, "down_held": 0, "down_across": False}


@dataclass(frozen=True, kw_only=True)
class ExpertsKnobs:
    """Per kernel: `rows` of outputs a program, the `block` of the sum at a time, `warps`. The first
    has `stages` of a pipelined loop, or 0 for an unrolled one, and a program for every tile of rows
    or `up_programs` that loop over all tiles. The second holds the weights of its first `down_held`
    slots before the first is done, or with its slots `down_across` the threads, so much of each.

    `engine` is whose kernels they are. To CuTe DSL's, for one token, `up_stages` are those of a
    warp's ring, `up_programs` always loop, and what says nothing is as in `UNSAID`."""

    up_rows: int
    up_block: int
    up_warps: int
    up_stages: int
    down_rows: int
    down_block: int
    down_warps: int
    down_held: int
    up_programs: int = 0
    down_across: bool = False
    engine: str = OWN

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "ExpertsKnobs":
        up_block, down_block = _block(shape["D"], 1024), _block(shape["F"], 64)
        rows = 8 if shape["F"] <= 512 else 4
        a_slot = rows * down_block * triton.cdiv(shape["F"], down_block) // 128
        held = min(shape["K"], MAX_HELD // max(1, a_slot))
        # One token's experts, in a whole step of Beam on an H200: 2589 us with a program for every
        # tile and the slots one after the other, 2520 as here (2026-11-30).
        narrow = shape["P"] <= shape["K"] and shape["F"] <= 512
        return cls(
            up_rows=2,
            up_block=up_block,
            up_warps=4,
            up_stages=5 if narrow else 4,
            down_rows=rows,
            down_block=down_block,
            down_warps=4,
            down_held=min(held, max(1, shape["K"] - 1)) if narrow else held,
            up_programs=LOOPING if narrow else 0,
            down_across=narrow,
        )

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        engines = experts_cute.offered(shape)
        choices = {
            "up_rows": (1, 2, 4, 8),
            "up_block": (256, 512, 1024, 2048),
            "up_warps": (2, 4, 8),
            "up_stages": (0, 2, 3, 4, 5, 6),
            "up_programs": (0, 264, 396, 528, 660, 924),
            "down_rows": (2, 4, 8, 16),
            "down_block": (64, 128, 256, 512),
            "down_warps": (2, 4, 8),
            "down_held": tuple(sorted({0, shape["K"] // 4, shape["K"] // 2, *_most(shape["K"])})),
            "down_across": (False, True),
        }
        if engines == (OWN,):
            return choices
        return {**choices, "up_programs": (0, 132, *choices["up_programs"][1:]), "engine": engines}

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        if self.engine != OWN:
            unsaid = all(getattr(self, name) == value for name, value in UNSAID.items())
            return unsaid and self.engine == CUTE and experts_cute.fits(shape, self)
        sizes = (
            (self.up_rows, self.up_block, shape["D"]),
            (self.down_rows, self.down_block, shape["F"]),
        )
        pieces = triton.cdiv(shape["F"], self.down_block)
        staged = self.up_stages * (2 * self.up_rows + 1) * self.up_block * 2  # bytes
        held = self.down_held * pieces * self.down_rows * self.down_block
        return (
            0 <= self.down_held <= shape["K"]
            and (self.up_programs == 0 or self.up_programs > 0 and self.up_stages > 0)
            and staged <= MAX_STAGED
            and held <= MAX_HELD * 32 * self.down_warps
            and all(
                triton.cdiv(width, block) <= MAX_UNROLL
                and block < 2 * width
                and rows * block <= MAX_TILE
                for rows, block, width in sizes
            )
        )


def _most(slots: int) -> tuple[int, int]:
    return max(0, slots - 1), slots


def _block(width: int, start: int) -> int:
    """The smallest power of two from `start` up that covers `width` in ten steps or fewer."""
    block = min(start, triton.next_power_of_2(width))
    while triton.cdiv(width, block) > 10:
        block *= 2
    return block


class RoutedKnobs:
    """`ExpertsKnobs` of few pairs, `GroupedKnobs` of many."""

    def __new__(cls, **values: Any):
        return (GroupedKnobs if "row_tile" in values else ExpertsKnobs)(**values)

    @staticmethod
    def heuristic(shape: Mapping[str, int]) -> ExpertsKnobs | GroupedKnobs:
        return (GroupedKnobs if shape["P"] > MAX_PAIRS else ExpertsKnobs).heuristic(shape)

    @staticmethod
    def candidates(shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        return (GroupedKnobs if shape["P"] > MAX_PAIRS else ExpertsKnobs).candidates(shape)
