"""The logits' cap in FP32, in one kernel.

    out = cap * tanh(float(logits) / cap)

logits [..., V] BF16 -> [..., V] FP32; nothing is rounded to BF16. Moves 6 bytes a logit. Elements
are numbered across rows, so the logits have to be contiguous.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from optimized.change import Change, Contract, Implementation
from optimized.inductor import inductor_implementation
from optimized.soft_cap import SoftCapKnobs, capped, guard, shape, tanh_fp32
from optimized.triton_support import OfflineCase, begin


@triton.jit
def logit_cap_kernel(
    logits_ptr,
    out_ptr,
    elements,
    inverse_cap,
    cap,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = index < elements
    x = tl.load(logits_ptr + index, mask=valid, other=0.0).to(tl.float32)
    tl.store(out_ptr + index, tanh_fp32(x * inverse_cap) * cap, mask=valid)


def build(node: Any, knobs: SoftCapKnobs | None):
    """logits [..., V] BF16 -> [..., V] FP32."""
    numbers = 1.0 / node.cap, node.cap  # eager mode on a GPU multiplies by 1 / cap, too
    return lambda logits: capped(logit_cap_kernel, logits, torch.float32, *numbers, knobs=knobs)


def offline_cases() -> list[OfflineCase]:
    """18992 logits, as on one of eight tensor-parallel ranks: a decode step and 16384 rows."""
    signature = {"logits_ptr": "*bf16", "out_ptr": "*fp32", "elements": "i32:16"}
    signature |= dict.fromkeys(("inverse_cap", "cap"), "fp32") | {"BLOCK": "constexpr"}
    cases = []
    for rows in (1, 16384):
        knobs = SoftCapKnobs.heuristic({"N": rows, "V": 18992})
        cases.append(OfflineCase(logit_cap_kernel, signature, {"BLOCK": knobs.block}, knobs.warps))
    return cases


CHANGE = Change(
    name="logit_cap",
    region="logit_cap",
    summary="the logits' cap in one kernel",
    contract=Contract(numerics="transcendental", batch_invariant=True),
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build,
            guard=guard,
            knobs=SoftCapKnobs,
            shape=shape,
        ),
        inductor_implementation(),
    ),
)
