"""From a `PackedLayer` to kernel launches.

What the layers of a step have in common (addresses of tables, grids, splits) is worked out once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import triton

from jackfield.contracts import PackedLayer, PageTables, Span
from jackfield_plugins.attention.triton.kernels import paged_decode, paged_prefill
from jackfield_plugins.attention.triton.tiles import Tile, choose_splits
from jackfield_plugins.attention.triton.variants import (
    Shape,
    Variants,
    interpreted,
)
from jackfield_plugins.launching import aligned, launch

#: How many steps' grids are kept: one for each kind of layer of a model, and some to spare.
_KEPT = 8

Grid = tuple[int, int, int]


class Prepared(NamedTuple):
    """What the layers of one shape share in one step.

    `small` is the block table, first, seq_lens and cu_seqlens_q, each as kernels take it. A grid is
    None where its kernel has nothing to do.
    """

    tables: PageTables
    variants: Variants
    small: tuple[Any, ...]
    ends: Any  # of blocks; None: all queries look back only
    table_row: int
    short: int  # queries that `decode` takes; 0: none
    prefill: Grid | None
    decode: Grid | None
    sum: Grid | None


class PagedAttention:
    """Causal attention to pages, for the layers of one model.

    `num_splits` None: chosen for each step. `tile` is for tests. Holds no keys and no values.
    """

    def __init__(self, num_splits: int | None = None, tile: Tile | None = None) -> None:
        self._num_splits = num_splits
        self._tile = tile
        self._variants: dict[tuple[torch.device, Shape], Variants] = {}
        self._steps: dict[tuple[int, tuple[Any, ...]], Prepared] = {}
        self._as_argument: Callable[[torch.Tensor], Any] = (
            _itself if interpreted() else torch.Tensor.data_ptr
        )

    def compile(self, shape: Shape, device: torch.device) -> Variants:
        """The kernels for layers of this shape; compiled on the first call."""
        found = self._variants.get((device, shape))
        if found is None:
            found = self._variants[device, shape] = Variants(shape, device, self._tile)
        return found

    def __call__(
        self,
        query: torch.Tensor,
        layer: PackedLayer,
        *,
        scaling: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of `query` `[tokens, heads, head_dim]` to the pages of `layer`.

        Returns `[tokens, heads, value_dim]`, contiguous. `sinks` is `[heads]`.
        """
        query = aligned(query.contiguous())
        step = self._prepared(query, layer, softcap is not None, sinks)
        keys, values = layer.keys, layer.values
        out = query.new_empty(*query.shape[:2], values.shape[3])
        at = self._as_argument
        first = (at(query), at(keys), at(values), at(query if sinks is None else sinks), at(out))
        numbers = (*step.small, float(scaling), float(softcap or 1.0), step.table_row)
        launch(self._launch, query.device, step, first, numbers, out)
        return out

    def _launch(
        self, step: Prepared, first: tuple[Any, ...], numbers: tuple[Any, ...], out: torch.Tensor
    ) -> None:
        variants, at = step.variants, self._as_argument
        if step.prefill is not None and step.ends is None:
            variants.prefill(step.prefill, *first, *numbers, step.short, step.small[3])
        elif step.prefill is not None:
            with_ends = variants.prefill_with_ends
            with_ends(step.prefill, *first, *numbers, step.short, step.ends)
        if step.decode is None:
            return
        decode = variants.decode[step.short]
        if step.sum is None:
            decode(step.decode, *first, first[4], first[4], *numbers)
            return
        # One step's layers could share these, but not with a graph that was recorded meanwhile.
        splits, rows, heads = step.decode[2], step.sum[1], step.sum[0]
        count = splits * rows * heads
        parts, lse = out.new_empty(
            count * (variants.shape.value_dim + 1), dtype=variants.shape.wide
        ).split([count * variants.shape.value_dim, count])
        decode(step.decode, *first, at(parts), at(lse), *numbers)
        variants.sum(step.sum, at(parts), at(lse), first[4], step.small[3], step.short, splits)

    def _prepared(
        self, query: torch.Tensor, layer: PackedLayer, softcap: bool, sinks: torch.Tensor | None
    ) -> Prepared:
        keys, values, tables = layer.keys, layer.values, layer.tables
        key = (query.shape[1:], keys.stride(), values.stride(), softcap, sinks is None)
        found = self._steps.get((id(tables), key))
        if found is None or found.tables is not tables:
            shape = Shape(
                query.dtype, query.shape[1], keys.shape[2], query.shape[2], values.shape[3],
                tables.page_size, tables.window, softcap, sinks is not None,
                keys.stride()[:3], values.stride()[:3],
            )  # fmt: skip
            found = self._prepare(self.compile(shape, query.device), tables, query.device)
            if len(self._steps) >= _KEPT:
                self._steps.clear()
            self._steps[id(tables), key] = found
        return found

    def _prepare(self, variants: Variants, tables: PageTables, device: torch.device) -> Prepared:
        step, shape = tables.step, variants.shape
        sequences, lengths = len(step.spans), [span.query_len for span in step.spans]
        # Decode kernels look back only; of a block's one last token that is all that it sees.
        limit = variants.limit if tables.blocks is None else 1
        most = max((n for n in lengths if n <= limit), default=0)
        short = min(most, 1) if most < 2 else variants.limit
        prefill = decode = total = None
        if short < max(lengths):
            tiles = triton.cdiv(step.max_seqlen_q, variants.prefill_queries)
            prefill = (tiles, shape.kv_heads * variants.prefill_chunks, sequences)
        if short:
            splits = self._num_splits or self._splits(variants, tables, short, device)
            decode = (shape.kv_heads * variants.decode_chunks, sequences, splits)
            if splits > 1:
                blocks = triton.cdiv(shape.value_dim, variants.sum_block)
                total = (shape.heads, sequences * short, blocks)
        small = (tables.block_table, tables.first, step.seq_lens, step.cu_seqlens_q)
        row = tables.block_table.stride(0)
        given = tuple(map(self._as_argument, small))
        ends = None if tables.blocks is None else self._as_argument(tables.blocks.ends)
        return Prepared(tables, variants, given, ends, row, short, prefill, decode, total)

    def _splits(
        self, variants: Variants, tables: PageTables, short: int, device: torch.device
    ) -> int:
        spans = [span for span in tables.step.spans if span.query_len <= short]
        longest = _longest(spans, tables.window)
        programs = len(spans) * variants.shape.kv_heads * variants.decode_chunks
        return choose_splits(programs, longest, variants.decode_keys, _processors(device))


def paged_attention(
    query: torch.Tensor,
    layer: PackedLayer,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    num_splits: int | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """One call by itself; a model's layers go through one `PagedAttention`."""
    attention = _by_itself(num_splits, tile)
    return attention(query, layer, scaling=scaling, softcap=softcap, sinks=sinks)


@functools.cache
def _by_itself(num_splits: int | None, tile: Tile | None) -> PagedAttention:
    return PagedAttention(num_splits, tile)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _longest(spans: Iterable[Span], window: int | None) -> int:
    """The most keys that one of these sequences sees."""
    return max(
        span.kv_len if window is None else min(span.kv_len, window + span.query_len - 1)
        for span in spans
    )


def kernels_in_use() -> str:
    """What reports say."""
    how = ", interpreted" if interpreted() else ""
    return (
        f"{paged_prefill.__name__} and {paged_decode.__name__} of Triton {triton.__version__}{how}"
    )


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter runs programs one after another
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
