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

#: The layer types that a packed layer can describe: it names a window, and nothing else.
PACKED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

#: What a model needs of its attention -> why it cannot be packed. The attention is told what
#: each sequence holds, not what its mask is: causal, with or without a window.
_NOT_PACKED: Mapping[str, str] = MappingProxyType(
    {
        "own_attention": "needs its own attention",
        "own_mask": "has no place for a mask of the model's own",
        "bidirectional_prefix": "has no place for a prefix that is read in both directions",
    }
)


def not_packed(requirements: Requirements) -> list[str]:
    """Why no cache can have a model's tokens in the packed layout; empty: one may."""
    r = requirements
    reasons = [
        f"does not hold {layer_type} layers"
        for layer_type in sorted(set(r.layer_types) - PACKED_LAYER_TYPES)
    ]
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


class Span(NamedTuple):
    """One sequence's part of a packed step.

    Its queries are rows `start : start + length`; they are the last of its `end` tokens.
    """

    start: int
    length: int
    end: int


@dataclass(slots=True)
class PackedStep:
    """How the tokens of one step lie. Valid until the cache's next `prepare`.

    `cu_seqlens_q` is int32 `[sequences + 1]`, `seq_lens` (tokens cached, these ones included) is
    int32 `[sequences]`.
    """

    spans: Seq[Span]
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    max_query_length: int
    max_seq_length: int
    query_lengths: tuple[int, ...] = ()  # the longest, and 1 if there is decode beside prefill

    def __post_init__(self) -> None:
        longest = self.max_query_length
        mixed = longest > 1 and any(span.length == 1 for span in self.spans)
        self.query_lengths = (longest, 1) if mixed else (longest,)


@dataclass(slots=True)
class PageTables:
    """Which pages the sequences of a step hold, for all layers that remember alike.

    Row i of `block_table` (int32 `[sequences, pages of the longest]`, padded with 0) lists the
    pages of sequence i in the order of its tokens, beginning with the page that holds token
    `first[i]` (int32; a multiple of the page size, not 0 only where a window let go of earlier
    pages). `tables` and `firsts` are the same on the host. `window` limits query i to keys
    `i - window + 1 … i`. Valid until the cache's next `prepare`.
    """

    step: PackedStep
    window: int | None
    page_size: int
    block_table: torch.Tensor
    first: torch.Tensor
    tables: Seq[Seq[int]]
    firsts: Seq[int]
    runs: Seq[tuple[int, int] | None] = ()

    def __post_init__(self) -> None:
        self.runs = [self._run(row) for row in range(len(self.tables))]

    def oldest(self, row: int) -> int:
        """The position of the oldest key that any query of sequence `row` sees."""
        span = self.step.spans[row]
        begin = 0 if self.window is None else span.end - span.length + 1 - self.window
        return max(self.firsts[row], begin)

    def keys_of(self, row: int) -> tuple[int, int]:
        """Where, counted from the first page's first token, the keys seen begin and end."""
        first = self.firsts[row]
        return self.oldest(row) - first, self.step.spans[row].end - first

    def _run(self, row: int) -> tuple[int, int] | None:
        """The keys' first and last slot, where the pages lie in a row."""
        pages = list(self.tables[row])
        if pages != list(range(pages[0], pages[0] + len(pages))):
            return None
        begin, end = self.keys_of(row)
        return pages[0] * self.page_size + begin, pages[0] * self.page_size + end


class PackedLayer:
    """One layer's keys and values, as an attention reads them.

    `keys` and `values` are `[pages, page_size, kv_heads, head_dim]`; which pages belong to whom is
    in `tables`.
    """

    __slots__ = ("_by_head", "flat_keys", "flat_values", "keys", "tables", "values")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, tables: PageTables) -> None:
        self.tables = tables
        self.replace(keys, values)

    def replace(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Use other pools. `flat_keys` and `flat_values` are views by slot, not by page."""
        self.keys, self.values = keys, values
        self.flat_keys, self.flat_values = keys.flatten(0, 1), values.flatten(0, 1)
        self._by_head = self.flat_keys.transpose(0, 1), self.flat_values.transpose(0, 1)

    @property
    def step(self) -> PackedStep:
        return self.tables.step

    @property
    def window(self) -> int | None:
        return self.tables.window

    @property
    def page_size(self) -> int:
        return self.tables.page_size

    @property
    def block_table(self) -> torch.Tensor:
        return self.tables.block_table

    @property
    def first(self) -> torch.Tensor:
        return self.tables.first

    def gather(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one sequence, `[kv_heads, keys, head_dim]`, from the oldest seen on.

        Views where its pages lie in a row, copies otherwise.
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
        """What the queries of one sequence see of its gathered keys: bool `[queries, keys]`.

        None for a single query, which sees all of them.
        """
        span = self.step.spans[row]
        if span.length == 1:
            return None
        import torch

        at = torch.arange(self.tables.oldest(row), span.end, device=self.keys.device)
        return self.seen(at[-span.length :, None], at)

    def seen(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Which keys a query sees, both given as positions that broadcast."""
        seen = keys <= queries
        return seen if self.window is None else seen & (keys > queries - self.window)
