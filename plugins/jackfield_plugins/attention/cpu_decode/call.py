"""Hand tensors to the kernel.

A call over few keys takes microseconds, most of them here, so little is done: all arguments travel
in one packed struct, since ctypes takes 0.1 µs for each that it converts.
"""

from __future__ import annotations

import ctypes
import operator
import struct
import weakref
from collections.abc import Callable
from typing import Any

import torch

from jackfield.contracts import NativeCall, PackedLayer, PageTables
from jackfield.errors import ExecutionError
from jackfield_plugins.attention.cpu_decode.build import KERNEL
from jackfield_plugins.attention.cpu_decode.reading import (
    ALIKE,
    DTYPES,
    MEMORY,
    NAME,
    PACKED,
    TABLES,
    Rows,
    are_tables,
)
from jackfield_plugins.native.arguments import unreadable

SHORT = 16  # queries of a sequence that are done one by one: a token and its drafts
_PACK = struct.Struct("@10qd8q3q10q").pack  # `struct Call` in kernel.cpp
_STEP = struct.Struct("@8q")  # `struct Step`
_MOST = 4096  # calls whose arguments are remembered
_NO_MASK = (0, 0)
_NO_TABLE = (0,) * 10
_PADDED = (
    "query [batch, heads, 1, head_dim], key and value [batch, kv_heads, keys, …] of one size, "
    "heads a multiple of kv_heads"
)


def unrolled(tables: PageTables) -> Rows:
    """Each query of a short sequence as a row of its own, which sees what came before it."""
    owners, lengths, starts = [], [], []
    for owner, span in enumerate(tables.step.spans):
        single = span.query_len <= SHORT
        for at in range(span.query_len if single else 1):
            owners.append(owner)
            lengths.append(span.kv_len - span.query_len + 1 + at)
            starts.append(span.query_start + at)
    starts.append(span.query_start + span.query_len)
    of = torch.tensor(owners)
    small = (torch.tensor(numbers, dtype=torch.int32) for numbers in (lengths, starts))
    return Rows(tables.block_table[of], tables.first[of], *small)


