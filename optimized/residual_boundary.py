"""Post-norm, depth-scaled residual add and next pre-norm in one kernel.

    y' = R(rms_norm(y) * w_post)
    h' = R(R(y' * y_scale) + R(h * h_scale))
    x  = R(rms_norm(h') * w_pre)

R rounds to BF16; all else is FP32. T rows (tokens), D hidden. One program holds whole rows in
registers, so that each value crosses memory once: 4 D BF16 values a row, 40 KiB at D = 5120, and
the two weights. What counts is that y and h are asked for together and, for many rows, how few
instructions a row takes: at D = 5120 8000 warps' instructions padded to 8192 on 16 warps, 4100 in
five pieces on 4. All five rounding points are kept; none is added. The two scales depend on the
residual's number n and are arguments, so that one binary serves all layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor, nn

from optimized.boundary_kernel import residual_boundary_kernel
from optimized.change import Change, Contract, Implementation, KnobValue
from optimized.inductor import inductor_implementation
from optimized.triton_support import (
    OfflineCase,
    launch,
    outside_domain,
    row_stride,
)

MAX_WIDTH = 16384  # a row has to fit into the registers of one thread block
MAX_ROWS = 16384  # tested up to here
FEW_ROWS = 256  # fewer thread blocks than two per SM of an H200: latency counts, not arithmetic


@dataclass(frozen=True, kw_only=True)
class BoundaryKnobs:
    """`warps` of a thread block, `rows` it works through, and whether a row is held in pieces.

    5120 is no power of two. Whole, a row is padded to 8192; `split`, it is held in five pieces of
    1024 without padding, the same thread having the same place in each.
    """

    warps: int
    rows: int
    split: bool

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "BoundaryKnobs":
        few = shape["T"] <= FEW_ROWS
        split = not few and not _is_power_of_two(shape["D"]) and piece(shape["D"], True) >= 32
        # 8 elements, a 16-byte load, for every thread
        most = max(1, (piece(shape["D"], True) if split else shape["D"]) // 256)
        return cls(warps=min(16 if few else 8, 1 << most.bit_length() - 1), rows=1, split=split)

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        many = shape["T"] > FEW_ROWS
        whole = _is_power_of_two(shape["D"])
        return {
            "warps": (4, 8, 16),
            "rows": (1, 2, 4, 8) if many else (1,),
            "split": (False,) if whole else (False, True),
        }

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        block = piece(shape["D"], self.split)
        width = block * triton.cdiv(shape["D"], block)
        return (
            _is_power_of_two(self.warps)
            and 1 <= self.rows
            and (self.warps == 1 or 32 <= block // self.warps)
            and width // self.warps <= 2048  # 64 elements a thread, all in registers
            and not (self.split and _is_power_of_two(shape["D"]))
        )


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def piece(width: int, split: bool) -> int:
    """The elements that a row of `width` is held in at a time: all, padded to a power of two, or an
    eighth of that: 5120 in five pieces of 1024."""
    whole = triton.next_power_of_2(width)
    return max(1, whole // 8) if split else whole


def shape(node: nn.Module, y: Tensor, h: Tensor, post: Tensor, pre: Tensor) -> dict[str, int]:
    """T rows and D hidden of a call."""
    return {"T": y.numel() // y.shape[-1], "D": y.shape[-1]}


def guard(node: nn.Module, y: Tensor, h: Tensor, post: Tensor, pre: Tensor) -> str | None:
    """Why the kernel does not take this call, or None."""
    width = y.shape[-1]
    if not 0 < width <= MAX_WIDTH:
        return f"y has width {width}, the kernel takes 1 to {MAX_WIDTH}"
    if y.numel() > MAX_ROWS * width:
        return f"y has {y.numel() // width} rows, the kernel takes up to {MAX_ROWS}"
    if h.shape != y.shape or post.shape != (width,) or pre.shape != (width,):
        return f"shapes {tuple(y.shape)}, {tuple(h.shape)} and weights do not fit together"
    for name, tensor in (("y", y), ("h", h), ("post_weight", post), ("pre_weight", pre)):
        if row_stride(tensor) is None:
            return f"{name} has strides {tensor.stride()}, the kernel takes evenly spaced rows"
    return outside_domain(y=y, h=h, post_weight=post, pre_weight=pre)


def build(node: Any, knobs: BoundaryKnobs | None):
    """(y [..., D], h [..., D], post_weight [D], pre_weight [D]) -> (h, x [..., D]), all BF16."""

    def forward(y: Tensor, h: Tensor, post_weight: Tensor, pre_weight: Tensor):
        chosen = knobs or BoundaryKnobs.heuristic(shape(node, y, h, post_weight, pre_weight))
        scales = node.y_scale, node.h_scale
        eps = node.eps, node.eps
        return cross(y, h, post_weight, pre_weight, None, scales, eps, chosen)

    return forward


def cross(
    y: Tensor,
    h: Tensor,
    post_weight: Tensor | None,
    pre_weight: Tensor,
    gate: Tensor | None,
    scales: tuple[float, float],
    eps: tuple[float, float],
    knobs: BoundaryKnobs,
    centred: bool = False,
    inverse_rms: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y, h [..., D] BF16 -> the new h and its pre-norm x [..., D] BF16.

    Without a gate [D] FP32 the post-norm is weighted and `scales` are those of y and h. With one it
    is input-scaled, or unit without a weight, and they are the gate's inverse temperature and
    floor. `eps` are those of post- and pre-norm. What the pre-norm multiplies each row by goes to
    `inverse_rms` [rows] FP32, if given.
    """
    h_out, x_out = (torch.empty(y.shape, dtype=y.dtype, device=y.device) for _ in "hx")
    if y.numel() == 0:
        return h_out, x_out
    width = y.shape[-1]
    rows = y.numel() // width
    launch(
        residual_boundary_kernel,
        (triton.cdiv(rows, knobs.rows),),
        y,
        h,
        pre_weight if post_weight is None else post_weight,
        pre_weight,
        pre_weight if gate is None else gate,
        h_out,
        x_out,
        pre_weight if inverse_rms is None else inverse_rms,
        row_stride(y),
        row_stride(h),
        rows,
        *scales,
        *eps,
        D=width,
        BLOCK=piece(width, knobs.split),
        ROWS=knobs.rows,
        POST=post_kind(post_weight is not None, gate is not None),
        GATED=gate is not None,
        CENTRED=centred,
        KEEP=inverse_rms is not None,
        num_warps=knobs.warps,
    )
    return h_out, x_out


