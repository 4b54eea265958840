"""Launch knobs of `attention_step`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import triton

from optimized.change import KnobValue
from optimized.decode_attention import AttentionKnobs

SHARES = 396  # three for each of an H200's 132 SMs
MAX_HELD = 128  # weights of the projection that a thread holds


@dataclass(frozen=True, kw_only=True)
class StepKnobs:
    """Of the attention: `warps`, `block` positions at a time, `stages` of the pipelined loop, the
    `splits` of the sequence. Of the output projection: `rows` of W at a time and its `row_warps`;
    its programs fit a GPU at once."""

    warps: int
    block: int
    stages: int
    splits: int
    rows: int
    row_warps: int

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "StepKnobs":
        base = AttentionKnobs.heuristic(shape)
        width = triton.next_power_of_2(shape["H"]) * shape["d"]
        most = triton.cdiv(shape["S"], base.block)
        return cls(
            warps=base.warps,
            block=base.block,
            stages=2,
            splits=max(1, min(SHARES // max(1, shape["B"] * shape["Hkv"]), most)),
            rows=16 if width >= 512 else 4,  # a row for each warp
            row_warps=16 if width >= 512 else 4,
        )

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        found = {**AttentionKnobs.candidates(shape)}
        return {**found, "rows": (1, 2, 4, 8, 16), "row_warps": (4, 8, 16)}

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        attention = AttentionKnobs(
            warps=self.warps, block=self.block, stages=self.stages, splits=self.splits
        )
        width = triton.next_power_of_2(shape["H"]) * shape["d"]
        return (
            attention.is_valid(shape)
            and self.rows * width <= MAX_HELD * 32 * self.row_warps
            and width >= 32 * self.row_warps
        )
