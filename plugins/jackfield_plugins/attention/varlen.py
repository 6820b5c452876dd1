"""Both layouts on top of one kind of kernel: attention over rows of tokens without padding.

Flash kernels take the tokens of all sequences in one row, with cumulative lengths. This module
brings a step into that form, whichever layout it comes in, and takes the output back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from jackfield.contracts import BoundAttention, PackedLayer, PageTables, StepBlock
from jackfield.errors import ExecutionError

#: How many steps' lay-outs are kept: one for each kind of layer of a model, and some to spare.
_KEPT = 4


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """Where the sequences of one call lie.

    Sequence i owns query rows `cu_seqlens_q[i] : cu_seqlens_q[i + 1]`, at least one, and the same
    of the keys; its queries are the last of its keys. Both are int32 `[sequences + 1]`. What lies
    behind the last sequence is nobody's: its output may be anything. No sequence is longer than
    `max_seqlen_q` and `max_seqlen_k`. With `block_table` (int32 `[sequences, pages]`) keys and
    values are pages, of which the first `seqused_k[i]` tokens (int32 `[sequences]`) are its keys.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    block_table: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None

    def within(self, window: int | None) -> int | None:
        """`window`, or None where no sequence is longer: every kernel is slower with one."""
        return None if window is not None and window >= self.max_seqlen_k else window


@dataclass(frozen=True, eq=False, slots=True)
class Scoring:
    """How scores are made. `window`: query i sees keys `i - window + 1 … i`. Sinks: `[heads]`."""

    scale: float | None = None
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


#: Query, keys, values, rows and scoring to the output; see `VarlenKernel`.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Rows, Scoring], torch.Tensor]


@dataclass(frozen=True)
class VarlenKernel:
    """A varlen kernel behind one signature, whatever its own looks like.

    `attend(query, keys, values, rows, scoring) -> output`: query and output
    `[tokens, heads, head_dim]`, keys and values `[tokens, kv_heads, head_dim]`, or pages
    `[pages, page_size, kv_heads, head_dim]` where the page size is a multiple of `page_multiple`
    (None: it reads no pages). All contiguous. `features` are the keys of `FEATURES` it has.
    """

    attend: Attend
    features: frozenset[str]
    page_multiple: int | None = None


def bind_varlen(
    kernel: VarlenKernel, windows: Sequence[int | None], source: str | None = None
) -> BoundAttention:
    """`kernel` for both layouts. `windows` has the window of each layer, by its index."""
    padded = _Padded(kernel, windows)
    return BoundAttention(padded.forward, padded.mask, _Packed(kernel).forward, source)


@dataclass(eq=False, slots=True)
class _Unpadded:
    """Rows, and in which order the padded queries and keys make them (None: as they are).

    Who is in no row comes last. `unasked` are the queries whose output is nobody's, `[batch,
    q_len]`.
    """

    rows: Rows
    queries: torch.Tensor | None = None  # indices into [batch * q_len], all of them
    batch_of_key: torch.Tensor | None = None
    column_of_key: torch.Tensor | None = None
    unasked: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Unusable:
    """Stands for a mask that rows cannot express; an error as soon as a layer attends with it."""

    reason: str


class _Memory:
    """Remembers by the identity of a tensor, so that the layers of one step share one answer."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Any, Any]] = {}

    def get(self, anchor: Any, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returned for this very `anchor` and an equal `key`."""
        found = self._known.get((id(anchor), key))
        if found is None or found[0] is not anchor:
            if len(self._known) >= _KEPT:
                self._known.clear()
            found = self._known[id(anchor), key] = (anchor, make())
        return found[1]


