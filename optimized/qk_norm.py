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
from torch import Tensor

from optimized.change import KnobValue
from optimized.qk_norm_kernel import qk_norm_kernel
from optimized.triton_support import OfflineCase, launch, outside_domain, row_stride

MAX_ROWS = 16384  # tested up to here
FEW_ROWS = 256  # fewer programs than fill an H200: latency counts
MOST_ROWS = 16
# Of a program where there are many rows, 64 a thread; with fewer, starting thread blocks counts:
# for 16384 tokens of a TP8 rank of Beam, 71 MB, two for each token took 60 us of an H200, one for
# eight of them 35, with 32 a thread 45 (2026-11-30).
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
        return cls(warps=max(1, rows * heads * shape["d"] // 2048), heads=heads, rows=rows)

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
