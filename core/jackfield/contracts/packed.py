"""The packed layout: all tokens of a step in one row, keys and values in pages.

A cache of this layout stores a layer's new keys and values itself and hands the attention a
`PackedLayer` to read from. Nothing here is quadratic in the number of tokens of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from jackfield.contracts.requirements import Requirements

if TYPE_CHECKING:
    import torch

#: The layer types that a packed layer can describe: the only restriction it can express
#: is a window.
PACKED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

#: What a model needs of its attention -> why it cannot be packed. The attention is told what
#: each sequence holds, not what its mask is: causal, with or without a window.
_NOT_PACKED: Mapping[str, str] = MappingProxyType(
    {
        "own_attention": "needs its own attention",
        "own_mask": "has no place for a mask of the model's own",
        "bidirectional_prefix": "has no place for a prefix that is read in both directions",
        "cross_attention": "has no place for what an encoder said",
    }
)


def not_packed(requirements: Requirements) -> list[str]:
    """Why no cache can have a model's tokens in the packed layout; empty: one may."""
    r = requirements
    other = set(r.layer_types) - PACKED_LAYER_TYPES - {"linear_attention"}
    reasons = [f"does not hold {layer_type} layers" for layer_type in sorted(other)]
    if "linear_attention" in r.layer_types:
        reasons += _not_apart(r)
    reasons += [
        f"{problem} ({r.features[feature]})"
        for feature, problem in _NOT_PACKED.items()
        if feature in r.features
    ]
    if len(r.execution_devices) > 1:
        names = ", ".join(r.execution_devices)
        reasons.append(f"keeps its page tables on one device, and layers compute on {names}")
    if r.irregular:
        reasons.append(
            "stores one layer's keys and values for each call of an attention, and here "
            f"{r.irregular}"
        )
    if evidence := r.ragged or r.pieces:
        reasons.append(f"has the tokens of other requests in a model's columns ({evidence})")
    return reasons


def _not_apart(r: Requirements) -> list[str]:
    """Why the states of linear-attention layers cannot be kept beside the pages."""
    if not r.states_apart:
        why = "part of other work there, or this transformers hands it on in another way"
        return [f"cannot keep the state of linear_attention layers apart ({why})"]
    reasons = []
    if r.batch_invariant:
        reasons.append("has linear_attention layers compute together what decodes together")
    if r.request_adapters:
        reasons.append("takes calls of linear_attention layers apart, and adapters go by the row")
    if r.tp_size > 1:
        reasons.append(f"keeps states in one process, and tp_size={r.tp_size} shares the model")
    return reasons


class Span(NamedTuple):
    """One sequence's part of a packed step.

    Attributes:
        query_start: Its first row: its queries are rows `query_start : query_start + query_len` of
            the step.
        query_len: How many tokens it feeds.
        kv_len: How many tokens it has then. Its queries are the last of these, at positions
            `kv_len - query_len` to `kv_len - 1`.
    """

    query_start: int
    query_len: int
    kv_len: int


@dataclass(eq=False, slots=True)
class PackedStep:
    """How the tokens of one step lie. The cache makes it in `prepare`; tensors are on its device.

    Lives: until the cache's next `prepare`. Nothing of it is to be changed.

    Violations: PluginError for wrong values. They are checked in every step on a CPU, in some
    steps on a GPU.

    Attributes:
        spans: One a sequence, in the order of `step.scheduled`.
        cu_seqlens_q: int32 `[sequences + 1]`, the first row of each sequence, then that behind the
            last.
        seq_lens: int32 `[sequences]`, how many tokens each has, those of this step included.
        max_seqlen_q: The longest `query_len` of `spans`, exactly.
        max_seqlen_k: The longest `kv_len` of `spans`, or more.
        query_lengths: Made here, for counting calls: the longest length, and 1 where some decode
            beside prefill.
    """

    spans: Seq[Span]
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    query_lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        longest = self.max_seqlen_q
        mixed = longest > 1 and any(span.query_len == 1 for span in self.spans)
        self.query_lengths = (longest, 1) if mixed else (longest,)


