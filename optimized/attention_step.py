"""Attention of one decode step, from the projections on: two kernels, or three and the projection.

    q, k  = R(rms_norm(q) w_q), R(rms_norm(k) w_k)      per head
    q, k  = R(rope(q)), R(rope(k))                      sliding layers
    q     = R(q * q_scale)                              full layers
    cache[slot] = k, v
    a     = R(softmax(scale q K^T) V)                   over the cache, masked
    a     = R(a * R(sigmoid(R(gate + bias))))
    y     = R(a W_o^T)

or with weightless norms, one factor for all queries, R(q * c), before a rotation whose products and
sums are rounded, R(unit_norm(a)) per head before the gate and no bias, as in Muse Spark.

R rounds to BF16; all else is FP32. B sequences of one token, H query heads on Hkv KV heads of d, S
positions, D hidden. All rounding points are kept; none is added: P enters its product as three BF16
terms that sum to it exactly (`decode_attention`).

A thread block prepares the queries of a KV head for itself, and the one whose share of the sequence
holds the new position writes it there first. Where few shares have to be combined (a window), every
block of the output projection combines and gates them for itself, its weights loaded before.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from optimized.change import Change, Contract, Implementation, region_of
from optimized.decode_attention import PROGRAMS
from optimized.step_kernels import step_attention_kernel
from optimized.step_knobs import MAX_HELD, StepKnobs, padded_group
from optimized.step_output import combine_gate_kernel, gated_projection_kernel
from optimized.step_stream import step_stream_kernel
from optimized.triton_support import INTERPRETED, OfflineCase, launch, outside_domain

# An attention's own parts by their regions; what prepares keys by whether they are all kept.
WEIGHTED = {"attend": "attend", "gate": "output_gate"}
WEIGHTED_KEYS = {True: "qk_norm_scale", False: "qk_norm_rope"}
WEIGHTLESS = {"attend": "attend", "gate": "output_norm_gate"}
WEIGHTLESS_KEYS = {True: "qk_unit_norm", False: "qk_unit_norm_rope"}
MAX_BATCH = 128
MAX_COMBINED = 8192  # numerators that a block of the projection has in registers at once
MAX_FUSED_SPLITS = 16  # more would have every block of the projection read too much


def sizes(node: Any, x: Tensor, step: Any, cache: Any) -> dict[str, int]:
    """B sequences, S positions that are read, H query and Hkv KV heads, d head dimension."""
    length = step.extent if node.is_full else cache.k.shape[1] - 1
    heads, kv_heads = (len(p.weight) // node.head_dim for p in (node.q_proj, node.k_proj))
    return {"B": x.shape[0], "S": length, "H": heads, "Hkv": kv_heads, "d": node.head_dim}


def is_weightless(node: Any) -> bool:
    """Whether norms have no weights, and the output has a norm."""
    return region_of(node.gate) == WEIGHTLESS["gate"]


def guard(node: Any, x: Tensor, step: Any, cache: Any) -> str | None:
    """Why the kernels do not take this call, or None."""
    parts = {name: region_of(getattr(node, name, node)) for name in ("prepare", "attend", "gate")}
    prepare, full = parts.pop("prepare"), node.is_full
    known = (WEIGHTED, WEIGHTED_KEYS[full]), (WEIGHTLESS, WEIGHTLESS_KEYS[full])
    if (parts, prepare) not in known:
        return "the attention has other parts than the kernels compute"
    if x.dim() != 3 or x.shape[1] != 1:
        return "the step has more than one token, the kernels serve decode steps"
    if not 0 < x.shape[0] <= MAX_BATCH:
        return f"{x.shape[0]} sequences, the kernels take 1 to {MAX_BATCH}"
    length, heads, kv_heads, dim = list(sizes(node, x, step, cache).values())[1:]
    if dim < 32 or dim > 256 or dim & (dim - 1):
        return f"head dimension {dim}, the kernels take powers of two from 32 to 256"
    if heads % kv_heads or heads // kv_heads > 64:
        return f"{heads} query heads on {kv_heads} KV heads, the kernels take up to 64 on one"
    for name, kept in (("k", cache.k), ("v", cache.v)):
        if kept.shape[0] != x.shape[0] or kept.shape[2:] != (kv_heads, dim) or kept.stride(3) != 1:
            return f"{name} cache is {tuple(kept.shape)} with strides {kept.stride()}"
    if length < 1:
        return "the cache holds no position"
    mask = step.full_mask if node.is_full else step.ring_mask
    slots = step.full_slots if node.is_full else step.ring_slots
    shape = x.shape[0], 1, length
    if mask is not None and (
        mask.dtype != torch.bool or mask.shape != shape or mask.stride(2) != 1
    ):
        return f"mask is {mask.dtype} {tuple(mask.shape)} with strides {mask.stride()}"
    if slots.dtype != torch.int64 or slots.shape != (x.shape[0], 1):
        return f"slots are {slots.dtype} {tuple(slots.shape)}, the kernels take int64 [B, 1]"
    tables = () if node.is_full else (step.cos, step.sin)
    wanted = torch.bfloat16 if is_weightless(node) else torch.float32
    if node.is_full and not is_weightless(node):
        tables = (step.q_scale,)
    if not all(t.dtype == wanted and t.is_contiguous() for t in tables):
        return f"the position tables are not contiguous {wanted}"
    if not node.o_proj.weight.is_contiguous():
        return f"the output weight has strides {node.o_proj.weight.stride()}"
    return outside_domain(x=x, k=cache.k, v=cache.v, weight=node.o_proj.weight)


def build(node: Any, knobs: StepKnobs | None):
    """The function of `reference.beam_attention.Attention.forward`, for T = 1."""

    def forward(x: Tensor, step: Any, cache: Any) -> Tensor:
        weights = (p.weight for p in (node.q_proj, node.k_proj, node.v_proj, node.gate_proj))
        q, k, v, gate = node.project(x, *weights)
        shape = sizes(node, x, step, cache)
        chosen = knobs or StepKnobs.heuristic(shape)
        sums, stats, splits = attend(node, q, k, v, step, cache, chosen, shape)
        y = project(node, sums, stats, splits, gate, chosen)
        return node.rank_sum(y)

    return forward


def attend(
    node: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Any,
    cache: Any,
    knobs: StepKnobs,
    shape: Mapping[str, int],
) -> tuple[Tensor, Tensor, int]:
    """q [B, 1, H d], k, v [B, 1, Hkv d] -> each share's numerators [B H, splits, d] and its maximum
    and denominator [B H, splits, 2], and how many there are; writes k and v to the cache."""
    batch, length, dim = shape["B"], shape["S"], shape["d"]
    tiles = triton.cdiv(triton.cdiv(length, knobs.block), knobs.splits)
    splits = triton.cdiv(length, tiles * knobs.block)  # none without a position
    mask = step.full_mask if node.is_full else step.ring_mask
    partial = {"dtype": torch.float32, "device": q.device}
    heads, kv_heads, weightless = shape["H"], shape["Hkv"], is_weightless(node)
    sums = torch.empty((batch * heads, splits, dim), **partial)
    stats = torch.empty((batch * heads, splits, 2), **partial)
    stream = knobs.stream and tiles > 1
    launch(
        step_stream_kernel if stream else step_attention_kernel,
        (splits, kv_heads, batch),
        q,
        k,
        v,
        q if weightless else node.q_norm.weight,
        k if weightless else node.k_norm.weight,
        step.cos,
        step.sin,
        step.cos if weightless else step.q_scale,
        cache.k,
        cache.v,
        step.full_slots if node.is_full else step.ring_slots,
        q if mask is None else mask.view(torch.uint8),
        sums,
        stats,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        *cache.k.stride()[:3],
        *cache.v.stride()[:3],
        0 if mask is None else mask.stride(0),
        length,
        tiles,
        node.attend.scale,
        node.prepare.eps,
        node.prepare.q_factor if weightless else 1.0,
        G=heads // kv_heads,
        GROUP=padded_group(shape),
        P=dim // 2,
        BLOCK=knobs.block,
        SPLITS=splits,
        STAGES=knobs.stages,
        MASKED=mask is not None,
        **kinds(weightless, node.is_full),
        **form(knobs, tiles, dense=is_dense(cache.k) and is_dense(cache.v)),
        WIDE=INTERPRETED,
        num_warps=knobs.warps,
    )
    return sums, stats, splits


def is_dense(kept: Tensor) -> bool:
    """Whether keys or values [B, S, Hkv, d] of a position follow those of the one before, all of
    them 16-byte aligned."""
    following = kept.stride(1) == kept.shape[2] * kept.shape[3] and kept.stride(2) == kept.shape[3]
    return following and kept.data_ptr() % 16 == 0 and kept.stride(0) % 8 == 0


def form(knobs: StepKnobs, tiles: int, *, dense: bool) -> dict[str, Any]:
    """What one of the two attention kernels takes alone; shares of one block are no streams."""
    if not knobs.stream or tiles == 1:
        return {"MORE": tiles > 1}
    return {"WARPS": knobs.warps, "AHEAD": min(knobs.ahead, tiles) if dense else 0}


def kinds(weightless: bool, full: bool) -> dict[str, Any]:
    """How queries and keys are prepared."""
    turned = "stepped" if weightless else "once"
    factor = "one" if weightless else "table" if full else "none"
    return {
        "WEIGHTED": not weightless,
        "ROTATION": "none" if full else turned,
        "FACTOR": factor,
    }


def row_tiles(outputs: int, width: int, knobs: StepKnobs) -> int:
    """How many times `rows` a program multiplies: so many that all programs fit a GPU at once, but
    no more than its registers hold."""
    wanted = triton.cdiv(outputs, knobs.rows * PROGRAMS * 8 // knobs.row_warps)
    most = MAX_HELD * 32 * knobs.row_warps // (knobs.rows * width)
    return max(1, min(wanted, most))


def shares_at_once(splits: int, width: int) -> int:
    """How many shares a block of the projection combines at a time beside the weights it holds."""
    most = max(1, MAX_COMBINED // triton.next_power_of_2(width))
    return min(triton.next_power_of_2(splits), most)


def project(
    node: Any, sums: Tensor, stats: Tensor, splits: int, gate: Tensor, knobs: StepKnobs
) -> Tensor:
    """The shares combined, gated by gate [B, 1, H d], and projected -> [B, 1, D]."""
    rows, _, dim = sums.shape
    heads, normed = len(node.q_proj.weight) // dim, is_weightless(node)
    width = heads * dim
    bias, eps = (gate, node.gate.eps) if normed else (node.gate_bias, 0.0)
    weight = node.o_proj.weight
    if rows == heads and splits <= MAX_FUSED_SPLITS:
        out = torch.empty((1, 1, len(weight)), dtype=gate.dtype, device=gate.device)
        tiles = row_tiles(len(weight), triton.next_power_of_2(heads) * dim, knobs)
        launch(
            gated_projection_kernel,
            (triton.cdiv(len(weight), knobs.rows * tiles),),
            sums,
            stats,
            gate,
            bias,
            weight,
            out,
            len(weight),
            eps,
            H=heads,
            HEADS=triton.next_power_of_2(heads),
            DIM=dim,
            SPLITS=splits,
            CHUNK=shares_at_once(splits, heads * dim),
            ROWS=knobs.rows,
            TILES=tiles,
            NORMED=normed,
            num_warps=knobs.row_warps,
        )
        return out
    a = torch.empty((rows // heads, 1, width), dtype=gate.dtype, device=gate.device)
    columns = dim if normed else min(knobs.columns, dim)
    launch(
        combine_gate_kernel,
        (rows, dim // columns),
        sums,
        stats,
        gate,
        bias,
        a,
        gate.stride(0),
        eps,
        H=heads,
        SPLITS=splits,
        SPLIT_BLOCK=triton.next_power_of_2(splits),
        DIM=dim,
        COLUMNS=columns,
        NORMED=normed,
        num_warps=knobs.column_warps,
    )
    return node.o_proj(a)


def offline_cases() -> list[OfflineCase]:
    """TP8 ranks at 100K positions and a window: 6 query heads on 1 of 128, as Beam, and 16 on 2 of
    64 with weightless norms, as Muse Spark."""
    wide, window = {"B": 1, "H": 6, "Hkv": 1, "d": 128}, 512
    found = rank_cases(wide, window, outputs=5120, weightless=False)
    narrow, window = {"B": 1, "H": 16, "Hkv": 2, "d": 64}, 2048
    return found + rank_cases(narrow, window, outputs=8192, weightless=True)


def rank_cases(
    rank: Mapping[str, int], window: int, *, outputs: int, weightless: bool
) -> list[OfflineCase]:
    """The kernels of a full layer and of a sliding one."""
    bf16 = "q_ptr", "k_ptr", "v_ptr", "q_weight", "k_weight", "k_cache", "v_cache"
    bf16 += "gate_ptr", "bias_ptr", "weight_ptr", "out_ptr"
    types: dict[str, str] = dict.fromkeys(bf16, "*bf16") | {"slots_ptr": "*i64", "mask_ptr": "*u8"}
    tables = dict.fromkeys(("cos_ptr", "sin_ptr"), "*bf16" if weightless else "*fp32")
    types |= {**tables, **dict.fromkeys(("factor_ptr", "sums_ptr", "stats_ptr"), "*fp32")}
    types |= {f"{x}_{part}": "i64:16" for x in "kv" for part in ("batch", "slot", "head")}
    types |= dict.fromkeys(("q_stride", "k_stride", "v_stride", "gate_stride"), "i32:16")
    types |= {"mask_batch": "i64:16", "S": "i32:16", "tiles": "i32", "O": "i32:16"}
    types |= dict.fromkeys(("scale", "eps", "q_factor"), "fp32")

    def case(kernel: Any, warps: int, **values: Any) -> OfflineCase:
        names = [n for n in kernel.arg_names if n != "PDL"]
        kept = {n: "constexpr" if n in values else types[n] for n in names}
        return OfflineCase(kernel, kept, values, warps)

    found, heads, dim = [], rank["H"], rank["d"]
    for length in (100_352, window):
        shape = {**rank, "S": length}
        knobs = StepKnobs.heuristic(shape)
        tiles = triton.cdiv(triton.cdiv(length, knobs.block), knobs.splits)
        splits = triton.cdiv(length, tiles * knobs.block)
        sizes: dict[str, Any] = {"G": heads // rank["Hkv"], "GROUP": padded_group(shape)}
        sizes |= {"P": dim // 2, "BLOCK": knobs.block, "SPLITS": splits}
        sizes |= {"STAGES": knobs.stages, "MASKED": True, "WIDE": False}
        sizes |= {**kinds(weightless, length > window), **form(knobs, tiles, dense=True)}
        stream = knobs.stream and tiles > 1
        kernel = step_stream_kernel if stream else step_attention_kernel
        found.append(case(kernel, knobs.warps, **sizes))
        sizes = {"SPLITS": splits, "DIM": dim, "NORMED": weightless, "H": heads}
        if splits > MAX_FUSED_SPLITS:
            columns = dim if weightless else knobs.columns
            sizes |= {"SPLIT_BLOCK": triton.next_power_of_2(splits)}
            found.append(case(combine_gate_kernel, knobs.column_warps, **sizes, COLUMNS=columns))
        else:
            padded = triton.next_power_of_2(heads)
            sizes |= {"HEADS": padded, "ROWS": knobs.rows}
            sizes |= {"TILES": row_tiles(outputs, padded * dim, knobs)}
            sizes |= {"CHUNK": shares_at_once(splits, heads * dim)}
            found.append(case(gated_projection_kernel, knobs.row_warps, **sizes))
    return found


CHANGE = Change(
    name="attention_step",
    region="attention",
    summary="a decode step's attention with everything around it, two kernels between projections",
    contract=Contract(numerics="reduction", batch_invariant=False),
    around=True,
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build,
            guard=guard,
            knobs=StepKnobs,
            shape=sizes,
        ),
    ),
)
