"""Launch knobs of `gemv`, for a single row of x and for 2 to 16."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import triton

from optimized import gemv_engines
from optimized.change import KnobValue
from optimized.gemv_engines import CUTE, LIBRARY, OWN, REGISTERS, TINY

MAX_UNROLL = 32
MAX_HELD = 160
HELD_BY_ALL = 10_000_000  # weights, in the registers of 132 SMs with room to work
# Weights from which for a few rows FlashInfer's kernel and cuBLAS beat CuTe DSL's (`heuristic`); as
# it was for 8, others were not timed.
LARGE, MEDIUM, TALL = 20_000_000, 10_000_000, 4096
ROW_CHOICES = {
    "warps": (1, 2, 4, 8),
    "rows": (1, 2, 4, 8, 16),
    "block": (256, 512, 1024, 2048),
    "stages": (1,),
}
FEW_ROWS_CHOICES = {
    "warps": (2, 4, 8),
    "rows": (16, 32, 64, 128),
    "block": (64, 128, 256, 512),
    "stages": (2, 3, 4, 6),
}


@dataclass(frozen=True, kw_only=True)
class GemvKnobs:
    """`warps` of a thread block, the `rows` of W it multiplies, `block` columns of W at a time, and
    `stages` of the pipelined loop (M > 1). Sizes are M, O and D.

    `engine` is whose kernel it is; what says nothing to it has the first of its candidates.
    `hold` is where CuTe DSL's kernel for one row has weights before it multiplies them.
    """

    warps: int
    rows: int
    block: int
    stages: int
    engine: str = OWN
    hold: str = REGISTERS

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "GemvKnobs":
        """CuTe DSL's kernel where this machine has it and it takes the shape; for several rows of a
        large weight, or where that one is missing, a library's; ours otherwise.

        On an H200 the first took 6.2 us for 8 rows of 1792 x 5120 and 3.2 of 5120 x 768, ours 14.3
        and 5.7. For one row a decode step of Beam (2404 us, TP8 rank) gained 17.7 us by it in the
        packed projections, 7.6 in the output projections, 3.2 in the LM head (2026-11-30). For 8
        rows of 5120 x 5120 it took 20.1 us, FlashInfer's 18.6; of 5120 x 2560 10.7, cuBLAS 10.2
        and FlashInfer's 13.7; of 18992 x 5120 cuBLAS 53.9 and FlashInfer's 52.8 (2026-12-01).
        """
        if shape["M"] > 1 and (engine := of_large(shape)) is not None:
            return cls.canonical(engine)
        for start in cute_starts(shape):
            made = cls(**start, engine=CUTE)
            if made.is_valid(shape) and gemv_engines.serves(CUTE, shape):
                return made
        if shape["M"] > 1 and gemv_engines.serves(LIBRARY, shape):
            return cls.canonical(LIBRARY)
        return cls.own(shape)

    @classmethod
    def canonical(cls, engine: str) -> "GemvKnobs":
        """A library's engine, to which the other knobs say nothing, for several rows."""
        return cls(**{name: values[0] for name, values in FEW_ROWS_CHOICES.items()}, engine=engine)

    @classmethod
    def own(cls, shape: Mapping[str, int]) -> "GemvKnobs":
        """What our Triton kernel starts from."""
        if shape["M"] > 1:
            return cls(warps=4, rows=16 if shape["O"] < 8192 else 64, block=256, stages=4)
        rows = 4 if shape["O"] >= 1024 else 1
        block = min(1024, triton.next_power_of_2(shape["D"]))
        if shape["O"] * shape["D"] <= HELD_BY_ALL and shape["D"] >= 2048:
            # All thread blocks, each holding its weights, fit a GPU at once, so that none waits.
            return cls(warps=4, rows=2, block=1024, stages=1)
        if rows * shape["D"] > MAX_HELD * 128 and shape["D"] % 2048 == 0:
            # So that a block holds all it multiplies: 21.6 MB of 2304 x 8192 are on their way
            # before the previous kernel is done, 16.2 with four rows (registers, not timed).
            return cls(warps=4, rows=2, block=2048, stages=1)
        while shape["D"] % block and block > 256:  # no half-empty load at the end of a row
            block //= 2
        return cls(warps=4 if block >= 1024 else 2, rows=rows, block=block, stages=1)

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        engines = gemv_engines.offered(shape)
        choices = ROW_CHOICES if shape["M"] == 1 else FEW_ROWS_CHOICES
        if engines == (OWN,):
            return choices
        if CUTE in engines and shape["M"] > 1:
            more = {"warps": (16,), "block": (1024,)}
            choices = {**choices, **{k: (*choices[k], *v) for k, v in more.items()}}
        choices = {**choices, "engine": engines}
        holds = gemv_engines.places(shape) if CUTE in engines else (REGISTERS,)
        return choices if len(holds) == 1 else {**choices, "hold": holds}

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        if self.engine != OWN:
            return self._fits(shape)
        if self.hold != REGISTERS:
            return False
        if any(n < 1 or n & (n - 1) for n in (self.warps, self.rows, self.block)):
            return False
        values = self.rows * self.block
        if shape["M"] == 1:
            loops = triton.cdiv(shape["D"], self.block)
            return self.stages == 1 and values // self.warps <= 2048 and loops <= MAX_UNROLL
        staged = (values + 16 * self.block) * 2 * self.stages  # bytes of shared memory
        return self.rows >= 16 and self.block >= 32 and staged <= 200_000

    def _fits(self, shape: Mapping[str, int]) -> bool:
        """Whether a library's engine takes the shape with these knobs."""
        choices = ROW_CHOICES if shape["M"] == 1 else FEW_ROWS_CHOICES
        if self.engine == CUTE:
            first = choices["stages"][0]
            return self.stages == first and gemv_engines.cute_fits(shape, self)
        canonical = all(getattr(self, name) == values[0] for name, values in choices.items())
        return canonical and self.hold == REGISTERS and gemv_engines.takes(self.engine, shape)


def of_large(shape: Mapping[str, int]) -> str | None:
    """The library's engine for a few rows of a weight so large that it beats CuTe DSL's."""
    weights = shape["O"] * shape["D"]
    if weights >= LARGE and gemv_engines.serves(TINY, shape):
        return TINY
    if shape["O"] >= TALL and weights >= MEDIUM and gemv_engines.serves(LIBRARY, shape):
        return LIBRARY
    return None


def cute_starts(shape: Mapping[str, int]) -> list[dict[str, int]]:
    """What CuTe DSL's kernel may start from, the first that fits."""
    if shape["M"] == 1:
        return [{"warps": 4, "rows": 4, "block": 256, "stages": 1}]
    sizes = {"warps": 16, "rows": 16} if shape["O"] < 4096 else {"warps": 8, "rows": 32}
    return [{**sizes, "block": block, "stages": 2} for block in (512, 256, 128, 64)]


def held_blocks(knobs: GemvKnobs, width: int) -> int:
    """How many of a row's blocks a thread can hold: `MAX_HELD` weights, half as many registers."""
    a_block = knobs.rows * knobs.block // (32 * knobs.warps)
    return min(triton.cdiv(width, knobs.block), MAX_HELD // max(1, a_block))