@dataclass(frozen=True, eq=False, slots=True)
class Blocks:
    """Queries of a step that see later keys, on to the end of a block: the tokens of an image.

    A step feeds the rest of a block with each token of it, so all of these keys are there.

    Lives: as long as the `PageTables` that have it.

    Attributes:
        ends: int32 `[tokens]`, contiguous, on the model's device: for each query of the step the
            position behind the last key that it sees. That is its own position + 1, or the end of
            its block. Where keys begin that it sees, its window says as ever.
        of: On the host, for each sequence its blocks of which this step has queries: the position
            of the first token and that behind the last, ascending; empty for one that looks back
            only.
    """

    ends: torch.Tensor
    of: Seq[Seq[tuple[int, int]]]


@dataclass(eq=False, slots=True)
class PageTables:
    """Which pages the sequences of a step hold, for all layers that remember alike.

    Token t of sequence i is in page `tables[i][(t - firsts[i]) // page_size]`, at place
    `(t - firsts[i]) % page_size` of it.

    Lives: until the cache's next `prepare`. Nothing of it is to be changed. All layers with one
    window have the same object in a step, and another one in the next.

    Violations: see `PackedKVCache.write`.

    Attributes:
        step: How the tokens of the step lie.
        window: Limits a query at position i to keys `i - window + 1 … i`; None: to keys up to i.
        page_size: Tokens of a page.
        block_table: int32 `[sequences, pages of the longest]`: row i lists the pages of sequence i
            in the order of its tokens, padded with 0.
        first: int32 `[sequences]`: the position of the first token in the first page of each. A
            multiple of the page size; not 0 only where a window let go of earlier pages.
        tables: `block_table` on the host, without padding.
        firsts: `first` on the host.
        in_a_row: Which of `tables` are consecutive numbers; looked at where a cache does not say.
        blocks: Queries that see later keys; None: all look back only. The engine sets it for a
            model whose images need it, with attentions that declare `bidirectional_blocks`; caches
            leave it alone.
        runs: Made here: for each sequence whose pages lie in a row, the first slot of the keys that
            it sees and the slot behind the last; None otherwise. A slot is page · page size +
            place.
    """

    step: PackedStep
    window: int | None
    page_size: int
    block_table: torch.Tensor
    first: torch.Tensor
    tables: Seq[Seq[int]]
    firsts: Seq[int]
    in_a_row: Seq[bool] = ()
    runs: Seq[tuple[int, int] | None] = ()
    blocks: Blocks | None = None

    def __post_init__(self) -> None:
        self.in_a_row = self.in_a_row or [_in_a_row(pages) for pages in self.tables]
        if self.window is not None:
            self.runs = [self._run(row) for row in range(len(self.tables))]
            return
        size = self.page_size  # the same without calls: this is made for all rows of every step
        self.runs = [
            (begin := pages[0] * size, begin + span.kv_len - first) if run else None
            for pages, first, span, run in zip(
                self.tables, self.firsts, self.step.spans, self.in_a_row, strict=False
            )
        ]

    def oldest(self, row: int) -> int:
        """The position of the oldest key that any query of sequence number `row` sees."""
        span = self.step.spans[row]
        begin = 0 if self.window is None else span.kv_len - span.query_len + 1 - self.window
        return max(self.firsts[row], begin)

    def keys_of(self, row: int) -> tuple[int, int]:
        """Where the keys that sequence number `row` sees begin, and the place behind the last one.

        Counted in tokens from the first token of its first page.
        """
        first = self.firsts[row]
        return self.oldest(row) - first, self.step.spans[row].kv_len - first

    def _run(self, row: int) -> tuple[int, int] | None:
        """The keys' first and last slot, where the pages lie in a row."""
        if not self.in_a_row[row]:
            return None
        begin, end = self.keys_of(row)
        start = self.tables[row][0] * self.page_size
        return start + begin, start + end


def _in_a_row(pages: Seq[int]) -> bool:
    return list(pages) == list(range(pages[0], pages[0] + len(pages)))


