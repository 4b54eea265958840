"""Attention of many new tokens over their KV cache, by groups of heads that share keys.

    s = scale q k^T (masked),  p = softmax(s),  out = R(p v)

q [B, T, H, d], k, v [B, S, Hkv, d] BF16 (strided views), mask [B, T, S] bool, or None where the
queries are the last T of S positions -> [B, T, H, d]. A program takes all G = H / Hkv query heads
of one KV head for `rows` / G tokens, so a key is read once for all of them. 4 B H d T S operations
without a mask: 4.9 TFLOP for 8 x 2048 tokens of a TP8 rank of Beam at 98K, 6.2 ms at an H200's 793
TFLOP/s (2026-11-29).

A block's scores are made while the one before it is mixed: its exponentials take about as long as
its two products, and tensor cores would wait for them otherwise.

With a mask only those blocks of keys are visited in which some query of the program sees something:
they are listed first (`live_blocks_kernel`). In a window of 512 that is a quarter of the keys.

One rounding is added, as in every fast kernel: exp(s - the row's maximum so far) to BF16 before its
product with v. A query that sees nothing gets zeros. The backend "torch" is the library's kernel
without the copies of keys that the reference makes for it.

Where there is no mask, the knob `engine` may name a library's kernel instead of ours
(`optimized.prefill_engines`), with the same added rounding; tuning times them side by side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from optimized.change import Change, Contract, Implementation, KnobValue
from optimized.prefill_engines import OWN, attend, check, offered, takes
from optimized.prefill_kernels import live_blocks_kernel, prefill_attention_kernel
from optimized.triton_support import OfflineCase, launch, outside_domain

LOG2_E = 1.4426950408889634
WORD = 64  # keys of a block where there is a mask: one int64 of bits for a token
WORDS, WIDE_WORDS = 4, 8  # of these looked at together, by bytes and by eight bytes
LIST_WARPS = 4
MAX_SHARED = 220_000  # bytes of shared memory
MAX_ELEMENTS = 2**31  # of a sequence's keys or mask: they are numbered in int32


@dataclass(frozen=True, kw_only=True)
class PrefillKnobs:
    """`rows` of queries (tokens times heads) a program, `block` keys at a time, `stages` of their
    loads, `warps`; or the library `engine` that serves the shape, for which those say nothing."""

    rows: int
    block: int
    stages: int
    warps: int
    engine: str = OWN

    @classmethod
    def heuristic(cls, shape: Mapping[str, int]) -> "PrefillKnobs":
        wide = shape["d"] > 128
        rows = max(64 if wide else 128, triton.next_power_of_2(shape["G"]))
        # Three short stages keep more loads in flight than two long ones in as much shared memory.
        # In a window of 512 three took 179 us of an H200, five 254 (8 x 2048 tokens of a TP8 rank
        # of Beam, 2026-11-30).
        stages = 2 if wide and not shape["masked"] else 3
        return cls(rows=rows, block=WORD, stages=stages, warps=8)

    @classmethod
    def candidates(cls, shape: Mapping[str, int]) -> Mapping[str, Sequence[KnobValue]]:
        return {
            "rows": (64, 128),
            "block": (WORD,) if shape["masked"] else (32, 64, 128),
            "stages": (3, 5) if shape["masked"] else (2, 3, 4),
            "warps": (4, 8),
            "engine": offered(shape),
        }

    def is_valid(self, shape: Mapping[str, int]) -> bool:
        if self.engine != OWN:  # one choice each
            plain = replace(self, engine=OWN)
            return takes(self.engine, shape) and plain == self.heuristic(shape)
        # With a mask, a stage brings the number of a block and the next one its keys.
        copies = (self.stages + 1) // 2 if shape["masked"] else self.stages
        shared = 2 * shape["d"] * (self.rows + self.block + 2 * self.block * copies)
        # Of a block: scores, those of the next one, and the exponentials that are multiplied.
        sums = self.rows * (shape["d"] + self.block + self.block // 2)
        blocks = self.block == WORD or not shape["masked"]
        return (
            blocks
            and self.rows >= shape["G"]
            and shared <= MAX_SHARED
            and sums <= 4096 * self.warps
        )


def shape(node: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> dict[str, int]:
    """B sequences, T queries, S positions, G query heads a KV head, d head dimension; `masked`."""
    sizes = {"B": q.shape[0], "T": q.shape[1], "S": k.shape[1], "G": q.shape[2] // k.shape[2]}
    return {**sizes, "d": q.shape[3], "masked": int(mask is not None)}


def guard(node: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str | None:
    """Why the kernels do not take this call, or None."""
    batch, steps, heads, dim = q.shape
    if dim < 16 or dim > 256 or dim & (dim - 1):
        return f"q has head dimension {dim}, the kernels take powers of two from 16 to 256"
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != dim:
        return f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} do not fit together"
    if k.shape[1] < max(1, steps if mask is None else 1):
        return f"{steps} queries at the end of {k.shape[1]} positions"
    if heads % k.shape[2] or heads // k.shape[2] > 64:
        return f"{heads} query heads on {k.shape[2]} KV heads, the kernels take up to 64 on one"
    if not q.is_contiguous() or k.stride(3) != 1 or v.stride(3) != 1:
        return f"q, k, v have strides {q.stride()}, {k.stride()}, {v.stride()}"
    if max(*(k.shape[1] * x.stride(1) for x in (k, v)), steps * k.shape[1]) >= MAX_ELEMENTS:
        return f"{k.shape[1]} positions, the kernels take fewer than {MAX_ELEMENTS} elements"
    if mask is not None:
        if mask.shape != (batch, steps, k.shape[1]) or mask.dtype != torch.bool:
            return f"mask is {mask.dtype} {tuple(mask.shape)}, the kernels take bool [B, T, S]"
        if mask.stride(2) != 1:
            return f"mask has strides {mask.stride()}, the kernels take contiguous rows"
    return outside_domain(q=q, k=k, v=v)


def live_blocks(mask: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """mask [B, T, S] bool, in tiles of `tokens` and blocks of WORD keys -> bits [B, T, blocks]
    int64, what each token sees; blocks [B, tiles, blocks] int32, those that some token of a tile
    sees, in order; and how many they are, counts [B, tiles] int32."""
    batch, steps, length = mask.shape
    tiles, words, place = triton.cdiv(steps, tokens), triton.cdiv(length, WORD), mask.device
    bits = torch.empty((batch, steps, words), dtype=torch.int64, device=place)
    blocks = torch.empty((batch, tiles, words), dtype=torch.int32, device=place)
    counts = torch.empty((batch, tiles), dtype=torch.int32, device=place)
    wide = not any(n % 8 for n in (length, *mask.stride()[:2], mask.data_ptr()))
    given = mask.view(torch.int64 if wide else torch.uint8)
    launch(
        live_blocks_kernel,
        (tiles, batch),
        given,
        bits,
        blocks,
        counts,
        given.stride(0),
        given.stride(1),
        steps,
        given.shape[2],
        TOKENS=tokens,
        TOKEN_ROWS=triton.next_power_of_2(tokens),
        WORD=WORD,
        WORDS=WIDE_WORDS if wide else WORDS,
        WIDE=wide,
        num_warps=LIST_WARPS,
    )
    return bits, blocks, counts


def build(node: Any, knobs: PrefillKnobs | None):
    """(q [B, T, H, d], k, v [B, S, Hkv, d], mask [B, T, S] bool or None) -> [B, T, H, d].

    ValueError if the knobs name an engine that is unknown or cannot run here.
    """
    if knobs is not None:
        check(knobs.engine)

    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        sizes = shape(node, q, k, v, mask)
        batch, steps, length, group, dim = (sizes[name] for name in ("B", "T", "S", "G", "d"))
        chosen = knobs or PrefillKnobs.heuristic(sizes)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if out.numel() == 0:
            return out
        if chosen.engine != OWN:
            return attend(chosen.engine, q, k, v, mask, node.scale)
        tokens = chosen.rows // group
        tiles = triton.cdiv(steps, tokens)
        bits = blocks = counts = q  # not read
        if mask is not None:
            bits, blocks, counts = live_blocks(mask, tokens)
        launch(
            prefill_attention_kernel,
            (tiles, k.shape[2], batch),
            q,
            k,
            v,
            bits,
            blocks,
            counts,
            out,
            *k.stride()[:3],
            *v.stride()[:3],
            steps,
            length,
            node.scale * LOG2_E,
            exact=False,
            G=group,
            HKV=k.shape[2],
            DIM=dim,
            ROWS=chosen.rows,
            BLOCK=chosen.block,
            STAGES=chosen.stages,
            MASKED=mask is not None,
            num_warps=chosen.warps,
        )
        return out

    return forward


def guard_views(node: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str | None:
    """Why the library cannot read a key once for all query heads, or None."""
    if k.shape[2] != 1:
        return f"{k.shape[2]} KV heads cannot be views of one for {q.shape[2]} query heads"
    if mask is None and k.shape[1] < q.shape[1]:
        return f"{q.shape[1]} queries at the end of {k.shape[1]} positions"
    return None


def build_views(node: Any, knobs: None):
    """The reference with its repeated keys and values as views: no copies, the same kernel, and
    zeros, too, for a query that sees nothing."""

    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        allowed = causal_lower_right(q.shape[1], k.shape[1]) if mask is None else mask[:, None]
        k, v = (y.transpose(1, 2).expand(-1, q.shape[2], -1, -1) for y in (k, v))
        a = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=allowed, scale=node.scale
        )
        if mask is not None:  # PyTorch's CUDA kernels leave anything where nothing is seen
            a = a.masked_fill(~mask.any(dim=-1)[:, None, :, None], 0.0)
        return a.transpose(1, 2)

    return forward


def offline_cases() -> list[OfflineCase]:
    """One of eight tensor-parallel ranks: 6 query heads on a KV head of 128, 8 on one of 64; causal
    over a long sequence, and a window."""
    pointers = {f"{name}_ptr": "*bf16" for name in ("q", "k", "v", "out")}
    pointers |= {"mask_ptr": "*u8", "bits_ptr": "*i64"}
    pointers |= {"blocks_ptr": "*i32", "counts_ptr": "*i32"}
    strides = {f"{x}_{part}": "i32:16" for x in "kv" for part in ("slot", "head")}
    strides |= {"k_batch": "i64:16", "v_batch": "i64:16", "mask_batch": "i64:16"}
    strides["mask_row"] = "i32:16"
    sizes = {"T": "i32:16", "S": "i32:16", "scale": "fp32"}
    cases = []

    def case(kernel: Any, warps: int, values: dict[str, Any]) -> OfflineCase:
        kinds = {**pointers, **strides, **sizes, **dict.fromkeys(values, "constexpr")}
        signature = {n: kinds[n] for n in kernel.arg_names if n != "PDL"}
        return OfflineCase(kernel, signature, values, warps)

    for group, dim in ((6, 128), (8, 64)):
        for masked in (0, 1):
            knobs = PrefillKnobs.heuristic({"G": group, "d": dim, "masked": masked})
            values = {"G": group, "HKV": 1, "DIM": dim, "ROWS": knobs.rows, "BLOCK": knobs.block}
            values |= {"STAGES": knobs.stages, "MASKED": bool(masked)}
            cases.append(case(prefill_attention_kernel, knobs.warps, values))
        tokens = knobs.rows // group
        values = {"TOKENS": tokens, "TOKEN_ROWS": triton.next_power_of_2(tokens)}
        for wide in (True, False):
            values |= {"WORD": WORD, "WORDS": WIDE_WORDS if wide else WORDS, "WIDE": wide}
            pointers["mask_ptr"] = "*i64" if wide else "*u8"
            cases.append(case(live_blocks_kernel, LIST_WARPS, dict(values)))
    return cases


CHANGE = Change(
    name="prefill_attention",
    region="prefill_attend",
    summary="attention of many tokens, heads that share keys together, hidden blocks skipped",
    contract=Contract(
        numerics="reduction",
        adds={"attention_probabilities_bf16": "tensor cores multiply BF16, as the reference's do"},
    ),
    implementations=(
        Implementation(
            backend="triton",
            devices=("cuda",),
            build=build,
            guard=guard,
            knobs=PrefillKnobs,
            shape=shape,
        ),
        Implementation(backend="torch", devices=("cuda",), build=build_views, guard=guard_views),
    ),
)
