"""Device code of a boundary with the logits of the router after it; used by `boundary_router` and
`gated_boundary_router`, plain and in TF32."""

import triton
import triton.language as tl

from optimized.boundary_kernel import gate_shares, post_norm_and_add
from optimized.norms import norm_factor, scaled_input
from optimized.triton_support import let_next_start, previous_is_done, round_to_tf32


@triton.jit
def router_operand(x, TF32: tl.constexpr):
    """What the router multiplies, FP32: x rounded to BF16 or, before that rounding, to TF32."""
    if TF32:
        return round_to_tf32(x)
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def router_weight(weight, TF32: tl.constexpr):
    if TF32:
        return round_to_tf32(weight)
    return weight


@triton.jit
def boundary_router_kernel(
    y_ptr,
    h_ptr,
    post_ptr,
    pre_ptr,
    gate_ptr,
    weight_ptr,
    h_out_ptr,
    x_out_ptr,
    logits_ptr,
    y_stride,
    h_stride,
    y_scale,
    h_scale,
    post_eps,
    eps,
    D: tl.constexpr,
    E: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    POST: tl.constexpr,
    GATED: tl.constexpr,
    CENTRED: tl.constexpr,
    TF32: tl.constexpr,
    PDL: tl.constexpr,
):
    """`POST`, `GATED`, `CENTRED` as in `residual_boundary_kernel`. With `TF32` the router reads x
    before its rounding, and both its operands are rounded to TF32."""
    let_next_start(PDL)
    token = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * ROWS
    head = tl.arange(0, HEAD)
    in_head = head < D
    post_head, post_tail = 0.0, 0.0
    if POST != "unit":
        post_head = tl.load(post_ptr + head, mask=in_head, other=0.0)
    pre_head = tl.load(pre_ptr + head, mask=in_head, other=0.0)
    y_share_head, h_share_head = y_scale, h_scale
    if GATED:
        gate = tl.load(gate_ptr + head, mask=in_head, other=0.0)
        y_share_head, h_share_head = gate_shares(gate, y_scale, h_scale)
    if TAIL > 0:
        tail = HEAD + tl.arange(0, TAIL)
        in_tail = tail < D
        if POST != "unit":
            post_tail = tl.load(post_ptr + tail, mask=in_tail, other=0.0)
        pre_tail = tl.load(pre_ptr + tail, mask=in_tail, other=0.0)
        y_share_tail, h_share_tail = y_scale, h_scale
        if GATED:
            gate = tl.load(gate_ptr + tail, mask=in_tail, other=0.0)
            y_share_tail, h_share_tail = gate_shares(gate, y_scale, h_scale)
    heads, tails = (), ()
    for r in tl.static_range(ROWS):  # pyright: ignore[reportGeneralTypeIssues]
        row = weight_ptr + (first + r) * D
        there = first + r < E
        heads = heads + (tl.load(row + head, mask=in_head & there, other=0.0),)
        if TAIL > 0:
            tails = tails + (tl.load(row + tail, mask=in_tail & there, other=0.0),)

    previous_is_done(PDL)
    WEIGHTED: tl.constexpr = POST == "weighted"
    y_row, h_row = y_ptr + token * y_stride, h_ptr + token * h_stride
    y_head = tl.load(y_row + head, mask=in_head, other=0.0).to(tl.float32)
    h_head = tl.load(h_row + head, mask=in_head, other=0.0).to(tl.float32)
    if POST == "input_scaled":
        y_head = scaled_input(y_head, post_head)
    squares = tl.sum(y_head * y_head, axis=0)
    if TAIL > 0:
        y_tail = tl.load(y_row + tail, mask=in_tail, other=0.0).to(tl.float32)
        h_tail = tl.load(h_row + tail, mask=in_tail, other=0.0).to(tl.float32)
        if POST == "input_scaled":
            y_tail = scaled_input(y_tail, post_tail)
        squares += tl.sum(y_tail * y_tail, axis=0)
    inverse = tl.rsqrt(squares * (1.0 / D) + post_eps)
    h_head = post_norm_and_add(
        y_head, h_head, post_head, inverse, y_share_head, h_share_head, WEIGHTED, GATED
    )
    squares = tl.sum(h_head * h_head, axis=0)
    if TAIL > 0:
        h_tail = post_norm_and_add(
            y_tail, h_tail, post_tail, inverse, y_share_tail, h_share_tail, WEIGHTED, GATED
        )
        squares += tl.sum(h_tail * h_tail, axis=0)
    inverse = tl.rsqrt(squares * (1.0 / D) + eps)
    x_head = h_head * inverse * norm_factor(pre_head, CENTRED)
    h_out, x_out = h_out_ptr + token * D, x_out_ptr + token * D
    if TAIL > 0:
        x_tail = h_tail * inverse * norm_factor(pre_tail, CENTRED)
    if tl.program_id(0) == 0:
        tl.store(h_out + head, h_head.to(tl.bfloat16), mask=in_head)
        tl.store(x_out + head, x_head.to(tl.bfloat16), mask=in_head)
        if TAIL > 0:
            tl.store(h_out + tail, h_tail.to(tl.bfloat16), mask=in_tail)
            tl.store(x_out + tail, x_tail.to(tl.bfloat16), mask=in_tail)
    read_head = router_operand(x_head, TF32)
    if TAIL > 0:
        read_tail = router_operand(x_tail, TF32)
    for r in tl.static_range(ROWS):  # pyright: ignore[reportGeneralTypeIssues]
        logit = tl.sum(read_head * router_weight(heads[r], TF32), axis=0)
        if TAIL > 0:
            logit += tl.sum(read_tail * router_weight(tails[r], TF32), axis=0)
        tl.store(logits_ptr + token * E + first + r, logit, mask=first + r < E)
