"""The kernel that prepares queries and keys: per-head RMSNorm, q's factor, RoPE, the cache write.

A program serves some heads of one row (token), or of several. A head is held as two halves of P =
d / 2 columns, which RoPE combines. All arithmetic is FP32; each step rounds to BF16 where the
reference does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.change import KnobValue
from optimized.triton_support import (
    OfflineCase,
    begin,
    launch,
    loads_are_asked_for,
    outside_domain,
    row_stride,
)

MAX_ROWS = 16384  # tested up to here
FEW_ROWS = 256  # fewer programs than fill an H200: latency counts
MOST_ROWS = 16
# Of a program where there are many rows, 32 a thread; with fewer, starting thread blocks counts: 2
# for each of 16384 tokens of a TP8 rank of Beam took 57 us of an H200, 71 MB (2026-11-30).
VALUES = 8192


@dataclass(frozen=True, kw_only=True)
class QKKnobs:
    """`warps` of a thread block, the `heads` that it serves, and of how many `rows` (tokens); sizes
    are T rows, H, Hkv and d."""

    warps: int
    heads: int
    rows: int = 1

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "QKKnobs":
        if shape["T"] <= FEW_ROWS:
            return cls(warps=1, heads=1)
        heads = min(8, triton.next_power_of_2(shape["H"]))
        rows = max(1, min(MOST_ROWS, VALUES // (heads * shape["d"])))
        return cls(warps=max(1, rows * heads * shape["d"] // 1024), heads=heads, rows=rows)

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        few = shape["T"] <= FEW_ROWS
        return {
            "warps": (1, 2, 4) if few else (1, 2, 4, 8),
            "heads": (1, 2, 4, 8),
            "rows": (1,) if few else (1, 2, 4, 8, MOST_ROWS),
        }

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        powers = all(n > 0 and n & (n - 1) == 0 for n in (self.warps, self.heads, self.rows))
        values = self.rows * self.heads * shape["d"]
        enough = self.warps == 1 or values >= 64 * self.warps
        return powers and enough and values // self.warps <= 2048 and self.heads <= 2 * shape["H"]


@triton.jit
def normed_heads(
    row_ptr,
    weight_ptr,
    heads,
    columns,
    mask,
    eps,
    P: tl.constexpr,
    WEIGHTED: tl.constexpr = True,
):
    """R(rms_norm(x) * w) of `heads` [HEADS, 1] of one row, as FP32 halves [HEADS, P]; w is one
    where nothing is `WEIGHTED`."""
    a, b = halves(row_ptr, heads, columns, mask, P)
    weight_a, weight_b = 1.0, 1.0
    if WEIGHTED:
        weight_a, weight_b = tl.load(weight_ptr + columns), tl.load(weight_ptr + P + columns)
    return normed_halves(a, b, weight_a, weight_b, eps, P, WEIGHTED)


@triton.jit
def halves(row_ptr, heads, columns, mask, P: tl.constexpr):
    """`heads` [HEADS, 1] of a row, or each of its own row, as FP32 halves [HEADS, P]."""
    a, b = stored_halves(row_ptr, heads, columns, mask, P)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def stored_halves(row_ptr, heads, columns, mask, P: tl.constexpr):
    """The same as they are in memory."""
    pointers = row_ptr + heads * (2 * P) + columns
    return tl.load(pointers, mask=mask, other=0.0), tl.load(pointers + P, mask=mask, other=0.0)


@triton.jit
def normed_halves(a, b, weight_a, weight_b, eps, P: tl.constexpr, WEIGHTED: tl.constexpr):
    """R(rms_norm(x) * w) of heads in halves [HEADS, P] and w in halves [1, P], FP32."""
    squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
    inverse = tl.rsqrt(squares * (0.5 / P) + eps)[:, None]
    a, b = a * inverse, b * inverse
    if WEIGHTED:
        a, b = a * weight_a.to(tl.float32), b * weight_b.to(tl.float32)
    return _rounded(a), _rounded(b)


@triton.jit
def _rounded(x):
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def turned(a, b, cos, sin, ROTATION: tl.constexpr):
    """RoPE of halves: "once" is rounded by whoever stores it, "stepped" rounds products and sums,
    "none" leaves them."""
    if ROTATION == "once":
        return a * cos - b * sin, b * cos + a * sin
    elif ROTATION == "stepped":
        first = _rounded(a * cos) - _rounded(b * sin)
        second = _rounded(b * cos) + _rounded(a * sin)
        return _rounded(first), _rounded(second)
    else:
        return a, b


@triton.jit
def store_heads(row_ptr, a, b, heads, columns, mask, head_stride, P: tl.constexpr):
    """Write halves [HEADS, P] as BF16, heads `head_stride` elements apart."""
    pointers = row_ptr + heads * head_stride + columns
    tl.store(pointers, a.to(tl.bfloat16), mask=mask)
    tl.store(pointers + P, b.to(tl.bfloat16), mask=mask)


@triton.jit
def rows_and_heads(first, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """A program's rows [ROWS * HEADS, 1], int64, or the only one; and its heads, `first` and on."""
    start = tl.program_id(0).to(tl.int64) * ROWS
    if ROWS == 1:
        return start, first + tl.arange(0, HEADS)[:, None]
    else:
        step = tl.arange(0, ROWS * HEADS)[:, None]
        return start + step // HEADS, first + step % HEADS


