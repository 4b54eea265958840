"""The kernel of `residual_boundary` and `gated_boundary`, and its pieces."""

import triton
import triton.language as tl

from optimized.norms import norm_factor, scaled_input
from optimized.triton_support import let_next_start, previous_is_done, sigmoid_fp32


@triton.jit
def post_norm_and_add(
    y,
    h,
    weight,
    inverse_rms,
    y_scale,
    h_scale,
    WEIGHTED: tl.constexpr = True,
    GATED: tl.constexpr = False,
):
    """The new residual, rounded, as FP32: all rounding points before the pre-norm's. `GATED` rounds
    the sum of the two products only."""
    normed = y * inverse_rms
    if WEIGHTED:
        normed = normed * weight.to(tl.float32)
    normed = normed.to(tl.bfloat16).to(tl.float32)
    from_y, from_h = normed * y_scale, h * h_scale
    if not GATED:
        from_y = from_y.to(tl.bfloat16).to(tl.float32)
        from_h = from_h.to(tl.bfloat16).to(tl.float32)
    return (from_y + from_h).to(tl.bfloat16).to(tl.float32)


@triton.jit
def gate_shares(gate, inverse_temperature, floor):
    """(beta, alpha) of a gated residual, FP32."""
    w = gate * inverse_temperature
    beta = sigmoid_fp32(w)
    return beta, tl.math.sqrt_rn(tl.maximum(sigmoid_fp32(-w) * (1.0 + beta), floor))


@triton.jit
def residual_boundary_kernel(
    y_ptr,
    h_ptr,
    post_ptr,
    pre_ptr,
    gate_ptr,
    h_out_ptr,
    x_out_ptr,
    rms_ptr,
    y_stride,
    h_stride,
    count,
    y_scale,
    h_scale,
    post_eps,
    eps,
    D: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    POST: tl.constexpr,
    GATED: tl.constexpr,
    CENTRED: tl.constexpr,
    KEEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """`POST` is "weighted", "input_scaled" or "unit". With `GATED` the two scales are the inverse
    temperature and the floor of the gates at `gate_ptr`, FP32. `KEEP` stores what the pre-norm
    multiplies each row by at `rms_ptr`, FP32."""
    let_next_start(PDL)
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

    previous_is_done(PDL)
    WEIGHTED: tl.constexpr = POST == "weighted"
    first = tl.program_id(0).to(tl.int64) * ROWS
    for row in range(first, tl.minimum(first + ROWS, count)):
        y_row, h_row = y_ptr + row * y_stride, h_ptr + row * h_stride
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
        if KEEP:
            tl.store(rms_ptr + row, inverse)
        h_out, x_out = h_out_ptr + row * D, x_out_ptr + row * D
        x_head = h_head * inverse * norm_factor(pre_head, CENTRED)
        tl.store(h_out + head, h_head.to(tl.bfloat16), mask=in_head)
        tl.store(x_out + head, x_head.to(tl.bfloat16), mask=in_head)
        if TAIL > 0:
            x_tail = h_tail * inverse * norm_factor(pre_tail, CENTRED)
            tl.store(h_out + tail, h_tail.to(tl.bfloat16), mask=in_tail)
            tl.store(x_out + tail, x_tail.to(tl.bfloat16), mask=in_tail)
