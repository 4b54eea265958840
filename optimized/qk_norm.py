"""What the kernels that prepare queries and keys share: per-head RMSNorm, the cache write, layout.

A program serves some heads of one row (token). A head is held as two halves of P = d / 2 columns,
which RoPE combines. All arithmetic is FP32; each step rounds to BF16 where the reference does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.change import KnobValue
from optimized.triton_support import OfflineCase, outside_domain, row_stride

MAX_ROWS = 16384  # tested up to here
FEW_ROWS = 256  # fewer programs than fill an H200: latency counts


@dataclass(frozen=True, kw_only=True)
class QKKnobs:
    """`warps` of a thread block and the `heads` it serves; sizes are T rows, H, Hkv and d."""

    warps: int
    heads: int

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "QKKnobs":
        few = shape["T"] <= FEW_ROWS
        heads = 1 if few else min(8, triton.next_power_of_2(shape["H"]))
        warps = 1 if few else max(1, min(4, heads * shape["d"] // 64))
        return cls(warps=warps, heads=heads)

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        return {"warps": (1, 2, 4), "heads": (1, 2, 4, 8)}

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        powers = self.warps & (self.warps - 1) == 0 and self.heads & (self.heads - 1) == 0
        values = self.heads * shape["d"]
        enough = self.warps == 1 or values >= 64 * self.warps
        return powers and enough and values // self.warps <= 2048 and self.heads <= 2 * shape["H"]


@triton.jit
def normed_heads(row_ptr, weight_ptr, heads, columns, mask, eps, P: tl.constexpr):
    """R(rms_norm(x) * w) of `heads` [HEADS, 1] of one row, as FP32 halves [HEADS, P]."""
    offsets = heads * (2 * P) + columns
    a = tl.load(row_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(row_ptr + offsets + P, mask=mask, other=0.0).to(tl.float32)
    squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
    inverse = tl.rsqrt(squares * (0.5 / P) + eps)[:, None]
    a = a * inverse * tl.load(weight_ptr + columns).to(tl.float32)
    b = b * inverse * tl.load(weight_ptr + P + columns).to(tl.float32)
    return a.to(tl.bfloat16).to(tl.float32), b.to(tl.bfloat16).to(tl.float32)


@triton.jit
def store_heads(row_ptr, a, b, heads, columns, mask, head_stride, P: tl.constexpr):
    """Write halves [HEADS, P] as BF16, heads `head_stride` elements apart."""
    pointers = row_ptr + heads * head_stride + columns
    tl.store(pointers, a.to(tl.bfloat16), mask=mask)
    tl.store(pointers + P, b.to(tl.bfloat16), mask=mask)


@triton.jit
def copy_heads(from_ptr, to_ptr, heads, columns, mask, head_stride, P: tl.constexpr):
    """Copy heads of one row, bits as they are."""
    source = from_ptr + heads * (2 * P) + columns
    target = to_ptr + heads * head_stride + columns
    tl.store(target, tl.load(source, mask=mask), mask=mask)
    tl.store(target + P, tl.load(source + P, mask=mask), mask=mask)


def sizes(node: Any, q: Tensor, k: Tensor, *rest: Any) -> dict[str, int]:
    """T rows of the step, H query and Hkv KV heads, d head dimension."""
    batch, steps, heads, dim = q.shape
    return {"T": batch * steps, "H": heads, "Hkv": k.shape[2], "d": dim}


def outside_layout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    tables: Mapping[str, tuple[Tensor, tuple[int, ...]]],
) -> str | None:
    """Why these arguments are outside what the kernels are tested for, or None.

    `tables` are FP32 inputs by name, each with the shape that it must have.
    """
    batch, steps, heads, dim = q.shape
    if dim < 16 or dim & (dim - 1):
        return f"q has head dimension {dim}, the kernel takes powers of two from 16"
    if batch * steps > MAX_ROWS:
        return f"q has {batch * steps} rows, the kernel takes up to {MAX_ROWS}"
    if k.shape != v.shape or k.shape[:2] != q.shape[:2] or k.shape[3] != dim:
        return f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} do not fit together"
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight.shape != (dim,) or not weight.is_contiguous():
            return f"{name} has shape {tuple(weight.shape)}, the kernel takes ({dim},)"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if row_stride(x, inner=2) is None:
            return f"{name} has strides {x.stride()}, the kernel takes evenly spaced rows"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.shape[0] != batch or cache.shape[2:] != k.shape[2:] or cache.stride(3) != 1:
            return f"{name} has shape {tuple(cache.shape)} and strides {cache.stride()}"
    if slots.shape != (batch, steps) or slots.dtype != torch.int64 or not slots.is_contiguous():
        return f"slots is {slots.dtype} {tuple(slots.shape)}, the kernel takes int64 [B, T]"
    for name, (table, expected) in tables.items():
        if table.shape != expected or table.dtype != torch.float32 or not table.is_contiguous():
            return f"{name} is {table.dtype} {tuple(table.shape)}, the kernel takes fp32 {expected}"
    return outside_domain(
        q=q, k=k, v=v, q_weight=q_weight, k_weight=k_weight, k_cache=k_cache, v_cache=v_cache
    )


def launch_sizes(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, knobs: QKKnobs
) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, and the sizes and launch options that the kernels have in common."""
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
        "steps": steps,
        "H": query_heads,
        "HKV": kv_heads,
        "P": dim // 2,
        "HEADS": knobs.heads,
        "KV_HEADS": kv_tile,
        "num_warps": knobs.warps,
    }
    groups = triton.cdiv(query_heads, knobs.heads) + triton.cdiv(kv_heads, kv_tile)
    return (batch * steps, groups), arguments


def cases(kernel: Any, tables: Sequence[str]) -> list[OfflineCase]:
    """Beam's TP8 rank: 6 query heads, 1 KV head of 128; a decode step and a long prefill."""
    signature = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "q_weight", "k_weight"), "*bf16")
    signature |= dict.fromkeys(tables, "*fp32")
    signature |= {"k_cache": "*bf16", "v_cache": "*bf16", "slots": "*i64"}
    signature |= {"q_out": "*bf16", "k_out": "*bf16"}
    for tensor in "kv":
        signature |= {f"{tensor}_{part}": "i64:16" for part in ("batch", "slot", "head")}
    signature |= {f"{tensor}_stride": "i32:16" for tensor in "qkv"}
    signature |= {"steps": "i32", "eps": "fp32"}
    constants = "H", "HKV", "P", "HEADS", "KV_HEADS"
    signature |= dict.fromkeys(constants, "constexpr")
    found = []
    for rows in (1, 16384):
        knobs = QKKnobs.heuristic({"T": rows, "H": 6, "Hkv": 1, "d": 128})
        values = {"H": 6, "HKV": 1, "P": 64, "HEADS": knobs.heads, "KV_HEADS": 1}
        ordered = {n: signature[n] for n in kernel.arg_names if n in signature}
        found.append(OfflineCase(kernel, ordered, values, knobs.warps))
    return found