@triton.jit
def angles(cos_ptr, sin_ptr, row, columns, inside, P: tl.constexpr, ROTATION: tl.constexpr):
    """cos and sin of rows, FP32."""
    if ROTATION == "none":
        return 0.0, 0.0
    else:
        place = row * P + columns
        cos = tl.load(cos_ptr + place, mask=inside, other=0.0).to(tl.float32)
        return cos, tl.load(sin_ptr + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def qk_norm_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight,
    k_weight,
    factors_ptr,
    cos_ptr,
    sin_ptr,
    k_cache,
    v_cache,
    slots,
    q_out,
    k_out,
    q_stride,
    k_stride,
    v_stride,
    k_batch,
    k_slot,
    k_head,
    v_batch,
    v_slot,
    v_head,
    count,
    steps,
    eps,
    factor,
    H: tl.constexpr,
    HKV: tl.constexpr,
    P: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SCALED: tl.constexpr,
    ROTATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norms, q times its factor, RoPE, and the cache write. `SCALED` is "row" where each row has a
    factor, "all" where `factor` is that of all, or "none"."""
    begin(PDL)
    group = tl.program_id(1)
    columns = tl.arange(0, P)[None, :]
    query_groups: tl.constexpr = (H + HEADS - 1) // HEADS
    if group < query_groups:
        row, heads = rows_and_heads(group * HEADS, HEADS, ROWS)
        mask = (heads < H) & (row < count) & (columns < P)
        cos, sin = angles(cos_ptr, sin_ptr, row, columns, row < count, P, ROTATION)
        shares = factor
        if SCALED == "row":
            shares = tl.load(factors_ptr + row, mask=row < count, other=0.0)
        loads_are_asked_for(PDL and ROWS > 1)
        q_row = q_ptr + row * q_stride
        a, b = normed_heads(q_row, q_weight, heads, columns, mask, eps, P, WEIGHTED)
        if SCALED != "none":
            a, b = _rounded(a * shares), _rounded(b * shares)
        a, b = turned(a, b, cos, sin, ROTATION)
        store_heads(q_out + row * (H * 2 * P), a, b, heads, columns, mask, 2 * P, P)
    else:
        token, kv_heads = rows_and_heads((group - query_groups) * KV_HEADS, KV_HEADS, ROWS)
        there = token < count
        kv_mask = (kv_heads < HKV) & there & (columns < P)
        batch, slot = token // steps, tl.load(slots + token, mask=there, other=0)
        v_a, v_b = stored_halves(v_ptr + token * v_stride, kv_heads, columns, kv_mask, P)
        k_cos, k_sin = angles(cos_ptr, sin_ptr, token, columns, there, P, ROTATION)
        loads_are_asked_for(PDL and ROWS > 1)
        k_row_in = k_ptr + token * k_stride
        k_a, k_b = normed_heads(k_row_in, k_weight, kv_heads, columns, kv_mask, eps, P, WEIGHTED)
        k_a, k_b = turned(k_a, k_b, k_cos, k_sin, ROTATION)
        k_target = k_out + token * (HKV * 2 * P)
        store_heads(k_target, k_a, k_b, kv_heads, columns, kv_mask, 2 * P, P)
        k_row = k_cache + batch * k_batch + slot * k_slot
        store_heads(k_row, k_a, k_b, kv_heads, columns, kv_mask, k_head, P)
        v_row = v_cache + batch * v_batch + slot * v_slot
        store_heads(v_row, v_a, v_b, kv_heads, columns, kv_mask, v_head, P)


def sizes(node: Any, q: Tensor, k: Tensor, *rest: Any) -> dict[str, int]:
    """T rows of the step, H query and Hkv KV heads, d head dimension."""
    batch, steps, heads, dim = q.shape
    return {"T": batch * steps, "H": heads, "Hkv": k.shape[2], "d": dim}


def outside_layout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    tables: Mapping[str, tuple[Tensor, tuple[int, ...], torch.dtype]],
) -> str | None:
    """Why these arguments are outside what the kernel is tested for, or None.

    `tables` are other inputs by name, each with the shape and dtype that it must have.
    """
    batch, steps, heads, dim = q.shape
    if dim < 16 or dim & (dim - 1):
        return f"q has head dimension {dim}, the kernel takes powers of two from 16"
    if batch * steps > MAX_ROWS:
        return f"q has {batch * steps} rows, the kernel takes up to {MAX_ROWS}"
    if k.shape != v.shape or k.shape[:2] != q.shape[:2] or k.shape[3] != dim:
        return f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} do not fit together"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if row_stride(x, inner=2) is None:
            return f"{name} has strides {x.stride()}, the kernel takes evenly spaced rows"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.shape[0] != batch or cache.shape[2:] != k.shape[2:] or cache.stride(3) != 1:
            return f"{name} has shape {tuple(cache.shape)} and strides {cache.stride()}"
    if slots.shape != (batch, steps) or slots.dtype != torch.int64 or not slots.is_contiguous():
        return f"slots is {slots.dtype} {tuple(slots.shape)}, the kernel takes int64 [B, T]"
    for name, (table, expected, dtype) in tables.items():
        if table.shape != expected or table.dtype != dtype or not table.is_contiguous():
            given = f"{table.dtype} {tuple(table.shape)}"
            return f"{name} is {given}, the kernel takes contiguous {dtype} {expected}"
    return outside_domain(q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache)


class Extras(NamedTuple):
    """What distinguishes one preparation from another; what is None is left out. At most one of the
    factors of q is given. Tables in FP32 turn in one step, in BF16 with every step rounded."""

    weights: tuple[Tensor, Tensor] | None = None  # q's and k's, [d] BF16
    factors: Tensor | None = None  # [B, T] FP32
    factor: float | None = None
    tables: tuple[Tensor, Tensor] | None = None  # cos and sin, [B, T, d / 2]


def prepare_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    eps: float,
    knobs: QKKnobs | None,
    extras: Extras,
) -> tuple[Tensor, Tensor]:
    """(q [B, T, H, d], k, v [B, T, Hkv, d], caches [B, S + 1, Hkv, d], slots [B, T]) -> (q, k),
    contiguous; writes k and v to the caches."""
    chosen = knobs or QKKnobs.heuristic(sizes(None, q, k))
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if q.numel() == 0:
        return q_out, k_out
    grid, arguments = launch_sizes(q, k, v, k_cache, v_cache, chosen)
    scaled = "all" if extras.factor is not None else "row" if extras.factors is not None else "none"
    rotation = "none"
    if extras.tables is not None:
        rotation = "once" if extras.tables[0].dtype == torch.float32 else "stepped"
    launch(
        qk_norm_kernel,
        grid,
        q,
        k,
        v,
        *(extras.weights or (q, k)),
        q if extras.factors is None else extras.factors,
        *(extras.tables or (q, k)),
        k_cache,
        v_cache,
        slots,
        q_out,
        k_out,
        eps=eps,
        factor=1.0 if extras.factor is None else extras.factor,
        WEIGHTED=extras.weights is not None,
        SCALED=scaled,
        ROTATION=rotation,
        **arguments,
    )
    return q_out, k_out


def launch_sizes(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, knobs: QKKnobs
) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, and the kernel's sizes and launch options."""
    batch, steps, query_heads, dim = q.shape
    kv_heads = k.shape[2]
    kv_tile = min(knobs.heads, triton.next_power_of_2(kv_heads))
    arguments: dict[str, Any] = {
        "q_stride": row_stride(q, inner=2) or 0,
        "k_stride": row_stride(k, inner=2) or 0,
        "v_stride": row_stride(v, inner=2) or 0,
        "k_batch": k_cache.stride(0),
        "k_slot": k_cache.stride(1),
        "k_head": k_cache.stride(2),
        "v_batch": v_cache.stride(0),
        "v_slot": v_cache.stride(1),
        "v_head": v_cache.stride(2),
        "count": batch * steps,
        "steps": steps,
        "H": query_heads,
        "HKV": kv_heads,
        "P": dim // 2,
        "HEADS": knobs.heads,
        "KV_HEADS": kv_tile,
        "ROWS": knobs.rows,
        "num_warps": knobs.warps,
    }
    groups = triton.cdiv(query_heads, knobs.heads) + triton.cdiv(kv_heads, kv_tile)
    return (triton.cdiv(batch * steps, knobs.rows), groups), arguments


def cases(heads: int, kv_heads: int, dim: int, **kind: Any) -> list[OfflineCase]:
    """A decode step and a long prefill of that many heads; `kind` is WEIGHTED, SCALED, ROTATION."""
    bf16 = "q_ptr", "k_ptr", "v_ptr", "q_weight", "k_weight", "k_cache", "v_cache", "q_out", "k_out"
    signature: dict[str, str] = dict.fromkeys(bf16, "*bf16") | {"slots": "*i64"}
    table = "*fp32" if kind["ROTATION"] == "once" else "*bf16"
    signature |= dict.fromkeys(("cos_ptr", "sin_ptr"), table)
    signature["factors_ptr"] = "*fp32" if kind["SCALED"] == "row" else "*bf16"
    for tensor in "kv":
        signature |= {f"{tensor}_{part}": "i64:16" for part in ("batch", "slot", "head")}
    signature |= {f"{tensor}_stride": "i32:16" for tensor in "qkv"}
    signature |= {"count": "i32", "steps": "i32", "eps": "fp32", "factor": "fp32"}
    found = []
    for rows in (1, 16384):
        knobs = QKKnobs.heuristic({"T": rows, "H": heads, "Hkv": kv_heads, "d": dim})
        kv_tile = min(knobs.heads, triton.next_power_of_2(kv_heads))
        values = {"H": heads, "HKV": kv_heads, "P": dim // 2, **kind}
        values |= {"HEADS": knobs.heads, "KV_HEADS": kv_tile, "ROWS": knobs.rows}
        types = signature | dict.fromkeys(values, "constexpr")
        ordered = {n: types[n] for n in qk_norm_kernel.arg_names if n != "PDL"}
        found.append(OfflineCase(qk_norm_kernel, ordered, values, knobs.warps))
    return found
