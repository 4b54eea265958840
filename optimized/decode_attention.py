"""Attention of one new token over its KV cache, the sequence split among programs.

    s = q k^T * scale (masked),  p = softmax(s),  out = R(p v)

q [B, 1, H, d], k, v [B, S, Hkv, d] BF16 (strided views of the cache), mask [B, 1, S] bool or None
-> [B, 1, H, d]. Each program reads a share of one KV head's sequence once for all of its G = H /
Hkv query heads and leaves a partial sum, maximum and numerator (FP32); a second kernel combines
them in a fixed order. Bytes: 4 S Hkv d, 51 MB or 12 us on an H200 for 100K positions of a TP8 rank
of Beam. Sizes depend on S alone, so a captured graph serves every position: the mask decides.

No rounding is added: products of BF16 values are exact in FP32, and P, which stays FP32, enters
the second product as three BF16 terms that sum to it exactly, so that tensor cores can multiply it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.change import Change, Contract, Implementation, KnobValue
from optimized.triton_support import (
    INTERPRETED,
    OfflineCase,
    begin,
    exp_fp32,
    launch,
    outside_domain,
)

PROGRAMS = 264  # two for each of an H200's 132 SMs
COMBINED_COLUMNS = 16  # of the head dimension for one combining program: 64-byte reads
HIDDEN = tl.constexpr(-3.4028234663852886e38)  # torch.finfo(float32).min, as in the reference


@dataclass(frozen=True, kw_only=True)
class AttentionKnobs:
    """`warps` of a thread block, `block` positions at a time, `stages` of the pipelined loop and
    `splits` of the sequence. Sizes are B, S, H, Hkv and d."""

    warps: int
    block: int
    stages: int
    splits: int

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "AttentionKnobs":
        block = max(32, min(128, 8192 // shape["d"]))  # keys and values of 32 KB in flight
        most = triton.cdiv(shape["S"], block)
        splits = max(1, min(PROGRAMS // max(1, shape["B"] * shape["Hkv"]), most))
        return cls(warps=4, block=block, stages=2 if splits == most else 3, splits=splits)

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        return {
            "warps": (2, 4, 8),
            "block": (32, 64, 128),
            "stages": (1, 2, 3, 4),
            "splits": (1, 2, 4, 8, 16, 32, 64, 132, 264, 396, 528),
        }

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        powers = all(n > 0 and n & (n - 1) == 0 for n in (self.warps, self.block))
        staged = 2 * self.block * shape["d"] * 2 * self.stages  # bytes of shared memory
        fits = self.splits <= max(1, triton.cdiv(shape["S"], self.block))
        return powers and self.block >= 16 and self.stages >= 1 and staged <= 160_000 and fits


@triton.jit
def dot(a, b, total, WIDE: tl.constexpr):
    """total + a b in FP32; `WIDE` for the interpreter, whose BF16 products are wrong."""
    if WIDE:
        return total + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, total)


@triton.jit
def add_block(scores, v, inside, highest, denominator, numerator, WIDE: tl.constexpr):
    """Take scores [GROUP, BLOCK] and their values [BLOCK, DIM] into a running softmax."""
    higher = tl.maximum(highest, tl.max(scores, axis=1))
    weights = tl.where(inside[None, :], exp_fp32(scores - higher[:, None]), 0.0)
    kept = exp_fp32(highest - higher)
    denominator = denominator * kept + tl.sum(weights, axis=1)
    numerator = numerator * kept[:, None]
    rest = weights
    for _ in tl.static_range(3):  # pyright: ignore[reportGeneralTypeIssues]
        part = rest.to(tl.bfloat16)
        numerator = dot(part, v, numerator, WIDE)
        rest = rest - part.to(tl.float32)
    return higher, denominator, numerator


@triton.jit
def decode_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    sums_ptr,
    stats_ptr,
    out_ptr,
    k_batch,
    k_slot,
    k_head,
    v_batch,
    v_slot,
    v_head,
    mask_batch,
    S,
    tiles,
    scale,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    split, kv_head = tl.program_id(0), tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    first_row = (batch * tl.num_programs(1) + kv_head) * G
    heads = tl.arange(0, GROUP)
    columns = tl.arange(0, DIM)
    block = tl.arange(0, BLOCK)
    in_group = heads < G
    q_rows = q_ptr + (first_row + heads)[:, None] * DIM + columns[None, :]
    q = tl.load(q_rows, mask=in_group[:, None], other=0.0)
    k_base = k_ptr + batch * k_batch + kv_head * k_head + columns[:, None]
    v_base = v_ptr + batch * v_batch + kv_head * v_head + columns[None, :]

    highest = tl.full((GROUP,), HIDDEN, tl.float32)
    denominator = tl.zeros((GROUP,), tl.float32)
    numerator = tl.zeros((GROUP, DIM), tl.float32)
    start, end = split * tiles * BLOCK, tl.minimum((split + 1) * tiles * BLOCK, S)
    for first in tl.range(start, end, BLOCK, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        position = (first + block).to(tl.int64)
        inside = position < S
        k = tl.load(k_base + position[None, :] * k_slot, mask=inside[None, :], other=0.0)
        v = tl.load(v_base + position[:, None] * v_slot, mask=inside[:, None], other=0.0)
        scores = dot(q, k, tl.zeros((GROUP, BLOCK), tl.float32), WIDE) * scale
        if MASKED:
            seen = tl.load(mask_ptr + batch * mask_batch + position, mask=inside, other=0)
            scores = tl.where((seen != 0)[None, :], scores, HIDDEN)
        else:
            scores = tl.where(inside[None, :], scores, HIDDEN)
        highest, denominator, numerator = add_block(
            scores, v, inside, highest, denominator, numerator, WIDE
        )

    if SPLITS == 1:
        out = (numerator / denominator[:, None]).to(tl.bfloat16)
        out_rows = out_ptr + (first_row + heads)[:, None] * DIM + columns[None, :]
        tl.store(out_rows, out, mask=in_group[:, None])
    else:
        rows = (first_row + heads) * SPLITS + split
        sums = sums_ptr + rows[:, None] * DIM + columns[None, :]
        tl.store(sums, numerator, mask=in_group[:, None])
        tl.store(stats_ptr + rows * 2, highest, mask=in_group)
        tl.store(stats_ptr + rows * 2 + 1, denominator, mask=in_group)


@triton.jit
def combined_shares(
    sums_ptr,
    stats_ptr,
    row,
    columns,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
):
    """Some columns of a row's attention, FP32, from what its shares left, in a fixed order."""
    splits = tl.arange(0, SPLIT_BLOCK)
    inside = splits < SPLITS
    stats = stats_ptr + (row * SPLITS + splits) * 2
    highest = tl.load(stats, mask=inside, other=HIDDEN)
    sums = sums_ptr + (row * SPLITS + splits)[:, None] * DIM + columns[None, :]
    numerators = tl.load(sums, mask=inside[:, None], other=0.0)
    denominators = tl.load(stats + 1, mask=inside, other=0.0)
    factors = exp_fp32(highest - tl.max(highest, axis=0))
    total = tl.sum(factors * denominators, axis=0)
    return tl.sum(numerators * factors[:, None], axis=0) / total


