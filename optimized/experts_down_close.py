"""Down projections of one token's experts that end the layer: the last program done crosses the
boundary after them; used by `routed_experts` where `boundary_router` closes its layer so.

    y       = R(scale * sum_k weight_k y_k)      `experts_down`'s, rows shared out among programs
    h'      = R(R(R(rms_norm(y) w_post) y_scale) + R(h h_scale))
    x       = R(rms_norm(h') w_pre)

A boundary in a kernel of its own is one thread block, whose launch and wait for all of the products
are 1 to 1.5 us of its 4 on an H200 (2026-11-30). Here each program adds one to a counter when its
rows of y are written; the one that adds the last crosses it, and sets the counter back to zero.

Why it reads what the others wrote: a program's stores are before its barrier, and that before the
addition of one of its threads, which releases and acquires at the GPU's scope. The last addition
follows all others, empties the L1 cache, and has a barrier between it and every load of y. Nothing
waits for anything, so nothing can hang. The counter is one layer's: two streams may not share it.

D hidden. A row is held in the pieces of `residual_boundary`'s kernel and added up as there, on a
GPU in the order of as many warps as the products have. y is read twice, the second time from the L1
cache: 96 registers do not hold it. All rounding points are kept; none is added.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from optimized.boundary_kernel import mean_square, part, post_norm_and_add, put
from optimized.experts_down import ask_for_sectors, down_across
from optimized.norms import norm_factor
from optimized.triton_support import let_next_start

MOST_VALUES = 64  # of a row in a thread: three rows are held, two values a register


class Closing(NamedTuple):
    """The boundary after one token's experts: the residual h [D], both norms' weights [D], the
    scales of y and h, eps of post- and pre-norm, the results h and x [D], and the counter [1]
    int32, zero before and after. `piece` is what a row is held in at a time."""

    h: Tensor
    post_weight: Tensor
    pre_weight: Tensor
    scales: tuple[float, float]
    eps: tuple[float, float]
    h_out: Tensor
    x_out: Tensor
    counter: Tensor
    piece: int

    @property
    def pointers(self) -> tuple[Tensor, ...]:
        weights = self.post_weight, self.pre_weight
        return self.h, *weights, self.h_out, self.x_out, self.counter


@triton.jit
def _cross(
    y_ptr,
    h_ptr,
    post_ptr,
    pre_ptr,
    h_out_ptr,
    x_out_ptr,
    y_scale,
    h_scale,
    post_eps,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    PIECES: tl.constexpr = (D + BLOCK - 1) // BLOCK
    ys, hs, posts, pres = (), (), (), ()
    for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        ys = ys + (part(y_ptr, i, D, BLOCK).to(tl.float32),)
    for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        hs = hs + (part(h_ptr, i, D, BLOCK),)
        posts = posts + (part(post_ptr, i, D, BLOCK),)
        pres = pres + (part(pre_ptr, i, D, BLOCK),)
    inverse = tl.rsqrt(mean_square(ys, D, PIECES) + post_eps)
    tl.debug_barrier()
    added = ()
    for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        y = part(y_ptr, i, D, BLOCK).to(tl.float32)  # again
        h = hs[i].to(tl.float32)  # pyright: ignore[reportAttributeAccessIssue]
        added = added + (post_norm_and_add(y, h, posts[i], inverse, y_scale, h_scale),)
    inverse = tl.rsqrt(mean_square(added, D, PIECES) + eps)
    for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        x = added[i] * inverse * norm_factor(pres[i], False)
        put(h_out_ptr, added[i], i, D, BLOCK)
        put(x_out_ptr, x, i, D, BLOCK)


@triton.jit
def experts_down_close_kernel(
    hidden_ptr,
    weights_ptr,
    experts_ptr,
    weight_ptr,
    out_ptr,
    h_ptr,
    post_ptr,
    pre_ptr,
    h_out_ptr,
    x_out_ptr,
    counter_ptr,
    weights_stride,
    scale,
    y_scale,
    h_scale,
    post_eps,
    eps,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    PIECE: tl.constexpr,
    PDL: tl.constexpr,
):
    """`experts_down_across_kernel` of one token, its rows along the grid, and what is after it."""
    let_next_start(PDL)
    if PDL:  # 79 MB of weights have passed through the L2 cache since these were there
        row = tl.minimum(tl.program_id(1) * ROWS + tl.arange(0, ROWS), D - 1)
        ask_for_sectors(h_ptr + row)
        ask_for_sectors(post_ptr + row)
        ask_for_sectors(pre_ptr + row)
    given = hidden_ptr, weights_ptr, experts_ptr, weight_ptr, out_ptr, weights_stride, scale
    down_across(*given, TOP_K, SLOTS, D, F, ROWS, BLOCK, HELD, PDL)
    tl.debug_barrier()
    done = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    if done == tl.num_programs(1) - 1:
        tl.debug_barrier()
        tl.store(counter_ptr, 0)
        rows = out_ptr, h_ptr, post_ptr, pre_ptr, h_out_ptr, x_out_ptr
        _cross(*rows, y_scale, h_scale, post_eps, eps, D, PIECE)
