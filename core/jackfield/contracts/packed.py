"""The packed layout: all tokens of a step in one row, keys and values in pages.

A cache of this layout stores a layer's new keys and values itself and hands the attention a
`PackedLayer` to read from. Nothing here is quadratic in the number of tokens of a step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


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


@dataclass(slots=True)
class PackedLayer:
    """One layer's keys and values, as an attention reads them.

    `keys` and `values` are `[pages, page_size, kv_heads, head_dim]`. Row i of `block_table` (int32
    `[sequences, pages of the longest]`, padded with 0) lists the pages of sequence i in the order
    of its tokens, beginning with the page that holds token `first[i]` (int32; a multiple of the
    page size, not 0 only where a window let go of earlier pages; on the host in `firsts`).
    `tables` is the same on the host. `window` limits query i to keys `i - window + 1 … i`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    block_table: torch.Tensor
    first: torch.Tensor
    tables: Seq[Seq[int]]
    firsts: Seq[int]
    step: PackedStep
    window: int | None

    @property
    def page_size(self) -> int:
        return self.keys.shape[1]

    def oldest(self, row: int) -> int:
        """The position of the oldest key that any query of sequence `row` sees."""
        span = self.step.spans[row]
        begin = 0 if self.window is None else span.end - span.length + 1 - self.window
        return max(self.firsts[row], begin)

    def mask(self, row: int) -> torch.Tensor | None:
        """What the queries of one sequence see of its gathered keys: bool `[queries, keys]`.

        None for a single query, which sees all of them.
        """
        span = self.step.spans[row]
        if span.length == 1:
            return None
        import torch

        at = torch.arange(self.oldest(row), span.end, device=self.keys.device)
        queries = at[-span.length :, None]
        seen = at <= queries
        return seen if self.window is None else seen & (at > queries - self.window)

    def gather(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one sequence, `[kv_heads, keys, head_dim]`, from `oldest(row)` on.

        Views where its pages lie in a row, copies otherwise.
        """
        pages = self.tables[row]
        begin = self.oldest(row) - self.firsts[row]
        end = self.step.spans[row].end - self.firsts[row]
        lowest = pages[0]
        if pages[-1] - lowest == len(pages) - 1 and _rising(pages):
            found = self.keys[lowest : pages[-1] + 1], self.values[lowest : pages[-1] + 1]
        else:
            index = self.block_table[row, : len(pages)]
            found = self.keys.index_select(0, index), self.values.index_select(0, index)
        keys, values = (t.flatten(0, 1)[begin:end].transpose(0, 1) for t in found)
        return keys, values


def _rising(pages: Seq[int]) -> bool:
    return all(b - a == 1 for a, b in zip(pages, pages[1:], strict=False))