@triton.jit
def combine_splits_kernel(
    sums_ptr,
    stats_ptr,
    out_ptr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    out = combined_shares(sums_ptr, stats_ptr, row, columns, SPLITS, SPLIT_BLOCK, DIM)
    tl.store(out_ptr + row * DIM + columns, out.to(tl.bfloat16))


def shape(node: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> dict[str, int]:
    """B sequences, S positions, H query and Hkv KV heads, d head dimension."""
    sizes = {"B": q.shape[0], "S": k.shape[1], "H": q.shape[2], "Hkv": k.shape[2]}
    return {**sizes, "d": q.shape[3]}


def guard(node: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str | None:
    """Why the kernel does not take this call, or None."""
    batch, steps, heads, dim = q.shape
    if steps != 1:
        return "the step has more than one token, the kernel serves decode steps"
    if dim < 16 or dim > 256 or dim & (dim - 1):
        return f"q has head dimension {dim}, the kernel takes powers of two from 16 to 256"
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != dim or k.shape[1] == 0:
        return f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} do not fit together"
    if heads % k.shape[2] or heads // k.shape[2] > 64:
        return f"{heads} query heads on {k.shape[2]} KV heads, the kernel takes up to 64 on one"
    if not q.is_contiguous() or k.stride(3) != 1 or v.stride(3) != 1:
        return f"q, k, v have strides {q.stride()}, {k.stride()}, {v.stride()}"
    if mask is not None:
        if mask.shape != (batch, 1, k.shape[1]) or mask.dtype != torch.bool:
            return f"mask is {mask.dtype} {tuple(mask.shape)}, the kernel takes bool [B, 1, S]"
        if mask.stride(2) != 1:
            return f"mask has strides {mask.stride()}, the kernel takes contiguous rows"
    return outside_domain(q=q, k=k, v=v)


def build(node: Any, knobs: AttentionKnobs | None):
    """(q [B, 1, H, d], k, v [B, S, Hkv, d], mask [B, 1, S] bool or None) -> [B, 1, H, d]."""

    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        batch, _, heads, dim = q.shape
        length, kv_heads = k.shape[1:3]
        chosen = knobs or AttentionKnobs.heuristic(shape(node, q, k, v, mask))
        tiles = triton.cdiv(triton.cdiv(length, chosen.block), chosen.splits)
        splits = triton.cdiv(length, tiles * chosen.block)  # none without a position
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if out.numel() == 0:
            return out
        rows = batch * heads
        partial = {"dtype": torch.float32, "device": q.device}
        sums = torch.empty((rows, splits, dim) if splits > 1 else (1,), **partial)
        stats = torch.empty((rows, splits, 2) if splits > 1 else (1,), **partial)
        group = heads // kv_heads
        blocks: dict[str, Any] = {"G": group, "GROUP": max(16, triton.next_power_of_2(group))}
        blocks |= {"DIM": dim, "BLOCK": chosen.block, "SPLITS": splits, "STAGES": chosen.stages}
        blocks |= {"MASKED": mask is not None, "WIDE": INTERPRETED, "num_warps": chosen.warps}
        launch(
            decode_attention_kernel,
            (splits, kv_heads, batch),
            q,
            k,
            v,
            q if mask is None else mask.view(torch.uint8),
            sums,
            stats,
            out,
            *k.stride()[:3],
            *v.stride()[:3],
            0 if mask is None else mask.stride(0),
            length,
            tiles,
            node.scale,
            exact=False,
            **blocks,
        )
        if splits > 1:
            columns = min(COMBINED_COLUMNS, dim)
            block = triton.next_power_of_2(splits)
            launch(
                combine_splits_kernel,
                (rows, dim // columns),
                sums,
                stats,
                out,
                SPLITS=splits,
                SPLIT_BLOCK=block,
                DIM=dim,
                COLUMNS=columns,
                num_warps=4,
                exact=False,
            )
        return out

    return forward


def offline_cases() -> list[OfflineCase]:
    """A TP8 rank of Beam: 6 query heads on 1 KV head, 100K positions and a window of 512."""
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*bf16") | {"mask_ptr": "*u8"}
    pointers |= {"sums_ptr": "*fp32", "stats_ptr": "*fp32", "out_ptr": "*bf16"}
    signature = dict(pointers)
    signature |= {f"{x}_{part}": "i64:16" for x in "kv" for part in ("batch", "slot", "head")}
    signature |= {"mask_batch": "i64:16", "S": "i32:16", "tiles": "i32", "scale": "fp32"}
    found = []
    for length in (100_352, 512):
        knobs = AttentionKnobs.heuristic({"B": 1, "S": length, "H": 6, "Hkv": 1, "d": 128})
        values: dict[str, Any] = {"G": 6, "GROUP": 16, "DIM": 128, "BLOCK": knobs.block}
        values |= {"SPLITS": knobs.splits, "STAGES": knobs.stages, "MASKED": True, "WIDE": False}
        kinds = {**signature, **dict.fromkeys(values, "constexpr")}
        found.append(OfflineCase(decode_attention_kernel, kinds, values, knobs.warps))
        values = {"SPLITS": knobs.splits, "SPLIT_BLOCK": triton.next_power_of_2(knobs.splits)}
        values |= {"DIM": 128, "COLUMNS": COMBINED_COLUMNS}
        kinds = {name: pointers[name] for name in ("sums_ptr", "stats_ptr", "out_ptr")}
        kinds |= dict.fromkeys(values, "constexpr")
        found.append(OfflineCase(combine_splits_kernel, kinds, values, 4))
    return found


CHANGE = Change(
    name="decode_attention",
    region="attend",
    summary="attention of a decode step, the sequence split among all SMs",
    contract=Contract(numerics="reduction"),
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build,
            guard=guard,
            knobs=AttentionKnobs,
            shape=shape,
        ),
    ),
)
