"""Every expert's output normed, and their weighted sum, in one kernel.

    s_k = R(y_k * R(1 + w)),  n_k = R(s_k / rms(s_k))
    out = R(scale * (p_0 n_0 + p_1 n_1 + ... + p_{K-1} n_{K-1}))

R rounds to BF16; all else is FP32, products and sums rounded apart, in slot order. N tokens, K
experts a token, D width, w [D] BF16, p [N, K] FP32. All rounding points are kept; none is added.
Moves N (K + 1) D BF16 values. For a few tokens several programs share one: each reads its rows
whole for the norms, from the L2 cache, and sums some of the columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.change import KnobValue
from optimized.norms import scaled_input
from optimized.triton_support import (
    OfflineCase,
    launch,
    let_next_start,
    previous_is_done,
    row_stride,
)

FEW_TOKENS = 16  # more fill a GPU with a program each
MAX_WIDTH = 16384  # a row has to fit into the registers of one thread block


@dataclass(frozen=True, kw_only=True)
class NormCombineKnobs:
    """`columns` that a program sums, `warps` of its thread block."""

    columns: int
    warps: int

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "NormCombineKnobs":
        width = triton.next_power_of_2(shape["D"])
        warps = min(16, max(1, width // 256))
        return cls(columns=min(512, width) if shape["N"] <= FEW_TOKENS else width, warps=warps)

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        width = triton.next_power_of_2(shape["D"])
        return {"columns": tuple(sorted({256, 512, 1024, width})), "warps": (4, 8, 16, 32)}

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        width = triton.next_power_of_2(shape["D"])
        whole = self.columns == width
        enough = self.warps == 1 or width >= 32 * self.warps
        return enough and (whole or self.columns < width) and width <= 1024 * self.warps


@triton.jit
def norm_combine_kernel(
    y_ptr,
    weights_ptr,
    norm_ptr,
    places_ptr,
    out_ptr,
    weights_stride,
    scale,
    eps,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    PLACED: tl.constexpr,
    PDL: tl.constexpr,
):
    """`WIDTH` is a power of two that covers D; with `COLUMNS` as many, a row is read once."""
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    every = tl.arange(0, WIDTH)
    norm = tl.load(norm_ptr + every, mask=every < D, other=0.0)
    if COLUMNS < WIDTH:
        norm_here = tl.load(norm_ptr + column, mask=column < D, other=0.0)
    previous_is_done(PDL)
    # All rows are asked for before the first is reduced.
    whole, here, shares = (), (), ()
    for slot in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
        place = token * K + slot
        if PLACED:
            place = tl.load(places_ptr + place).to(tl.int64)
        shares = shares + (tl.load(weights_ptr + token * weights_stride + slot),)
        row = y_ptr + place * D
        whole = whole + (tl.load(row + every, mask=every < D, other=0.0),)
        if COLUMNS < WIDTH:
            here = here + (tl.load(row + column, mask=column < D, other=0.0),)
    total = tl.zeros([COLUMNS], tl.float32)
    for slot in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
        scaled = scaled_input(whole[slot].to(tl.float32), norm)  # pyright: ignore
        inverse = tl.rsqrt(tl.sum(scaled * scaled, axis=0) * (1.0 / D) + eps)
        if COLUMNS < WIDTH:
            scaled = scaled_input(here[slot].to(tl.float32), norm_here)  # pyright: ignore
        normed = (scaled * inverse).to(tl.bfloat16).to(tl.float32)
        weighted = normed * shares[slot]
        total = weighted if slot == 0 else total + weighted
    tl.store(out_ptr + token * D + column, (total * scale).to(tl.bfloat16), mask=column < D)


def norm_combine(
    y: Tensor,
    weights: Tensor,
    norm: Tensor,
    eps: float,
    scale: float,
    *,
    places: Tensor | None = None,
    knobs: NormCombineKnobs | None = None,
) -> Tensor:
    """(y [N, K, D] BF16, weights [N, K] FP32, norm [D] BF16) -> [N, D] BF16.

    With `places` [N * K] int32, the row of pair i is y.flatten(0, 1)[places[i]].
    """
    tokens, top_k, width = (*weights.shape, y.shape[-1])
    chosen = knobs or NormCombineKnobs.heuristic({"N": tokens, "K": top_k, "D": width})
    out = torch.empty((tokens, width), dtype=y.dtype, device=y.device)
    if out.numel() == 0:
        return out
    launch(
        norm_combine_kernel,
        (tokens, triton.cdiv(width, chosen.columns)),
        y,
        weights,
        norm,
        weights if places is None else places,
        out,
        row_stride(weights),
        scale,
        eps,
        D=width,
        WIDTH=triton.next_power_of_2(width),
        K=top_k,
        COLUMNS=chosen.columns,
        PLACED=places is not None,
        num_warps=chosen.warps,
    )
    return out


def offline_cases() -> list[OfflineCase]:
    """Top-8 of experts 4096 wide: a decode step and a prefill."""
    kinds: dict[str, str] = dict.fromkeys(("y_ptr", "norm_ptr", "out_ptr"), "*bf16")
    kinds |= {"weights_ptr": "*fp32", "places_ptr": "*i32", "weights_stride": "i32"}
    kinds |= {"scale": "fp32", "eps": "fp32"}
    cases = []
    for tokens in (1, 16384):
        knobs = NormCombineKnobs.heuristic({"N": tokens, "K": 8, "D": 4096})
        values: dict[str, Any] = {"D": 4096, "WIDTH": 4096, "K": 8, "COLUMNS": knobs.columns}
        values["PLACED"] = tokens > 1
        types = kinds | dict.fromkeys(values, "constexpr")
        ordered = {n: types[n] for n in norm_combine_kernel.arg_names if n != "PDL"}
        cases.append(OfflineCase(norm_combine_kernel, ordered, values, knobs.warps))
    return cases