class _Padded:
    """Batch × time: valid tokens are gathered into rows, the output is put back where they were.

    The mask is `[batch, keys]` of bool, whose last columns are the step's queries, or None where
    every token is valid. Rows of padding come out as zeros.
    """

    def __init__(self, kernel: VarlenKernel, windows: Sequence[int | None]) -> None:
        self._kernel = kernel
        self._windows = windows
        self._memory = _Memory()

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: Any = 0,
        kv_offset: Any = 0,
        mask_function: Callable[..., Any] | None = None,
        attention_mask: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
        **_: Any,
    ) -> torch.Tensor | _Unusable | None:
        """The valid keys, or why they do not say it all: a model makes masks that it never uses."""
        if reason := _inexpressible(mask_function, self._windows):
            return _Unusable(reason)
        # Keys beyond the last query are not written yet (a static cache).
        end = int(q_offset) + q_length - int(kv_offset)
        if attention_mask is None:
            if end == kv_length:
                return None
            return torch.ones(batch_size, end, dtype=torch.bool, device=device)
        valid = attention_mask.bool()
        if valid.shape[1] != end:  # it is, where `generate` made the mask ahead with this function
            valid = valid[:, int(kv_offset) : int(kv_offset) + end]
            valid = F.pad(valid, (0, end - valid.shape[1]))
        # On an accelerator the look would wait for all that was computed so far.
        whole = end == kv_length and valid.is_cpu and bool(valid.all())
        return None if whole else valid

    def forward(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | _Unusable | None,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        window = self._windows[module.layer_idx]
        if sliding_window is not None and sliding_window != window:
            raise ExecutionError(
                f"layer {module.layer_idx} asks for a window of {sliding_window}, its cache for "
                f"{window}; choose another attention, e.g. 'eager'"
            )
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        scoring = Scoring(scaling, causal, window, softcap, s_aux)
        batch, heads, length, size = query.shape
        lay = self._lay(attention_mask, query, key)
        queries = query.transpose(1, 2).reshape(batch * length, heads, size)
        if lay.queries is None:
            keys, values = (t.transpose(1, 2).flatten(0, 1).contiguous() for t in (key, value))
            found = self._kernel.attend(queries.contiguous(), keys, values, lay.rows, scoring)
            return found.view(batch, length, heads, size), None
        assert lay.unasked is not None
        at = (lay.batch_of_key, lay.column_of_key)
        keys, values = (t.transpose(1, 2)[at].contiguous() for t in (key, value))
        found = self._kernel.attend(queries[lay.queries], keys, values, lay.rows, scoring)
        output = queries.new_empty(queries.shape).index_copy_(0, lay.queries, found)
        output = output.view(batch, length, heads, size)
        return output.masked_fill_(lay.unasked[..., None, None], 0), None

    def _lay(
        self, mask: torch.Tensor | _Unusable | None, query: torch.Tensor, key: torch.Tensor
    ) -> _Unpadded:
        batch, _, length, _ = query.shape
        if mask is None:
            shape = (batch, length, key.shape[2], query.device)
            return self._memory.get(None, shape, lambda: _whole(*shape))  # type: ignore[no-any-return]
        if isinstance(mask, _Unusable):
            raise ExecutionError(f"{mask.reason}; choose another attention, e.g. 'eager'")
        if mask.dim() != 2:
            raise ExecutionError(
                f"this attention takes no ready-made mask of {mask.dim()} dimensions; give a "
                "mask of [batch, tokens], or choose another attention, e.g. 'eager'"
            )
        return self._memory.get(mask, length, lambda: _unpadded(mask, length))  # type: ignore[no-any-return]


def _whole(batch: int, q_length: int, k_length: int, device: torch.device) -> _Unpadded:
    steps = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return _Unpadded(Rows(steps * q_length, steps * k_length, q_length, k_length))


def _unpadded(valid: torch.Tensor, q_length: int) -> _Unpadded:
    """How many tokens there are is known on the device alone, and nobody waits to hear of it.

    So all of them are brought along, those of no row behind the rows.
    """
    columns = valid.shape[1]
    asked = valid[:, -q_length:]
    queries, keys = _one_at_least(asked), _one_at_least(valid)
    order = _marked_first(keys)
    cu_q, cu_k = (
        F.pad(marks.sum(1).cumsum(0), (1, 0)).to(torch.int32) for marks in (queries, keys)
    )
    rows = Rows(cu_q, cu_k, q_length, columns)
    return _Unpadded(rows, _marked_first(queries), order // columns, order % columns, ~asked)


def _one_at_least(marks: torch.Tensor) -> torch.Tensor:
    """`marks` `[batch, columns]`, and the last one of a row that has none.

    Kernels take steps of single queries for one each, and a row without keys for no row.
    """
    last = marks[:, -1:] | ~marks.any(1, keepdim=True)
    return torch.cat([marks[:, :-1], last], 1)


def _marked_first(marks: torch.Tensor) -> torch.Tensor:
    """The numbers of all places of `marks`, row by row: those that are marked, then the others."""
    return marks.flatten().to(torch.uint8).argsort(descending=True, stable=True)


class _Packed:
    """Pages: read in place where the kernel can, otherwise gathered into rows, once a layer."""

    def __init__(self, kernel: VarlenKernel) -> None:
        self._kernel = kernel
        self._memory = _Memory()
        self._block: StepBlock | None = None

    def forward(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        layer: PackedLayer,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        scoring = Scoring(scaling, True, layer.window, softcap, s_aux)
        multiple = self._kernel.page_multiple
        in_place = multiple is not None and layer.page_size % multiple == 0
        make = _paged if in_place else self._gathered
        # The layers of a group share their tables, which are made anew every step.
        rows, slots = self._memory.get(layer.tables, in_place, lambda: make(layer.tables))
        keys, values = layer.keys, layer.values
        if slots is not None:
            keys = layer.flat_keys.index_select(0, slots)
            values = layer.flat_values.index_select(0, slots)
        return self._kernel.attend(query.contiguous(), keys, values, rows, scoring)

    def _gathered(self, tables: PageTables) -> tuple[Rows, torch.Tensor]:
        """The rows, and the slot of each of their keys in the flattened pages: `[tokens]`."""
        step, device, size = tables.step, tables.block_table.device, tables.page_size
        if self._block is None or self._block.device != device:
            self._block = StepBlock(device)
        seen = [tables.keys_of(row) for row in range(len(step.spans))]
        counts = [end - begin for begin, end in seen]
        total = sum(counts)
        both = self._block.put([counts, [begin for begin, _ in seen]])
        self._block.send()
        lengths, begins = both[0], both[1]
        cu_k = F.pad(lengths.cumsum(0), (1, 0))
        row = torch.repeat_interleave(lengths, output_size=total)
        at = torch.arange(total, device=device) - cu_k[row] + begins[row]
        slots = tables.block_table[row, at // size].long() * size + at % size
        rows = Rows(step.cu_seqlens_q, cu_k.to(torch.int32), step.max_seqlen_q, max(counts))
        return rows, slots


def _paged(tables: PageTables) -> tuple[Rows, None]:
    step = tables.step
    lengths = step.seq_lens - tables.first
    longest = max(s.kv_len - first for s, first in zip(step.spans, tables.firsts, strict=True))
    cu_k = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    rows = Rows(step.cu_seqlens_q, cu_k, step.max_seqlen_q, longest, tables.block_table, lengths)
    return rows, None


def _inexpressible(pattern: Callable[..., Any] | None, windows: Sequence[int | None]) -> str | None:
    """Why `pattern` is not just causality, with or without a window that a layer has.

    What a layer sees comes from its window, so anything else that a model puts into its mask
    (prefixes read in both directions, packed documents) would be lost without a word.
    """
    from transformers import masking_utils

    known = {masking_utils.causal_mask_function, None}
    window = None
    for part in _parts(pattern):
        if part in known:
            continue
        window = _window_of(part)
        if window is None:
            name = getattr(part, "__qualname__", repr(part)).partition(".")[0]
            return f"the model masks with {name!r}, which this attention cannot express"
    if window is not None and window not in windows:
        return f"the model masks with a window of {window}, which no layer's cache has"
    return None


def _parts(pattern: Callable[..., Any] | None) -> Sequence[Callable[..., Any] | None]:
    """What transformers' `and_masks` was made of, or the pattern by itself."""
    whole = _enclosed(pattern, "and_masks.<locals>.and_mask")
    return [pattern] if whole is None else [part for each in whole for part in _parts(each)]


def _window_of(pattern: Callable[..., Any] | None) -> int | None:
    window = _enclosed(pattern, "sliding_window_overlay.<locals>.inner_mask")
    return None if window is None else int(window)


def _enclosed(pattern: Callable[..., Any] | None, name: str) -> Any:
    """The one thing that an inner function of this name was made with, None for another one."""
    if getattr(pattern, "__qualname__", "") != name:
        return None
    cells: Any = getattr(pattern, "__closure__", None)
    return cells[0].cell_contents
