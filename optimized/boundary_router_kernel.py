"""Device code of a boundary with the logits of the router after it; used by `boundary_router` and
`gated_boundary_router`, plain and in TF32.

A row of D is held in pieces of `BLOCK`, the same thread having the same place in each: so that
several pieces are summed up by one reduction, and 5120 elements are not padded to 8192.
"""

import triton
import triton.language as tl

from optimized.boundary_kernel import gate_shares, post_norm_and_add
from optimized.norms import norm_factor, scaled_input
from optimized.triton_support import (
    let_next_start,
    loads_are_asked_for,
    previous_is_done,
    round_to_tf32,
)


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
def _part(pointer, i: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Piece `i` of a row of D."""
    column = i * BLOCK + tl.arange(0, BLOCK)
    if (i + 1) * BLOCK <= D:
        return tl.load(pointer + column)
    return tl.load(pointer + column, mask=column < D, other=0.0)


@triton.jit
def _put(pointer, value, i: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    column = i * BLOCK + tl.arange(0, BLOCK)
    if (i + 1) * BLOCK <= D:
        tl.store(pointer + column, value.to(tl.bfloat16))
    else:
        tl.store(pointer + column, value.to(tl.bfloat16), mask=column < D)


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
    BLOCK: tl.constexpr,
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
    PIECES: tl.constexpr = (D + BLOCK - 1) // BLOCK
    token = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * ROWS
    posts, pres, y_shares, h_shares, weights = (), (), (), (), ()
    for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        if POST == "unit":
            posts = posts + (0.0,)
        else:
            posts = posts + (_part(post_ptr, i, D, BLOCK),)
        pres = pres + (_part(pre_ptr, i, D, BLOCK),)
        if GATED:
            y_share, h_share = gate_shares(_part(gate_ptr, i, D, BLOCK), y_scale, h_scale)
            y_shares, h_shares = y_shares + (y_share,), h_shares + (h_share,)
        else:
            y_shares, h_shares = y_shares + (y_scale,), h_shares + (h_scale,)
    for r in tl.static_range(ROWS):  # pyright: ignore[reportGeneralTypeIssues]
        row = tl.minimum(first + r, E - 1)
        for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
            weights = weights + (_part(weight_ptr + row * D, i, D, BLOCK),)

    previous_is_done(PDL)
    WEIGHTED: tl.constexpr = POST == "weighted"
    y_row, h_row = y_ptr + token * y_stride, h_ptr + token * h_stride
    ys, hs, xs = (), (), ()
    for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        hs = hs + (_part(h_row, i, D, BLOCK).to(tl.float32),)
    loads_are_asked_for(PDL)
    for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        ys = ys + (_part(y_row, i, D, BLOCK).to(tl.float32),)
    squares = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        y = ys[i]
        if POST == "input_scaled":
            y = scaled_input(y, posts[i])
        xs = xs + (y,)
        squares += y * y
    inverse = tl.rsqrt(tl.sum(squares, axis=0) * (1.0 / D) + post_eps)
    ys, squares = xs, tl.zeros([BLOCK], tl.float32)
    xs = ()
    for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        h = post_norm_and_add(
            ys[i], hs[i], posts[i], inverse, y_shares[i], h_shares[i], WEIGHTED, GATED
        )
        xs = xs + (h,)
        squares += h * h
    hs = xs
    inverse = tl.rsqrt(tl.sum(squares, axis=0) * (1.0 / D) + eps)
    xs = ()
    for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        xs = xs + (hs[i] * inverse * norm_factor(pres[i], CENTRED),)
    if tl.program_id(0) == 0:
        for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
            _put(h_out_ptr + token * D, hs[i], i, D, BLOCK)
            _put(x_out_ptr + token * D, xs[i], i, D, BLOCK)
    for r in tl.static_range(ROWS):  # pyright: ignore[reportGeneralTypeIssues]
        products = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
            weight = router_weight(weights[r * PIECES + i], TF32)
            products += router_operand(xs[i], TF32) * weight
        tl.store(logits_ptr + token * E + first + r, tl.sum(products, axis=0), mask=first + r < E)
