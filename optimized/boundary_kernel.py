"""The kernel of `residual_boundary` and `gated_boundary`, and its pieces."""

import triton
import triton.language as tl

from optimized.norms import norm_factor, scaled_input
from optimized.triton_support import (
    let_next_start,
    loads_are_asked_for,
    previous_is_done,
    sigmoid_fp32,
)


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
def part(pointer, i: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Piece `i` of a row of D, held in pieces of `BLOCK`."""
    column = i * BLOCK + tl.arange(0, BLOCK)
    if (i + 1) * BLOCK <= D:
        return tl.load(pointer + column)
    return tl.load(pointer + column, mask=column < D, other=0.0)


@triton.jit
def put(pointer, value, i: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Write piece `i` of a row of D as BF16."""
    column = i * BLOCK + tl.arange(0, BLOCK)
    if (i + 1) * BLOCK <= D:
        tl.store(pointer + column, value.to(tl.bfloat16))
    else:
        tl.store(pointer + column, value.to(tl.bfloat16), mask=column < D)


@triton.jit
def mean_square(pieces, D: tl.constexpr, PIECES: tl.constexpr):
    """Of a row in pieces, each thread's values added up before threads exchange theirs."""
    squares = pieces[0] * pieces[0]
    for i in tl.static_range(1, PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        squares += pieces[i] * pieces[i]
    return tl.sum(squares, axis=0) * (1.0 / D)


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
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    POST: tl.constexpr,
    GATED: tl.constexpr,
    CENTRED: tl.constexpr,
    KEEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row is held in pieces of `BLOCK`. `POST` is "weighted", "input_scaled" or "unit". With
    `GATED` the two scales are the inverse temperature and the floor of the gates at `gate_ptr`,
    FP32. `KEEP` stores what the pre-norm multiplies each row by at `rms_ptr`, FP32."""
    let_next_start(PDL)
    PIECES: tl.constexpr = (D + BLOCK - 1) // BLOCK
    posts, pres, y_shares, h_shares = (), (), (), ()
    for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        if POST == "unit":
            posts = posts + (0.0,)
        else:
            posts = posts + (part(post_ptr, i, D, BLOCK),)
        pres = pres + (part(pre_ptr, i, D, BLOCK),)
        if GATED:
            y_share, h_share = gate_shares(part(gate_ptr, i, D, BLOCK), y_scale, h_scale)
            y_shares, h_shares = y_shares + (y_share,), h_shares + (h_share,)
        else:
            y_shares, h_shares = y_shares + (y_scale,), h_shares + (h_scale,)

    previous_is_done(PDL)
    WEIGHTED: tl.constexpr = POST == "weighted"
    first = tl.program_id(0).to(tl.int64) * ROWS
    for row in range(first, tl.minimum(first + ROWS, count)):
        y_row, h_row = y_ptr + row * y_stride, h_ptr + row * h_stride
        h_out, x_out = h_out_ptr + row * D, x_out_ptr + row * D
        ys, hs = (), ()
        for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
            hs = hs + (part(h_row, i, D, BLOCK).to(tl.float32),)
        loads_are_asked_for(PDL)
        for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
            y = part(y_row, i, D, BLOCK).to(tl.float32)
            if POST == "input_scaled":
                y = scaled_input(y, posts[i])
            ys = ys + (y,)
        inverse = tl.rsqrt(mean_square(ys, D, PIECES) + post_eps)
        added = ()
        for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
            h = post_norm_and_add(
                ys[i], hs[i], posts[i], inverse, y_shares[i], h_shares[i], WEIGHTED, GATED
            )
            added = added + (h,)
        inverse = tl.rsqrt(mean_square(added, D, PIECES) + eps)
        if KEEP:
            tl.store(rms_ptr + row, inverse)
        for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
            x = added[i] * inverse * norm_factor(pres[i], CENTRED)
            put(h_out, added[i], i, D, BLOCK)
            put(x_out, x, i, D, BLOCK)
