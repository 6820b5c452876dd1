"""Attention over paged keys and values, in Triton: prefill, decode, and the sum of decode's splits.

- *FlashAttention-2* (Dao 2023, arXiv:2307.08691): scores of one tile at a time, with a running
  maximum and sum per row; the output is divided once, at the end.
- *Flash-Decoding* (Dao, Haziza, Massa, Sizov 2023): few queries leave a GPU idle, so their keys are
  split among programs, and a second kernel weighs the parts by their log-sum-exp.
- *PagedAttention* (Kwon et al. 2023, arXiv:2309.06180): keys and values are read from the pages
  that a block table names.

Numerics. Scores, maximum, sum and output are in `COMPUTE`, float32 except for float64 inputs.
Exponentials have base 2, which is what the hardware has; `LOG2E` is folded into the scale. Products
of float32 are "ieee": TF32 has ten bits of mantissa. Probabilities are rounded to the values'
dtype before their product, as in every flash attention. A row that has seen no key yet has the
maximum -inf; it is replaced by 0 where it is subtracted, as -inf - -inf is not a number.

Rows of a tile are (query, query head) pairs: the query heads of one key/value head lie in one tile,
so that its keys and values are read once for the group; `CHUNK` of them in each of several tiles
where a group is too large. Row r is query r // CHUNK and head r % CHUNK of the chunk. `query` and
`out` are contiguous. Offsets into the pools are 64 bits wide: a pool may exceed 2³¹ elements.

With `EARLY` a program begins while the kernel before it still runs, and waits for it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)

#: Numbers and small tensors that differ from step to step. Triton would compile a kernel anew for a
#: number that is 1 or a multiple of 16, and for an address that is one.
_NUMBERS = ["table_row", "short", "queries", "num_splits"]
_SMALL = ["sinks", "lse", "block_table", "first", "seq_lens", "cu_seqlens_q", "ends"]


@triton.jit
def _scores(q, k, scale, softcap, USE_SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr):
    """Scores times log2(e)."""
    s = tl.dot(q, k, input_precision="ieee", out_dtype=COMPUTE)
    if USE_SOFTCAP:
        # tanh without overflow: with e = exp(-2|x|), tanh|x| = (1 - e) / (1 + e).
        x = s * (scale / softcap)
        e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
        squashed = (1.0 - e) / (1.0 + e)
        s = tl.where(x < 0, -squashed, squashed) * (softcap * LOG2E)
    else:
        s = s * (scale * LOG2E)
    return s


@triton.jit
def _start(
    sinks, heads, split, USE_SINKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and output of rows that have seen nothing, or only their head's sink.

    A sink is one more score, whose value is zero: it is in the maximum and in the sum. It counts
    once, in split 0, which is never empty.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_V], COMPUTE)
    total = tl.zeros([BLOCK_M], COMPUTE)
    highest = total - float("inf")
    if USE_SINKS:
        sink = tl.load(sinks + heads).to(COMPUTE) * LOG2E
        highest = tl.where(split == 0, sink, highest)
        total = tl.where(split == 0, total + 1.0, total)
    return highest, total, acc


@triton.jit
def _pages(table, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of each key of a block that begins with a page or lies in one; `table` points at it.

    A page is loaded once, and not for each of its keys: with pages of 64, and another tile, 1.2
    times as fast on an NVIDIA H200.
    """
    page = tl.load(table).to(tl.int64) + tl.zeros([BLOCK_N], tl.int64)
    for other in tl.static_range(1, BLOCK_N // PAGE_SIZE):
        behind = tl.arange(0, BLOCK_N) >= other * PAGE_SIZE
        page = tl.where(behind, tl.load(table + other).to(tl.int64), page)
    return page


@triton.jit
def _attend(
    q, positions, behind, since, low, high, gap, skipped, first, table, keys, values, highest,
    total, acc, scale, softcap,
    KEY_PAGE: tl.constexpr, KEY_SLOT: tl.constexpr, VALUE_PAGE: tl.constexpr,
    VALUE_SLOT: tl.constexpr, USE_SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, DOT: tl.constexpr,
    ALL: tl.constexpr,
):  # fmt: skip
    """Fold the keys at positions low … high - 1 of one sequence into maximum, sum and output.

    Those before `since` are not read, nor are `skipped` ones from `gap` on, which are whole blocks
    as those before `gap` are. Rows are at `positions`, `behind` is the one behind the last key that
    each of them sees. `keys` and `values` point at the key/value head, `table` at the sequence's
    row of the block table, whose first page holds position `first`. `WINDOW` 0 is none. With `ALL`
    they are whole blocks, counted from `first`, and every row sees all of them.
    """
    d = tl.arange(0, BLOCK_D)
    v = tl.arange(0, BLOCK_V)
    ONE_PAGE: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    FEW_PAGES: tl.constexpr = BLOCK_N % PAGE_SIZE == 0 and BLOCK_N // PAGE_SIZE <= 4
    for counted in range(low, high - skipped, BLOCK_N):
        start = counted
        if not ALL:
            start += tl.where(counted >= gap, skipped, 0)
        at = start + tl.arange(0, BLOCK_N)
        inside = (at < high) | ALL
        if not ALL and WINDOW > 0:
            inside = inside & (at >= since)
        slot = at - first
        if ALL and (ONE_PAGE or FEW_PAGES):
            page = _pages(table + (start - first) // PAGE_SIZE, PAGE_SIZE, BLOCK_N)
        else:
            page = tl.load(table + slot // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        k_row = page * KEY_PAGE + (slot % PAGE_SIZE) * KEY_SLOT
        v_row = page * VALUE_PAGE + (slot % PAGE_SIZE) * VALUE_SLOT
        k = tl.load(
            keys + k_row[None, :] + d[:, None],
            mask=inside[None, :] & (d[:, None] < HEAD_DIM),
            other=0.0,
        )
        s = _scores(q, k.to(DOT), scale, softcap, USE_SOFTCAP, highest.dtype)
        if not ALL:
            seen = inside[None, :] & (at[None, :] < behind[:, None])
            if WINDOW > 0:
                seen = seen & (at[None, :] > positions[:, None] - WINDOW)
            s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(highest, tl.max(s, 1))
        subtrahend = new
        if not ALL:
            subtrahend = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - subtrahend[:, None])
        fade = tl.exp2(highest - subtrahend)
        total = total * fade + tl.sum(p, 1)
        # Slots behind the last token hold what was there before, so they must not be read: a
        # probability of zero times an infinity is not zero.
        x = tl.load(
            values + v_row[:, None] + v[None, :],
            mask=inside[:, None] & (v[None, :] < VALUE_DIM),
            other=0.0,
        )
        # The rounding to the values' dtype happens even where DOT is wider (the interpreter).
        p = p.to(x.dtype).to(DOT)
        acc = tl.dot(p, x.to(DOT), acc * fade[:, None], input_precision="ieee", out_dtype=acc.dtype)
        highest = new
    return highest, total, acc


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_SMALL)
def paged_prefill(
    query, keys, values, sinks, out, block_table, first, seq_lens, cu_seqlens_q,
    scale, softcap, table_row, short, ends,
    KEY_PAGE: tl.constexpr, KEY_SLOT: tl.constexpr, KEY_HEAD: tl.constexpr,
    VALUE_PAGE: tl.constexpr, VALUE_SLOT: tl.constexpr, VALUE_HEAD: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, USE_SOFTCAP: tl.constexpr, USE_SINKS: tl.constexpr,
    WINDOW: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, COMPUTE: tl.constexpr, DOT: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_ENDS: tl.constexpr,
):  # fmt: skip
    """One tile of the queries of one sequence and one chunk of heads, over its pages.

    Grid (tiles of the longest, kv heads × chunks, sequences). Sequences of `short` queries or fewer
    are left to `paged_decode`. With `USE_ENDS` queries see keys before `ends`, `[tokens]`, and
    otherwise those up to their own.
    """
    QUERIES: tl.constexpr = BLOCK_M // CHUNK
    CHUNKS: tl.constexpr = (GROUP + CHUNK - 1) // CHUNK
    # The last tiles see most keys: they go first, so that the short ones fill what is left.
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    kv_head = tl.program_id(1) // CHUNKS
    sequence = tl.program_id(2)
    start = tl.load(cu_seqlens_q + sequence)
    length = tl.load(cu_seqlens_q + sequence + 1) - start
    if (length <= short) | (begin >= length):
        return
    rows = tl.arange(0, BLOCK_M)
    offset = begin + rows // CHUNK
    member = tl.program_id(1) % CHUNKS * CHUNK + rows % CHUNK
    heads = kv_head * GROUP + tl.minimum(member, GROUP - 1)
    valid = (rows < QUERIES * CHUNK) & (offset < length) & (member < GROUP)
    d = tl.arange(0, BLOCK_D)
    q = tl.load(
        query + (start + offset).to(tl.int64)[:, None] * (KV_HEADS * GROUP * HEAD_DIM)
        + heads[:, None] * HEAD_DIM + d[None, :],
        mask=valid[:, None] & (d[None, :] < HEAD_DIM),
        other=0.0,
    )  # fmt: skip
    end = tl.load(seq_lens + sequence)
    oldest = tl.load(first + sequence)
    earlier = end - length  # tokens that were there before this step
    behind = earlier + offset + 1
    high = tl.minimum(end, earlier + begin + QUERIES)
    # Whole blocks that every row sees need no masks: 1.3 times as fast. No query sees less than the
    # keys up to the tile's first one, nor, with a window, less than the last one does.
    whole = oldest + (earlier + begin + 1 - oldest) // BLOCK_N * BLOCK_N
    since = oldest
    low = oldest
    inner = oldest
    if WINDOW > 0:
        since = tl.maximum(oldest, earlier + begin - WINDOW + 1)
        low = oldest + (since - oldest) // BLOCK_N * BLOCK_N
        inner = oldest + tl.cdiv(tl.maximum(high - WINDOW - oldest, 0), BLOCK_N) * BLOCK_N
        inner = tl.minimum(inner, whole)
    if USE_ENDS:
        behind = tl.load(ends + start + offset, mask=valid, other=0)
        high = tl.max(behind)
    highest, total, acc = _start(sinks, heads, 0, USE_SINKS, BLOCK_M, BLOCK_V, COMPUTE)
    for ALL in tl.static_range(2):
        highest, total, acc = _attend(
            q.to(DOT), earlier + offset, behind, since, inner if ALL else low,
            whole if ALL else high, inner, 0 if ALL else whole - inner, oldest,
            block_table + sequence.to(tl.int64) * table_row,
            keys + kv_head * KEY_HEAD, values + kv_head * VALUE_HEAD, highest, total, acc,
            scale, softcap, KEY_PAGE, KEY_SLOT, VALUE_PAGE, VALUE_SLOT, USE_SOFTCAP, WINDOW,
            PAGE_SIZE, HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_V, DOT, ALL == 1,
        )  # fmt: skip
    v = tl.arange(0, BLOCK_V)
    tl.store(
        out + (start + offset).to(tl.int64)[:, None] * (KV_HEADS * GROUP * VALUE_DIM)
        + heads[:, None] * VALUE_DIM + v[None, :],
        (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(out.dtype.element_ty),
        mask=valid[:, None] & (v[None, :] < VALUE_DIM),
    )  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_SMALL)
def paged_decode(
    query, keys, values, sinks, out, parts, lse, block_table, first, seq_lens, cu_seqlens_q,
    scale, softcap, table_row,
    KEY_PAGE: tl.constexpr, KEY_SLOT: tl.constexpr, KEY_HEAD: tl.constexpr,
    VALUE_PAGE: tl.constexpr, VALUE_SLOT: tl.constexpr, VALUE_HEAD: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, USE_SOFTCAP: tl.constexpr, USE_SINKS: tl.constexpr,
    WINDOW: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, COMPUTE: tl.constexpr, DOT: tl.constexpr,
    QUERIES: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Up to `QUERIES` queries of one sequence and one chunk of heads, over one split of its keys.

    Grid (kv heads × chunks, sequences, splits). Longer sequences are left to `paged_prefill`. With
    one split the result goes to `out`; with more the part of split i goes to `parts`
    `[splits, sequences, QUERIES, heads, VALUE_DIM]`, and the base-2 log-sum-exp of its scores to
    `lse` `[splits, sequences, QUERIES, heads]`, -inf where it saw no key (its part is not written).
    """
    if EARLY:  # also where there is nothing to do: who waits for this waits for all before it
        gdc_launch_dependents()
        gdc_wait()
    CHUNKS: tl.constexpr = (GROUP + CHUNK - 1) // CHUNK
    kv_head = tl.program_id(0) // CHUNKS
    sequence = tl.program_id(1)
    split = tl.program_id(2)
    start = tl.load(cu_seqlens_q + sequence)
    length = tl.load(cu_seqlens_q + sequence + 1) - start
    if length > QUERIES:
        return
    rows = tl.arange(0, BLOCK_M)
    offset = rows // CHUNK
    member = tl.program_id(0) % CHUNKS * CHUNK + rows % CHUNK
    heads = kv_head * GROUP + tl.minimum(member, GROUP - 1)
    valid = (offset < length) & (member < GROUP)
    d = tl.arange(0, BLOCK_D)
    q = tl.load(
        query + (start + offset).to(tl.int64)[:, None] * (KV_HEADS * GROUP * HEAD_DIM)
        + heads[:, None] * HEAD_DIM + d[None, :],
        mask=valid[:, None] & (d[None, :] < HEAD_DIM),
        other=0.0,
    )  # fmt: skip
    end = tl.load(seq_lens + sequence)
    oldest = tl.load(first + sequence)
    low = oldest
    if WINDOW > 0:
        low = tl.maximum(low, end - length - WINDOW + 1)
    splits = tl.num_programs(2)
    tiles = tl.cdiv(tl.cdiv(end - low, BLOCK_N), splits)
    low = low + split * tiles * BLOCK_N
    high = tl.minimum(end, low + tiles * BLOCK_N)
    highest, total, acc = _start(sinks, heads, split, USE_SINKS, BLOCK_M, BLOCK_V, COMPUTE)
    highest, total, acc = _attend(
        q.to(DOT), end - length + offset, end - length + offset + 1, low, low, high, high, 0,
        oldest, block_table + sequence.to(tl.int64) * table_row,
        keys + kv_head * KEY_HEAD, values + kv_head * VALUE_HEAD, highest, total, acc,
        scale, softcap, KEY_PAGE, KEY_SLOT, VALUE_PAGE, VALUE_SLOT, USE_SOFTCAP, WINDOW, PAGE_SIZE,
        HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_V, DOT, False,
    )  # fmt: skip
    v = tl.arange(0, BLOCK_V)
    inside = valid[:, None] & (v[None, :] < VALUE_DIM)
    # A row that saw no key of this split has the maximum -inf and so that log-sum-exp.
    divisor = tl.where(total == 0.0, 1.0, total)
    found = acc / divisor[:, None]
    if splits > 1:
        part = (split * tl.num_programs(1) + sequence).to(tl.int64) * QUERIES + offset
        part = part * (KV_HEADS * GROUP) + heads
        tl.store(lse + part, highest + tl.log2(divisor), valid)
        tl.store(
            parts + part[:, None] * VALUE_DIM + v[None, :],
            found,
            mask=inside & (total > 0.0)[:, None],
        )
    else:
        tl.store(
            out + (start + offset).to(tl.int64)[:, None] * (KV_HEADS * GROUP * VALUE_DIM)
            + heads[:, None] * VALUE_DIM + v[None, :],
            found.to(out.dtype.element_ty),
            mask=inside,
        )  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_SMALL)
def sum_splits(
    parts, lse, out, cu_seqlens_q, queries, num_splits,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, MAX_SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The parts of one query and one head, weighed by the share of the sum that each has.

    Grid (heads, sequences × queries, blocks of the output). `parts` and `lse` as `paged_decode` has
    written them, with `queries` for its `QUERIES`.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    row = tl.program_id(1)
    sequence = row // queries
    offset = row % queries
    start = tl.load(cu_seqlens_q + sequence)
    length = tl.load(cu_seqlens_q + sequence + 1) - start
    if (length > queries) | (offset >= length):
        return
    split = tl.arange(0, MAX_SPLITS).to(tl.int64)
    part = (split * tl.num_programs(1) + row) * tl.num_programs(0) + head
    mine = tl.load(lse + part, mask=split < num_splits, other=float("-inf"))
    share = tl.exp2(mine - tl.max(mine, 0))
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    x = tl.load(
        parts + part[:, None] * VALUE_DIM + v[None, :],
        mask=(mine > float("-inf"))[:, None] & (v[None, :] < VALUE_DIM),
        other=0.0,
    )
    found = tl.sum(x * share[:, None], 0) / tl.sum(share, 0)
    tl.store(
        out + ((start + offset).to(tl.int64) * tl.num_programs(0) + head) * VALUE_DIM + v,
        found.to(out.dtype.element_ty),
        mask=v < VALUE_DIM,
    )
