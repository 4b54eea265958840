"""Device code of `prefill_attention`: a running softmax over blocks of keys, and their list."""

import triton
import triton.language as tl

from optimized.triton_support import begin, dot_fp32


@triton.jit
def live_blocks_kernel(
    mask_ptr,
    bits_ptr,
    blocks_ptr,
    counts_ptr,
    mask_batch,
    mask_row,
    T,
    S,
    TOKENS: tl.constexpr,
    TOKEN_ROWS: tl.constexpr,
    WORD: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """From a mask [B, T, S], of blocks of WORD keys: bits [B, T, blocks] int64, what each token
    sees; blocks [B, tiles, blocks], those of which some token of a tile sees a key, in order; and
    counts [B, tiles], how many. Programs take WORDS blocks at a time."""
    begin(PDL)
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    step = tl.arange(0, TOKEN_ROWS)
    token = tile * TOKENS + step
    inside = (step < TOKENS) & (token < T)
    rows = mask_ptr + batch * mask_batch + token[:, None] * mask_row
    total = (S + WORD - 1) // WORD
    bits_rows = bits_ptr + (batch * T + token)[:, None] * total
    entry = batch * tl.num_programs(0) + tile
    count = tl.zeros([], tl.int32)
    for first in tl.range(0, total, WORDS):  # pyright: ignore[reportGeneralTypeIssues]
        key = first * WORD + tl.arange(0, WORDS * WORD)
        seen = tl.load(rows + key[None, :], mask=inside[:, None] & (key < S)[None, :], other=0)
        seen = (seen != 0).to(tl.int64).reshape(TOKEN_ROWS, WORDS, WORD)
        words = tl.sum(seen << tl.arange(0, WORD)[None, None, :].to(tl.int64), axis=2)
        block = first + tl.arange(0, WORDS)
        exists = block < total
        tl.store(bits_rows + block[None, :], words, mask=inside[:, None] & exists[None, :])
        live = tl.max((words != 0).to(tl.int32), axis=0)
        place = count + tl.cumsum(live, axis=0) - live
        tl.store(blocks_ptr + entry * total + place, block, mask=(live != 0) & exists)
        count += tl.sum(live, axis=0)
    tl.store(counts_ptr + entry, count)


@triton.jit
def _take_block(
    q,
    k_tile,
    v_tile,
    bits_row,
    first,
    end,
    last,
    k_slot,
    v_slot,
    scale,
    highest,
    denominator,
    numerator,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add keys `first` and on to a running softmax; base-2 exponentials of scores times log2(e).
    Of the keys, those below `end` exist; causal rows see those up to `last`."""
    position = first + tl.arange(0, BLOCK)
    slot = position
    if CAUSAL | MASKED:  # keys beyond the end are read at the last one, and hidden
        slot = tl.minimum(position, end - 1)
    k = tl.load(k_tile + slot[None, :] * k_slot)
    scores = dot_fp32(q, k, tl.zeros([q.shape[0], BLOCK], tl.float32))
    if CAUSAL:
        scores = tl.where(position[None, :] <= last[:, None], scores, float("-inf"))
    if MASKED:
        words = tl.load(bits_row + first // BLOCK)
        seen = (words[:, None] >> tl.arange(0, BLOCK)[None, :].to(tl.int64)) & 1
        scores = tl.where(seen != 0, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, axis=1) * scale)
    base = higher
    if MASKED:
        base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores * scale - base[:, None])
    kept = tl.exp2(highest - base)
    denominator = denominator * kept + tl.sum(weights, axis=1)
    v = tl.load(v_tile + slot[:, None] * v_slot)
    numerator = dot_fp32(weights.to(tl.bfloat16), v, numerator * kept[:, None])
    return higher, denominator, numerator


@triton.jit
def prefill_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bits_ptr,
    blocks_ptr,
    counts_ptr,
    out_ptr,
    k_batch,
    k_slot,
    k_head,
    v_batch,
    v_slot,
    v_head,
    T,
    S,
    scale,
    G: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    TOKENS: tl.constexpr = ROWS // G
    # The last tokens see the most keys; they go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.arange(0, ROWS)
    token = tile * TOKENS + row // G
    inside = (row < TOKENS * G) & (token < T)
    token = tl.minimum(token, T - 1)
    columns = tl.arange(0, DIM)
    heads = tl.num_programs(1) * G
    rows = ((batch * T + token) * heads + kv_head * G + row % G)[:, None] * DIM + columns[None, :]
    q = tl.load(q_ptr + rows)
    k_tile = k_ptr + batch * k_batch + kv_head * k_head + columns[:, None]
    v_tile = v_ptr + batch * v_batch + kv_head * v_head + columns[None, :]
    bits_row = bits_ptr + (batch * T + token) * ((S + BLOCK - 1) // BLOCK)
    last = S - T + token

    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    denominator = tl.zeros((ROWS,), tl.float32)
    numerator = tl.zeros((ROWS, DIM), tl.float32)
    if MASKED:
        entry = batch * tl.num_programs(0) + tile
        blocks = blocks_ptr + entry * ((S + BLOCK - 1) // BLOCK)
        count = tl.load(counts_ptr + entry)
        for i in tl.range(0, count, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
            first = tl.load(blocks + i) * BLOCK
            highest, denominator, numerator = _take_block(
                q, k_tile, v_tile, bits_row, first, S, last, k_slot, v_slot, scale,
                highest, denominator, numerator, BLOCK, False, True,
            )  # fmt: skip
    else:
        # All rows see the keys up to `open_end`, none sees those from `end` on.
        open_end = (S - T + tile * TOKENS + 1) // BLOCK * BLOCK
        end = tl.minimum(S - T + (tile + 1) * TOKENS, S)
        for first in tl.range(0, open_end, BLOCK, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
            highest, denominator, numerator = _take_block(
                q, k_tile, v_tile, bits_row, first, S, last, k_slot, v_slot, scale,
                highest, denominator, numerator, BLOCK, False, False,
            )  # fmt: skip
        for first in tl.range(open_end, end, BLOCK, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
            highest, denominator, numerator = _take_block(
                q, k_tile, v_tile, bits_row, first, S, last, k_slot, v_slot, scale,
                highest, denominator, numerator, BLOCK, True, False,
            )  # fmt: skip
    denominator = tl.where(denominator == 0.0, 1.0, denominator)
    out = (numerator / denominator[:, None]).to(tl.bfloat16)
    tl.store(out_ptr + rows, out, mask=inside[:, None])
