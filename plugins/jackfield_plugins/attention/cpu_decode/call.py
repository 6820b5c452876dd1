"""Hand tensors to the kernel.

A call over few keys takes microseconds, most of them here, so little is done: all arguments travel
in one packed struct, since ctypes takes 0.1 µs for each that it converts.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import NamedTuple

import torch

from jackfield.contracts import PackedLayer, PageTables
from jackfield.errors import ExecutionError
from jackfield_plugins.attention.cpu_decode.build import KERNEL

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHORT = 16  # queries of a sequence that are done one by one: a token and its drafts
_PACK = struct.Struct("@10qd8q3q7q").pack  # `struct Call` in kernel.cpp
_NO_MASK = (0, 0)
_NO_TABLE = (0,) * 7


class Rows(NamedTuple):
    """What the kernel reads of a step: a row is one query, or a sequence of too many, left out.

    All int32: `table` `[rows, pages]`, `first` and `lengths` `[rows]`, `starts` `[rows + 1]`.
    """

    table: torch.Tensor
    first: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor


def unrolled(tables: PageTables) -> Rows:
    """Each query of a short sequence as a row of its own, which sees what came before it."""
    owners, lengths, starts = [], [], []
    for owner, span in enumerate(tables.step.spans):
        single = span.length <= SHORT
        for at in range(span.length if single else 1):
            owners.append(owner)
            lengths.append(span.end - span.length + 1 + at)
            starts.append(span.start + at)
    starts.append(span.start + span.length)
    of = torch.tensor(owners)
    small = (torch.tensor(numbers, dtype=torch.int32) for numbers in (lengths, starts))
    return Rows(tables.block_table[of], tables.first[of], *small)


class Kernel:
    """The compiled kernel, called with tensors. The first on a machine compiles it."""

    def __init__(self) -> None:
        self._decode: dict[torch.dtype, Callable[[bytes], None]] = {}
        library = KERNEL.library()
        for dtype in DTYPES:
            function = library[f"decode_{str(dtype).removeprefix('torch.')}"]
            function.argtypes, function.restype = [ctypes.c_char_p], None
            self._decode[dtype] = function
        self._rows: dict[int | None, tuple[PageTables, Rows]] = {}  # by window, of the last step

    def padded(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        scaling: float | None = None,
    ) -> torch.Tensor:
        """Attention of one query token a row.

        query `[batch, heads, 1, head_dim]`, key and value `[batch, kv_heads, keys, head_dim]` with
        any strides, mask bool `[batch, 1, 1, keys]` or None; returns
        `[batch, 1, heads, value head_dim]`. A row that sees nothing gets 0, as from torch.
        """
        batch, heads, length, size = query.shape
        _, kv_heads, keys, value_size = value.shape
        if key.shape != (batch, kv_heads, keys, size) or length != 1 or heads % kv_heads:
            raise ExecutionError(_mismatch(query, key, value))
        decode = self._function(query, key, value)
        query_row, query_head, _, dense = query.stride()
        if dense != 1:
            query = query.contiguous()
            query_row, query_head = query.stride()[:2]
        key_row, key_head, key_token, dense = key.stride()
        if dense != 1:
            key = key.contiguous()
            key_row, key_head, key_token = key.stride()[:3]
        value_row, value_head, value_token, dense = value.stride()
        if dense != 1:
            value = value.contiguous()
            value_row, value_head, value_token = value.stride()[:3]
        if mask is not None:
            mask = _readable(mask, batch, keys)
        out = query.new_empty(batch, 1, heads, value_size)
        decode(
            _PACK(
                query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(),
                batch, heads, kv_heads, size, value_size, torch.get_num_threads(),
                size**-0.5 if scaling is None else scaling,
                query_row, query_head,
                key_row, key_head, key_token, value_row, value_head, value_token,
                keys, *(_NO_MASK if mask is None else (mask.data_ptr(), mask.stride(0))),
                *_NO_TABLE,
            )
        )  # fmt: skip
        return out

    def packed(
        self, query: torch.Tensor, layer: PackedLayer, scaling: float | None = None
    ) -> torch.Tensor:
        """Attention of the sequences with up to `SHORT` queries in this step, over their pages.

        query `[tokens, heads, head_dim]`; returns `[tokens, heads, value head_dim]`, in which the
        tokens of longer sequences are not set.
        """
        tokens, heads, size = query.shape
        keys, values = layer.keys, layer.values
        rows = self._rows_of(layer.tables)
        table = rows.table
        kv_heads, value_size = values.shape[2:]
        decode = self._function(query, keys, values)
        if query.stride(2) != 1:
            query = query.contiguous()
        out = query.new_empty(tokens, heads, value_size)
        key_page, key_slot, key_head, _ = keys.stride()
        value_page, value_slot, value_head, _ = values.stride()
        decode(
            _PACK(
                query.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(),
                len(rows.lengths), heads, kv_heads, size, value_size, torch.get_num_threads(),
                size**-0.5 if scaling is None else scaling,
                query.stride(0), query.stride(1),
                key_page, key_head, key_slot, value_page, value_head, value_slot,
                0, *_NO_MASK,
                table.data_ptr(), rows.first.data_ptr(), rows.lengths.data_ptr(),
                rows.starts.data_ptr(), table.stride(0), layer.page_size, layer.window or 0,
            )
        )  # fmt: skip
        return out

    def _rows_of(self, tables: PageTables) -> Rows:
        """The rows of a step, made once for all layers that share its tables."""
        if tables.step.max_query_length == 1:
            step = tables.step
            return Rows(tables.block_table, tables.first, step.seq_lens, step.cu_seqlens_q)
        known, rows = self._rows.get(tables.window, (None, None))
        if known is not tables or rows is None:
            rows = unrolled(tables)
            self._rows[tables.window] = (tables, rows)
        return rows

    def _function(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> Callable[[bytes], None]:
        dtype = query.dtype
        if key.dtype is not dtype or value.dtype is not dtype:
            raise ExecutionError(_mismatch(query, key, value))
        if query.requires_grad:
            raise ExecutionError("cpu_decode computes no gradients; call it under torch.no_grad()")
        return self._decode[dtype]


def _readable(mask: torch.Tensor, batch: int, keys: int) -> torch.Tensor:
    """`mask` as `[batch, keys]` with dense rows; one row may stand for all."""
    if mask.dtype is not torch.bool or mask.shape[1:] != (1, 1, keys):
        raise ExecutionError(
            f"cpu_decode takes a mask of bool [{batch}, 1, 1, {keys}], not {mask.dtype} "
            f"{list(mask.shape)}; choose 'sdpa'"
        )
    rows = mask.expand(batch, 1, 1, keys)[:, 0, 0]
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _mismatch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
    given = "; ".join(f"{t.dtype} {list(t.shape)}" for t in (query, key, value))
    return f"cpu_decode cannot attend with query, key and value of {given}"
