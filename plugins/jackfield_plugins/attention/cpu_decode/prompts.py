"""Hand the tensors of prompts to their kernel (`prompts.h`)."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

import torch

from jackfield.contracts import PackedLayer
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

_PACK = struct.Struct("@9qd21q").pack  # `struct PromptsCall`


class Prompts:
    """The compiled kernel, called with tensors."""

    def __init__(self) -> None:
        self._attend: dict[torch.dtype, Callable[[bytes], bool]] = {}
        library = KERNEL.library()
        for dtype in DTYPES:
            function = library[f"prompts_{str(dtype).removeprefix('torch.')}"]
            function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_bool
            self._attend[dtype] = function

    def attend(
        self,
        query: torch.Tensor,
        layer: PackedLayer,
        out: torch.Tensor,
        scaling: float | None = None,
        few: int = 0,
    ) -> None:
        """Attention of the sequences with more than `few` queries in this step, over their pages,
        and of those with queries that see later keys.

        query `[tokens, heads, head_dim]`. Their tokens of out, contiguous `[tokens, heads, value
        head_dim]`, are set. Memory beside it is a few blocks a thread. Raises ExecutionError where
        the kernel cannot read what it is given, also where a page table leads out of the pools.
        """
        keys, values, page_size = layer.keys, layer.values, layer.page_size
        try:
            if query.stride(2) != 1:
                query = query.contiguous()
            tokens, heads, size = query.shape
            pages, slots, kv_heads, value_size = values.shape
            key_page, key_slot, key_head, key_dense = keys.stride()
            value_page, value_slot, value_head, value_dense = values.stride()
        except (ValueError, IndexError):
            raise unreadable(NAME, PACKED, query=query, keys=keys, values=values) from None
        if (
            keys.shape != (pages, slots, kv_heads, size)
            or slots != page_size
            or not (slots and size and value_size and kv_heads)
            or heads % kv_heads
            or (key_dense != 1 and size > 1)
            or (value_dense != 1 and value_size > 1)
            or out.shape != (tokens, heads, value_size)
            or not out.is_contiguous()
        ):
            raise unreadable(NAME, PACKED, query=query, keys=keys, values=values, out=out)
        attend, rows = self._function(query, keys, values, out), _rows_of(layer)
        if not out.numel():
            return
        held = [tensor.data_ptr() for tensor in rows]
        read = [tensor.data_ptr() for tensor in (query, keys, values, out)]
        if not (all(held) and all(read)):
            given = {"query": query, "keys": keys, "values": values, **rows._asdict()}
            raise unreadable(NAME, MEMORY, **given)
        arguments = _PACK(
            *read,
            heads, kv_heads, size, value_size, torch.get_num_threads(),
            size**-0.5 if scaling is None else scaling,
            query.stride(0), query.stride(1),
            key_page, key_head, key_slot, value_page, value_head, value_slot,
            *held, _ends_of(layer, tokens), rows.table.stride(0), page_size, layer.window or 0,
            len(rows.lengths), tokens, rows.table.shape[1], pages, few,
        )  # fmt: skip
        if not attend(arguments):
            raise ExecutionError(
                f"{NAME} cannot read what its page tables say: a page, a length, a start or an end "
                f"is not within {pages} pages of {page_size}, {rows.table.shape[1]} a row, "
                f"{tokens} tokens"
            )

    def _function(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> Callable[[bytes], bool]:
        """The kernel for their dtype. Raises ExecutionError."""
        attend = self._attend.get(query.dtype)
        alike = query, keys, values, out
        if attend is None or not all(t.dtype is query.dtype and t.is_cpu for t in alike):
            raise unreadable(NAME, ALIKE, query=query, keys=keys, values=values, out=out)
        if query.requires_grad:
            raise ExecutionError(f"{NAME} computes no gradients; call it under torch.no_grad()")
        return attend


def _ends_of(layer: PackedLayer, tokens: int) -> int:
    """The address of `Blocks.ends`; 0 where all look back only. Raises ExecutionError."""
    blocks = layer.tables.blocks
    if blocks is None:
        return 0
    ends = blocks.ends
    dense = ends.dtype is torch.int32 and ends.is_cpu and ends.is_contiguous()
    if not dense or ends.shape != (tokens,):
        raise unreadable(NAME, f"ends of dense int32 [{tokens}] on the CPU", ends=ends)
    return ends.data_ptr()


def _rows_of(layer: PackedLayer) -> Rows:
    """A row for each sequence of the step. Raises ExecutionError."""
    tables, step = layer.tables, layer.tables.step
    rows = Rows(tables.block_table, tables.first, step.seq_lens, step.cu_seqlens_q)
    if not are_tables(rows):
        raise unreadable(NAME, TABLES, **rows._asdict())
    return rows