def post_kind(weighted: bool, gated: bool) -> str:
    """How the post-norm's weight enters, if it has one."""
    if not weighted:
        return "unit"
    return "input_scaled" if gated else "weighted"


def cases(
    width: int,
    knobs: type[BoundaryKnobs],
    kinds: Sequence[tuple[str, bool, bool]],
    keep: bool = False,
) -> list[OfflineCase]:
    """A decode step and a prefill's many rows, for each kind: POST, GATED and CENTRED."""
    pointers = "y_ptr", "h_ptr", "post_ptr", "pre_ptr", "gate_ptr", "h_out_ptr", "x_out_ptr"
    signature = dict.fromkeys(pointers, "*bf16") | {"rms_ptr": "*fp32" if keep else "*bf16"}
    signature |= dict.fromkeys(("y_stride", "h_stride"), "i32:16")
    signature |= {"count": "i32"}
    signature |= dict.fromkeys(("y_scale", "h_scale", "post_eps", "eps"), "fp32")
    constants = "D", "BLOCK", "ROWS", "POST", "GATED", "CENTRED", "KEEP"
    signature |= dict.fromkeys(constants, "constexpr")
    found = []
    for rows in (1, 16384):
        chosen = knobs.heuristic({"T": rows, "D": width})
        values: dict[str, Any] = {"D": width, "BLOCK": piece(width, chosen.split)}
        values["ROWS"] = chosen.rows
        for post, gated, centred in kinds:
            kind = {"POST": post, "GATED": gated, "CENTRED": centred, "KEEP": keep}
            types = signature | {"gate_ptr": "*fp32" if gated else "*bf16"}
            case = OfflineCase(residual_boundary_kernel, types, values | kind, chosen.warps)
            found.append(case)
    return found


def offline_cases() -> list[OfflineCase]:
    """Beam's width: a decode step, and a prefill's many rows."""
    return cases(5120, BoundaryKnobs, [("weighted", False, False)])


CHANGE = Change(
    name="residual_boundary",
    region="residual_boundary",
    summary="post-norm, scaled residual add and next pre-norm in one kernel",
    contract=Contract(numerics="reduction", batch_invariant=False),
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build,
            guard=guard,
            knobs=BoundaryKnobs,
            shape=shape,
        ),
        inductor_implementation(),
    ),
)