class PackedLayer:
    """One layer's keys and values, as an attention reads them.

    A cache makes one for each layer and hands it out in `write`; it sets `tables` in every step.
    `gather` and `mask` are for an attention that goes sequence by sequence; one that has a kernel
    for pages reads `keys`, `values`, `block_table`, `first`, `step.cu_seqlens_q` and
    `step.seq_lens`.

    Lives: for an attention, until it returns. Nothing of it is to be changed there.

    Attributes:
        keys: `[pages, page_size, kv_heads, head_dim]`.
        values: The same; values may have a `head_dim` of their own.
        flat_keys: A view by slot, `[pages * page_size, kv_heads, head_dim]`.
        flat_values: The same of the values.
        tables: Which pages belong to whom.
    """

    __slots__ = ("_by_head", "flat_keys", "flat_values", "keys", "tables", "values")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, tables: PageTables) -> None:
        self.tables = tables
        self.replace(keys, values)

    def replace(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Use other pools; for the cache.

        Args:
            keys: Contiguous `[pages, page_size, kv_heads, head_dim]`.
            values: The same, of as many pages.
        """
        self.keys, self.values = keys, values
        self.flat_keys, self.flat_values = keys.flatten(0, 1), values.flatten(0, 1)
        self._by_head = self.flat_keys.transpose(0, 1), self.flat_values.transpose(0, 1)

    @property
    def step(self) -> PackedStep:
        """How the tokens of the step lie."""
        return self.tables.step

    @property
    def window(self) -> int | None:
        """How many tokens a query sees, itself included; None: all before it."""
        return self.tables.window

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.tables.page_size

    @property
    def block_table(self) -> torch.Tensor:
        """int32 `[sequences, pages of the longest]`, padded with 0."""
        return self.tables.block_table

    @property
    def first(self) -> torch.Tensor:
        """int32 `[sequences]`, the position of the first token in each one's first page."""
        return self.tables.first

    def gather(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one sequence, from the oldest that a query of it sees to its last.

        Args:
            row: The sequence's number in `step.spans`.

        Returns:
            Keys and values, each `[kv_heads, keys, head_dim]` and strided. They are views of the
            pages where these lie in a row, copies otherwise; read them only.
        """
        if (run := self.tables.runs[row]) is not None:
            begin, end = run
            keys, values = self._by_head
            return keys.narrow(1, begin, end - begin), values.narrow(1, begin, end - begin)
        begin, end = self.tables.keys_of(row)
        index = self.block_table[row, : len(self.tables.tables[row])]
        keys = self.keys.index_select(0, index).flatten(0, 1)[begin:end]
        values = self.values.index_select(0, index).flatten(0, 1)[begin:end]
        return keys.transpose(0, 1), values.transpose(0, 1)

    def mask(self, row: int) -> torch.Tensor | None:
        """What the queries of one sequence see of its gathered keys.

        Args:
            row: The sequence's number in `step.spans`.

        Returns:
            bool `[queries, keys]`, True where seen; None for a single query, which sees all.
        """
        span = self.step.spans[row]
        if span.query_len == 1:
            return None
        import torch

        at = torch.arange(self.tables.oldest(row), span.kv_len, device=self.keys.device)
        return self.seen(at[-span.query_len :, None], at, self.ends(row))

    def ends(self, row: int) -> torch.Tensor | None:
        """Behind which key each query of one sequence sees nothing.

        Args:
            row: The sequence's number in `step.spans`.

        Returns:
            int32 `[queries, 1]`, positions; None where none sees a later key than its own.
        """
        blocks, span = self.tables.blocks, self.step.spans[row]
        if blocks is None or not blocks.of[row]:
            return None
        return blocks.ends[span.query_start : span.query_start + span.query_len, None]

    def seen(
        self, queries: torch.Tensor, keys: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Which keys a query sees: not later ones, and none before its window.

        Args:
            queries: Positions, of whole numbers.
            keys: Positions, which broadcast with `queries`.
            ends: Positions behind the last key that each sees, which broadcast with `queries`;
                None: each sees none behind its own.

        Returns:
            bool, of the shape that all broadcast to.
        """
        seen = keys <= queries if ends is None else keys < ends
        return seen if self.window is None else seen & (keys > queries - self.window)