class StepRows:
    """The rows of a step, at one place in memory for the calls of all layers with one window."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(_STEP.size)
        self._held: tuple[PageTables, Rows] | None = None  # what `memory` has the addresses of

    def put(self, tables: PageTables, rows: Rows) -> None:
        """Have the calls read these."""
        table, first, lengths, starts = rows
        _STEP.pack_into(
            self.memory, 0, len(lengths), torch.get_num_threads(),
            table.data_ptr(), first.data_ptr(), lengths.data_ptr(), starts.data_ptr(),
            table.stride(0), table.shape[1],
        )  # fmt: skip
        self._held = tables, rows

    def has(self, tables: PageTables) -> bool:
        return self._held is not None and self._held[0] is tables


class Laid:
    """The call of a layer whose tensors lie where they lay, whatever the step."""

    def __init__(
        self,
        query: torch.Tensor,
        layer: PackedLayer,
        out: torch.Tensor,
        scaling: float | None,
        call: NativeCall,
    ) -> None:
        self._tensors = [weakref.ref(one) for one in (query, out, layer.keys, layer.values)]
        self._told = scaling, layer.window, layer.page_size
        self.call = call

    def holds(
        self, query: torch.Tensor, layer: PackedLayer, out: torch.Tensor, scaling: float | None
    ) -> bool:
        """Whether it is about these very tensors."""
        queries, outputs, keys, values = self._tensors
        return (
            outputs() is out
            and queries() is query
            and keys() is layer.keys
            and values() is layer.values
            and self._told == (scaling, layer.window, layer.page_size)
        )


class Kernel:
    """The compiled kernel, called with tensors. The first on a machine compiles it."""

    def __init__(self) -> None:
        self._decode: dict[torch.dtype, Callable[[bytes], bool]] = {}
        self._addresses: dict[torch.dtype, int] = {}
        library = KERNEL.library()
        for dtype in DTYPES:
            function = library[f"decode_{str(dtype).removeprefix('torch.')}"]
            function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_bool
            self._decode[dtype] = function
            of_step = library[f"decode_step_{str(dtype).removeprefix('torch.')}"]
            self._addresses[dtype] = ctypes.cast(of_step, ctypes.c_void_p).value or 0
        self._laid: dict[int, Laid] = {}  # by output, which they do not keep alive
        self._steps: dict[int | None, StepRows] = {}  # by window
        self._rows: dict[int | None, tuple[PageTables, Rows]] = {}  # by window, of the last step
        self._readable: dict[int | None, Rows] = {}  # those that were looked at last, by window

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
        `[batch, 1, heads, value head_dim]`. A row that sees nothing gets 0, as from torch. Raises
        ExecutionError where the kernel cannot read what it is given.
        """
        try:
            batch, heads, length, size = query.shape
            rows, kv_heads, keys, value_size = value.shape
        except ValueError:
            raise unreadable(NAME, _PADDED, query=query, key=key, value=value) from None
        if (
            key.shape != (batch, kv_heads, keys, size)
            or rows != batch
            or length != 1
            or not (size and value_size and kv_heads)
            or heads % kv_heads
        ):
            raise unreadable(NAME, _PADDED, query=query, key=key, value=value)
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
        read, of_keys, of_values = query.data_ptr(), key.data_ptr(), value.data_ptr()
        seen = _NO_MASK if mask is None else (mask.data_ptr(), mask.stride(0))
        if not (read and of_keys and of_values and (mask is None or seen[0])):
            if out.numel() and keys:
                raise unreadable(NAME, MEMORY, query=query, key=key, value=value, mask=mask)
            return out.zero_()
        decode(
            _PACK(
                read, of_keys, of_values, out.data_ptr(),
                batch, heads, kv_heads, size, value_size, torch.get_num_threads(),
                size**-0.5 if scaling is None else scaling,
                query_row, query_head,
                key_row, key_head, key_token, value_row, value_head, value_token,
                keys, *seen, *_NO_TABLE,
            )
        )  # fmt: skip
        return out

    def packed(
        self, query: torch.Tensor, layer: PackedLayer, scaling: float | None = None
    ) -> torch.Tensor:
        """Attention of the sequences with up to `SHORT` queries in this step, over their pages.

        query `[tokens, heads, head_dim]`; returns `[tokens, heads, value head_dim]`, in which the
        tokens of longer sequences are not set. Raises ExecutionError where the kernel cannot read
        what it is given, also where a page table leads out of the pools.
        """
        if query.dim() != 3 or layer.values.dim() != 4:
            given = {"keys": layer.keys, "values": layer.values}
            raise unreadable(NAME, PACKED, query=query, **given)
        if query.stride(2) != 1:
            query = query.contiguous()
        out = query.new_empty(*query.shape[:2], layer.values.shape[3])
        arguments = self._arguments(query, layer, scaling, out)
        if not out.data_ptr():
            return out
        if not self._function(query, layer.keys, layer.values)(arguments):
            pages, page_size = layer.values.shape[:2]
            raise ExecutionError(
                f"{NAME} cannot read what its page tables say: a page, a length or a start is not "
                f"within {pages} pages of {page_size}, {layer.block_table.shape[1]} a row, "
                f"{len(query)} tokens"
            )
        return out

    def native(
        self,
        query: torch.Tensor,
        layer: PackedLayer,
        out: torch.Tensor,
        scaling: float | None = None,
        **_: Any,
    ) -> NativeCall | None:
        """The call that does what `packed` does.

        None where a sequence feeds more than `SHORT`, or has queries that see later keys.
        """
        if not self.native_again(layer.tables):
            return None
        laid = self._laid.get(id(out))
        if laid is None or not laid.holds(query, layer, out, scaling):
            if query.stride(-1) != 1 or not out.is_contiguous():
                return None
            if len(self._laid) >= _MOST:  # of programs that are gone
                self._laid.clear()
            call = self._call(query, layer, scaling, out)
            laid = self._laid[id(out)] = Laid(query, layer, out, scaling, call)
        return laid.call

    def native_again(self, tables: PageTables) -> bool:
        """Have the calls of layers with this window read `tables`, if `native` can."""
        if tables.step.max_seqlen_q > SHORT or tables.blocks is not None:
            return False
        step = self._step_rows(tables.window)
        if not step.has(tables):
            step.put(tables, self._rows_of(tables))
        return True

    def _step_rows(self, window: int | None) -> StepRows:
        found = self._steps.get(window)
        if found is None:
            found = self._steps[window] = StepRows()
        return found

    def _call(
        self, query: torch.Tensor, layer: PackedLayer, scaling: float | None, out: torch.Tensor
    ) -> NativeCall:
        """The call for these tensors. Raises ExecutionError."""
        self._function(query, layer.keys, layer.values)
        step = self._step_rows(layer.window).memory
        where = struct.pack("@q", ctypes.addressof(step))
        arguments = where + self._arguments(query, layer, scaling, out)
        return NativeCall(self._addresses[query.dtype], arguments, (step,))

    def _arguments(
        self, query: torch.Tensor, layer: PackedLayer, scaling: float | None, out: torch.Tensor
    ) -> bytes:
        """`struct Call` for `query` and the pages of `layer`. Raises ExecutionError."""
        keys, values, page_size = layer.keys, layer.values, layer.page_size
        try:
            tokens, heads, size = query.shape
            pages, slots, kv_heads, value_size = values.shape
            key_page, key_slot, key_head, dense = keys.stride()
            value_page, value_slot, value_head, value_dense = values.stride()
        except ValueError:
            raise unreadable(NAME, PACKED, query=query, keys=keys, values=values) from None
        if (
            keys.shape != (pages, slots, kv_heads, size)
            or slots != page_size
            or not (slots and size and value_size and kv_heads)
            or heads % kv_heads
            or (dense != 1 and size > 1)
            or (value_dense != 1 and value_size > 1)
        ):
            raise unreadable(NAME, PACKED, query=query, keys=keys, values=values)
        rows = self._rows_of(layer.tables)
        table, first, lengths, starts = rows
        read, of_keys, of_values = query.data_ptr(), keys.data_ptr(), values.data_ptr()
        held = table.data_ptr(), first.data_ptr(), lengths.data_ptr(), starts.data_ptr()
        if not (read and of_keys and of_values and all(held)) and out.numel():
            given = {"query": query, "keys": keys, "values": values, **rows._asdict()}
            raise unreadable(NAME, MEMORY, **given)
        return _PACK(
            read, of_keys, of_values, out.data_ptr(),
            len(lengths), heads, kv_heads, size, value_size, torch.get_num_threads(),
            size**-0.5 if scaling is None else scaling,
            query.stride(0), query.stride(1),
            key_page, key_head, key_slot, value_page, value_head, value_slot,
            0, *_NO_MASK, *held, table.stride(0), page_size, layer.window or 0,
            tokens, table.shape[1], pages,
        )  # fmt: skip

    def _rows_of(self, tables: PageTables) -> Rows:
        """The rows of a step, whose tables are looked at once; several queries are unrolled."""
        step = tables.step
        rows = Rows(tables.block_table, tables.first, step.seq_lens, step.cu_seqlens_q)
        seen = self._readable.get(tables.window)
        if seen is None or any(map(operator.is_not, seen, rows)):
            if not are_tables(rows):
                raise unreadable(NAME, TABLES, **rows._asdict())
            self._readable[tables.window] = rows
        if step.max_seqlen_q == 1:
            return rows
        known = self._rows.get(tables.window)
        if known is None or known[0] is not tables:
            known = self._rows[tables.window] = (tables, unrolled(tables))
        return known[1]

    def _function(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> Callable[[bytes], bool]:
        dtype = query.dtype
        decode = self._decode.get(dtype)
        if not (
            decode is not None
            and key.dtype is dtype
            and value.dtype is dtype
            and query.is_cpu
            and key.is_cpu
            and value.is_cpu
        ):
            raise unreadable(NAME, ALIKE, query=query, key=key, value=value)
        if query.requires_grad:
            raise ExecutionError("cpu_decode computes no gradients; call it under torch.no_grad()")
        return decode


def _readable(mask: torch.Tensor, batch: int, keys: int) -> torch.Tensor:
    """`mask` as `[batch, keys]` with dense rows; one row may stand for all."""
    if (
        mask.dtype is not torch.bool
        or mask.shape[1:] != (1, 1, keys)
        or mask.shape[0] not in (1, batch)
        or not mask.is_cpu
    ):
        takes = f"a mask of bool [{batch}, 1, 1, {keys}] on the CPU"
        raise unreadable(NAME, takes, mask=mask)
    rows = mask.expand(batch, 1, 1, keys)[:, 0, 0]
    return rows if rows.stride(1) == 1 else rows.contiguous()
