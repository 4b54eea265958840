"""Launch knobs of `attention_step`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import triton

from optimized.change import KnobValue
from optimized.decode_attention import COMBINED_COLUMNS, AttentionKnobs

SHARES = 396  # three for each of an H200's 132 SMs
STREAMS = 264  # two, each with more blocks on their way
MAX_HELD = 128  # weights of the projection that a thread holds
MAX_STREAMED = 2048  # numerators of a warp, 64 a thread
MIN_EACH = 16  # positions of a warp: what its product takes at a time
MANY_SHARES = 64  # to combine
NARROW = 64  # columns of a head that may be combined whole, for its norm: more threads
SHARED_BYTES = 230_000  # of an SM


def padded_group(shape: Mapping[str, int]) -> int:
    """Query heads of a KV head, as many as tensor cores multiply by."""
    return max(8, triton.next_power_of_2(shape["H"] // shape["Hkv"]))


@dataclass(frozen=True, kw_only=True)
class StepKnobs:
    """Of the attention: `warps`, `block` positions at a time, `stages` of the pipelined loop, the
    `splits` of the sequence; of shares of several blocks whether each warp is a `stream` of its own
    (`step_stream`), and how many blocks are called into the L2 cache `ahead` of the previous
    kernel's end. Of the output projection: `rows` of W at a time and its `row_warps`; its programs
    fit a GPU at once. Of the kernel that combines many shares: `columns` of a head for a program
    and its `column_warps`."""

    warps: int
    block: int
    stages: int
    splits: int
    rows: int
    row_warps: int
    stream: bool = False
    ahead: int = 0
    columns: int = COMBINED_COLUMNS
    column_warps: int = 4

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "StepKnobs":
        base = AttentionKnobs.heuristic(shape)
        width = triton.next_power_of_2(shape["H"]) * shape["d"]
        most, each = triton.cdiv(shape["S"], base.block), shape["B"] * shape["Hkv"]
        streams = max(1, STREAMS // max(1, each))
        stream = streams < most and shape["d"] * padded_group(shape) <= MAX_STREAMED
        shares = min(streams if stream else max(1, SHARES // max(1, each)), most)
        # Of 100K positions on a TP8 rank of Beam, in a whole step of 2404 us on an H200: three
        # stages gained 4.0 us over four, five lost 24.5; 16 columns of a head in 4 warps gained 3.6
        # over 8 in 8; 396 shares lost 32, and 132 were no slower (2026-11-30).
        return cls(
            warps=min(base.warps, base.block // MIN_EACH) if stream else base.warps,
            block=base.block,
            stages=3 if stream else 2,
            splits=shares,
            rows=16 if width >= 512 else 4,  # a row for each warp
            row_warps=16 if width >= 512 else 4,
            stream=stream,
            ahead=1 if stream else 0,
            column_warps=8 if shares > MANY_SHARES and shape["d"] <= NARROW else 4,
        )

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        found = {**AttentionKnobs.candidates(shape), "stages": (1, 2, 3, 4, 5)}
        found |= {"rows": (1, 2, 4, 8, 16), "row_warps": (4, 8, 16)}
        found |= {"stream": (False, True), "ahead": (0, 1, 2, 4)}
        return {**found, "columns": (8, 16), "column_warps": (4, 8)}

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        width = triton.next_power_of_2(shape["H"]) * shape["d"]
        return (
            (self._streams(shape) if self.stream else self._held.is_valid(shape))
            and self.rows * width <= MAX_HELD * 32 * self.row_warps
            and width >= 32 * self.row_warps
        )

    @property
    def _held(self) -> AttentionKnobs:
        return AttentionKnobs(
            warps=self.warps, block=self.block, stages=self.stages, splits=self.splits
        )

    def _streams(self, shape: Mapping[str, int]) -> bool:
        """Whether a stream of such blocks fits the registers and the shared memory."""
        values, group = self.block * shape["d"], padded_group(shape)
        blocks = 4 * values * max(1, self.stages - 1)
        return (
            replace(self._held, stages=1).is_valid(shape)
            and self.block >= MIN_EACH * self.warps
            and shape["d"] * group <= MAX_STREAMED
            and blocks + 2 * self.warps * shape["d"] * group <= SHARED_BYTES
        )
