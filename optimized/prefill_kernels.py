"""Device code of `prefill_attention`: a running softmax over blocks of keys, and their list."""

import triton
import triton.language as tl

from optimized.triton_support import begin, dot_fp32


@triton.jit
def eight_bits(x):
    """Of each int64 the bits 0 to 7 that say which of its bytes, the lowest first, are not 0."""
    low = 0x7F7F7F7F7F7F7F7F
    marks = (((x & low) + low) | x) & -0x7F7F7F7F7F7F7F80  # the highest bit of every such byte
    # That of byte i times 2^(49 - 7 i) is bit 56 + i; no two of the products share a bit.
    return (marks * 0x0002040810204081 >> 56) & 0xFF


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
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """From a mask [B, T, S], of blocks of WORD keys: bits [B, T, blocks] int64, what each token
    sees; blocks [B, tiles, blocks], those of which some token of a tile sees a key, in order; and
    counts [B, tiles], how many. Programs take WORDS blocks at a time. With `WIDE` the mask is read
    as int64, eight keys each, which S and the strides count."""
    begin(PDL)
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    step = tl.arange(0, TOKEN_ROWS)
    token = tile * TOKENS + step
    inside = (step < TOKENS) & (token < T)
    rows = mask_ptr + batch * mask_batch + token[:, None] * mask_row
    UNITS: tl.constexpr = WORD // 8 if WIDE else WORD
    total = (S + UNITS - 1) // UNITS
    bits_rows = bits_ptr + (batch * T + token)[:, None] * total
    entry = batch * tl.num_programs(0) + tile
    count = tl.zeros([], tl.int32)
    for first in tl.range(0, total, WORDS):  # pyright: ignore[reportGeneralTypeIssues]
        key = first * UNITS + tl.arange(0, WORDS * UNITS)
        seen = tl.load(rows + key[None, :], mask=inside[:, None] & (key < S)[None, :], other=0)
        seen = eight_bits(seen) if WIDE else (seen != 0).to(tl.int64)
        shift = tl.arange(0, UNITS).to(tl.int64) * (WORD // UNITS)
        words = tl.sum(seen.reshape(TOKEN_ROWS, WORDS, UNITS) << shift[None, None, :], axis=2)
        block = first + tl.arange(0, WORDS)
        exists = block < total
        tl.store(bits_rows + block[None, :], words, mask=inside[:, None] & exists[None, :])
        live = tl.max((words != 0).to(tl.int32), axis=0)
        place = count + tl.cumsum(live, axis=0) - live
        tl.store(blocks_ptr + entry * total + place, block, mask=(live != 0) & exists)
        count += tl.sum(live, axis=0)
    tl.store(counts_ptr + entry, count)


@triton.jit
def _slots(first, end, BLOCK: tl.constexpr, CLAMPED: tl.constexpr):
    """Of keys `first` and on; where `CLAMPED`, those from `end` on are read at the last."""
    slot = first + tl.arange(0, BLOCK)
    if CLAMPED:
        slot = tl.minimum(slot, end - 1)
    return slot


@triton.jit
def _scores(q, k_tile, first, end, k_slot, BLOCK: tl.constexpr, CLAMPED: tl.constexpr):
    k = tl.load(k_tile + _slots(first, end, BLOCK, CLAMPED)[None, :] * k_slot)
    return dot_fp32(q, k, tl.zeros([q.shape[0], BLOCK], tl.float32))


@triton.jit
def _take_block(
    q,
    k_tile,
    v_tile,
    bits_row,
    first,
    following,
    end,
    last,
    k_slot,
    v_slot,
    scale,
    scores,
    highest,
    denominator,
    numerator,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add keys `first` and on, whose scores are known, to a running softmax; base-2 exponentials of
    scores times log2(e). Of the keys, those below `end` exist; causal rows see those up to `last`.

    The scores of keys `following` and on come before this step's product with v. So nothing waits
    for that product until the next step has its exponentials, and tensor cores work meanwhile.
    """
    CLAMPED: tl.constexpr = CAUSAL or MASKED
    if CAUSAL:
        position = first + tl.arange(0, BLOCK)
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
    upcoming = _scores(q, k_tile, following, end, k_slot, BLOCK, CLAMPED)
    v = tl.load(v_tile + _slots(first, end, BLOCK, CLAMPED)[:, None] * v_slot)
    # Rounded only now: until here the last step's product may still read its own rounded weights.
    numerator = dot_fp32(weights.to(tl.bfloat16), v, numerator * kept[:, None])
    return upcoming, higher, denominator, numerator


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
    HKV: tl.constexpr,
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
    columns = tl.arange(0, DIM)
    # A token's G queries of a KV head are side by side, and so are all rows where it is alone.
    start = ((batch * T + tile * TOKENS) * HKV + kv_head) * (G * DIM)
    rows = (row + row // G * ((HKV - 1) * G))[:, None] * DIM + columns[None, :]
    inside = (row < tl.minimum(TOKENS, T - tile * TOKENS) * G)[:, None]
    q = tl.load(q_ptr + start + rows, mask=inside, other=0.0)
    token = tl.minimum(tile * TOKENS + row // G, T - 1)
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
        first = tl.load(blocks, mask=count > 0, other=0) * BLOCK
        scores = _scores(q, k_tile, first, S, k_slot, BLOCK, True)
        for i in tl.range(0, count, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
            first = tl.load(blocks + i) * BLOCK
            following = tl.load(blocks + tl.minimum(i + 1, count - 1)) * BLOCK
            scores, highest, denominator, numerator = _take_block(
                q, k_tile, v_tile, bits_row, first, following, S, last, k_slot, v_slot, scale,
                scores, highest, denominator, numerator, BLOCK, False, True,
            )  # fmt: skip
    else:
        # All rows see the keys up to `open_end` and one block more, none sees those from `end` on.
        # That block goes with the rest, whose keys are checked: those after it may not exist.
        end = tl.minimum(S - T + (tile + 1) * TOKENS, S)
        open_end = tl.maximum((S - T + tile * TOKENS + 1) // BLOCK - 1, 0) * BLOCK
        scores = _scores(q, k_tile, 0, end, k_slot, BLOCK, True)
        for first in tl.range(0, open_end, BLOCK, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
            scores, highest, denominator, numerator = _take_block(
                q, k_tile, v_tile, bits_row, first, first + BLOCK, S, last, k_slot, v_slot, scale,
                scores, highest, denominator, numerator, BLOCK, False, False,
            )  # fmt: skip
        for first in tl.range(open_end, end, BLOCK, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
            scores, highest, denominator, numerator = _take_block(
                q, k_tile, v_tile, bits_row, first, first + BLOCK, end, last, k_slot, v_slot, scale,
                scores, highest, denominator, numerator, BLOCK, True, False,
            )  # fmt: skip
    denominator = tl.where(denominator == 0.0, 1.0, denominator)
    out = (numerator / denominator[:, None]).to(tl.bfloat16)
    tl.store(out_ptr + start + rows, out, mask=inside)
