"""Packed steps: sequences of any lengths in shuffled pages, with garbage wherever nothing is."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from jackfield.contracts import Blocks, PackedLayer, PackedStep, PageTables, Span
from jackfield.testing.attention.rows import Needs
from jackfield.testing.attention.truth import Piece

NOTHING = float("nan")  # in slots that hold no token
SHOWN = 8  # sequences of a step


@dataclass(frozen=True)
class Packed:
    """A packed step.

    Attributes:
        sizes: `(queries, tokens with these)` of each sequence.
        page_size: Tokens of a page.
        in_a_row: Pages of a sequence are consecutive.
        kept: Pages before a window are still there.
        strided: Queries lie as `[heads, tokens, head_dim]`, as models hand them over mostly.
        longer: By how much `max_seqlen_k` is more than the longest.
    """

    sizes: tuple[tuple[int, int], ...]
    page_size: int = 4
    in_a_row: bool = False
    kept: bool = False
    strided: bool = True
    longer: int = 0

    def __str__(self) -> str:
        each = ", ".join(f"{queries} of {tokens}" for queries, tokens in self.sizes[:SHOWN])
        if len(self.sizes) > SHOWN:
            each += f", … ({len(self.sizes)} in all)"
        text = f"sequences with {each} tokens, pages of {self.page_size}"
        return f"{text} in a row" if self.in_a_row else text


def _decode(*tokens: int) -> tuple[tuple[int, int], ...]:
    return tuple((1, number) for number in tokens)


def _prefill(*tokens: int) -> tuple[tuple[int, int], ...]:
    return tuple((number, number) for number in tokens)


#: situation -> its cases, from the smallest up. Each has two sequences of equal length somewhere.
SITUATIONS: Mapping[str, tuple[Packed, ...]] = {
    "prefill": (
        Packed(_prefill(1)), Packed(_prefill(3)), Packed(_prefill(9), strided=False),
        Packed(_prefill(2, 2)), Packed(_prefill(5, 2, 5)),
        Packed(_prefill(7, 1, 12), in_a_row=True), Packed(_prefill(33, 5, 17, 33), 16),
        Packed(_prefill(21), 1, strided=False),
    ),
    "chunks": (
        Packed(((2, 3),)), Packed(((3, 11),)), Packed(((4, 6), (7, 13), (4, 6)), strided=False),
        Packed(((5, 40), (17, 18), (6, 23), (3, 40)), 16),
        Packed(((40, 90), (3, 9)), 3, kept=True),
    ),
    "decode": (
        Packed(_decode(1)), Packed(_decode(5)), Packed(_decode(4, 8), strided=False),
        Packed(_decode(6, 6)), Packed(_decode(2, 9, 5, 9), longer=7),
        Packed(_decode(70, 3, 1, 33), 16), Packed(_decode(17, 6), 5, in_a_row=True),
        Packed(_decode(19, 30), 4, kept=True), Packed(_decode(130, 64, 130), 32),
        Packed(_decode(300, 1, 41), 16),
    ),
    "drafts": (
        Packed(((3, 7),)), Packed(((2, 9), (4, 4), (2, 9)), longer=3),
        Packed(((5, 18), (1, 7), (3, 33), (2, 18)), 8), Packed(((17, 40), (2, 3)), 16),
    ),
    "mixed": (
        Packed(((3, 3), (1, 5))), Packed(((1, 6), (5, 5), (1, 2), (2, 6), (4, 9), (5, 5))),
        Packed(((1, 40), (21, 37), (1, 17), (19, 19)), 16, longer=1, strided=False),
    ),
    "long": (
        Packed(((140, 140), (1, 300), (140, 140)), 16), Packed(((600, 640), (1, 5)), 16),
        Packed(((1025, 1030),), 32),
    ),
    "long_decode": (
        Packed(_decode(513, 513), 16), Packed(_decode(1025, 3), 16), Packed(_decode(2049), 16),
        Packed(_decode(4097, 2500), 32), Packed(_decode(8200, 1), 16),
    ),
    "many": (
        Packed(_decode(*[3, 2] * 5)), Packed(_decode(*[2] * 33)), Packed(_decode(*[3, 1] * 65)),
        Packed(_decode(*[2] * 513)), Packed(((2, 3), *_decode(*[4] * 257), (3, 3))),
    ),
}  # fmt: skip

#: Those that are tried without features, and with a window.
LARGE = ("long", "long_decode", "many")

#: Those with prompts whose tokens may see one another.
WITH_BLOCKS = ("prefill", "chunks", "drafts", "mixed", "long")

TITLES = {
    "prefill": "prefill", "chunks": "chunks of a prompt", "decode": "decode", "drafts": "drafts",
    "mixed": "prefill, chunks and decode in one step", "long": "many queries",
    "long_decode": "decode, thousands of keys", "many": "hundreds of sequences",
}  # fmt: skip


def simpler(packed: Packed) -> Iterator[tuple[str, Packed]]:
    """The same step in simpler pages, each after what it shows where that is right."""
    if not packed.kept:
        told = (
            "it is right where the pages before a window are still there: that a table does not "
            "begin with the first token (`first`) is not heeded"
        )
        yield told, replace(packed, kept=True)
    if not packed.in_a_row:
        told = (
            "it is right where the pages of a sequence follow one another: the order of the pages "
            "in its table is not heeded"
        )
        yield told, replace(packed, in_a_row=True)
    told = (
        "it is right where a sequence has one page: its pages are read in another order than that "
        "of its table, or others are"
    )
    longest = max(tokens for _, tokens in packed.sizes)
    yield told, replace(packed, page_size=longest + 1)


def pieces_of(
    packed: Packed,
    needs: Needs,
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
    device: str,
) -> list[Piece]:
    """Random numbers for each sequence, all tokens of it, on `device`.

    `heads` are those of queries and keys.
    """
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int, wide: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * wide).to(device, dtype)

    sinks = made(heads[0]) if needs.sinks else None
    found = []
    for row, (queries, tokens) in enumerate(packed.sizes):
        key = torch.arange(tokens, device=device)
        query, valid = key[tokens - queries :, None], torch.ones_like(key, dtype=torch.bool)
        inside = valid.expand(queries, tokens)
        if needs.window is not None:
            inside = key > query - needs.window
        blocks = _blocks(row, queries, tokens, needs.block)
        found.append(
            Piece(
                made(heads[0], queries, head_dims[0], wide=needs.spread),
                made(heads[1], tokens, head_dims[0]), made(heads[1], tokens, head_dims[1]),
                key < ends_of(blocks, tokens - queries, tokens, device)[:, None], inside, valid,
                tokens - queries, needs.scaling, needs.softcap, sinks, None, needs.window, blocks,
            )
        )  # fmt: skip
    return found


def _blocks(row: int, queries: int, tokens: int, size: int | None) -> tuple[tuple[int, int], ...]:
    """Blocks of `size` tokens with one between them, in every other sequence that reads a prompt.

    Of a chunk the first one began in the chunk before it; the last one ends with its queries.
    """
    if size is None or queries == 1 or row % 2:
        return ()
    begins = range(max(1, tokens - queries - 1), tokens, size + 1)
    return tuple((begin, min(begin + size, tokens)) for begin in begins if begin + 1 < tokens)


def ends_of(
    blocks: Seq[tuple[int, int]], begin: int, end: int, device: torch.device | str
) -> torch.Tensor:
    """int32 `[queries]`: behind which key the queries from `begin` to before `end` see nothing."""
    ends = list(range(begin + 1, end + 1))
    for first, behind in blocks:
        for at in range(max(first, begin), behind):
            ends[at - begin] = behind
    return torch.tensor(ends, dtype=torch.int32, device=device)


def blocks_of(pieces: Seq[Piece]) -> Blocks | None:
    """What the tables of a step with these pieces say of blocks."""
    if not any(piece.blocks for piece in pieces):
        return None
    ends = [
        ends_of(piece.blocks, piece.at, piece.at + piece.query.shape[1], piece.query.device)
        for piece in pieces
    ]
    return Blocks(torch.cat(ends), [piece.blocks for piece in pieces])


def step_of(packed: Packed, device: torch.device | str) -> PackedStep:
    starts = [0]
    for queries, _ in packed.sizes:
        starts.append(starts[-1] + queries)
    spans = [Span(at, *size) for at, size in zip(starts, packed.sizes, strict=False)]
    return PackedStep(
        spans,
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor([span.kv_len for span in spans], dtype=torch.int32, device=device),
        max(span.query_len for span in spans),
        max(span.kv_len for span in spans) + packed.longer,
    )


def tables_of(packed: Packed, step: PackedStep, window: int | None, seed: int) -> PageTables:
    """Which pages each sequence holds. Page 0 is mostly nobody's, and tables are padded with it."""
    size, chance = packed.page_size, random.Random(seed)
    device = step.seq_lens.device
    firsts = [
        0
        if window is None or packed.kept
        else max(0, s.kv_len - s.query_len + 1 - window) // size * size
        for s in step.spans
    ]
    counts = [-(-(s.kv_len - first) // size) for s, first in zip(step.spans, firsts, strict=True)]
    total = pages_of(packed)
    if packed.in_a_row:
        starts = [total - sum(counts[: row + 1]) for row in range(len(counts))]
        tables = [list(range(s, s + count)) for s, count in zip(starts, counts, strict=True)]
    else:
        order = chance.sample(range(1, total), total - 1)
        tables = [[order.pop() for _ in range(count)] for count in counts]
    padded = [table + [0] * (max(counts) - len(table)) for table in tables]
    return PageTables(
        step, window, size,
        torch.tensor(padded, dtype=torch.int32, device=device),
        torch.tensor(firsts, dtype=torch.int32, device=device),
        tables, firsts,
    )  # fmt: skip


def pages_of(packed: Packed) -> int:
    """How many pages a pool has for the step; a few are nobody's."""
    return sum(-(-tokens // packed.page_size) for _, tokens in packed.sizes) + 4


def pools_of(
    pieces: Seq[Piece], tables: PageTables, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values in their pages, `[pages, page_size, kv_heads, size]`; NaN elsewhere."""
    size, pools = tables.page_size, []
    for part in ("keys", "values"):
        states = [getattr(piece, part).transpose(0, 1) for piece in pieces]
        pool = states[0].new_full((total * size, *states[0].shape[1:]), NOTHING)
        for own, pages, first in zip(states, tables.tables, tables.firsts, strict=True):
            at = torch.arange(first, len(own))
            slots = torch.tensor(pages)[(at - first) // size] * size + (at - first) % size
            pool[slots] = own[at]
        pools.append(pool.view(total, size, *states[0].shape[1:]))
    return pools[0], pools[1]


def queries_of(pieces: Seq[Piece], packed: Packed) -> torch.Tensor:
    """`[tokens, heads, head_dim]` of the whole step."""
    whole = torch.cat([piece.query for piece in pieces], 1)
    return whole.transpose(0, 1) if packed.strided else whole.transpose(0, 1).contiguous()


def layer_of(pieces: Seq[Piece], packed: Packed, window: int | None, seed: int) -> PackedLayer:
    """What a cache would hand out for `pieces`."""
    step = step_of(packed, pieces[0].query.device)
    tables = tables_of(packed, step, window, seed)
    tables.blocks = blocks_of(pieces)
    return PackedLayer(*pools_of(pieces, tables, pages_of(packed)), tables)
