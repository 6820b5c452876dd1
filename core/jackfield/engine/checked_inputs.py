"""Checks of a step that a cache has laid out: inputs of the model, spans, lengths, page tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from jackfield.errors import quoted

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from jackfield.contracts import ModelInputs, PackedStep, PageTables, ScheduledSequence, Step


def flaw_of_tokens(inputs: ModelInputs, step: Step, *, packed: bool) -> str:
    """What is wrong with ids, positions and chosen logits, in words; empty: nothing.

    `inputs` have the shapes that are due.
    """
    ids, positions = inputs.kwargs["input_ids"], inputs.kwargs.get("position_ids")
    at = None if positions is None else positions.reshape(-1, *ids.shape).tolist()
    if packed and inputs.row_of is None:
        flaw = _flaw_of_row(ids.reshape(-1).tolist(), at, step.scheduled)
        return flaw or _flaw_of_chosen(
            inputs.kwargs.get("logits_to_keep"), ids.numel(), step.scheduled
        )
    rows = range(inputs.rows) if inputs.row_of is None else inputs.row_of.tolist()
    lists = ids.tolist()
    for row, item in zip(rows, step.scheduled, strict=True):
        tokens = item.token_ids
        if not tokens:
            continue
        count = len(tokens)
        if lists[row][-count:] != tokens:
            return f"input_ids {quoted(lists[row])} in row {row}, which end with other tokens"
        due = list(range(item.start, item.start + count))
        for own in at or ():
            if own[row][-count:] != due:
                return f"position_ids {quoted(own[row])} in row {row}, whose last are {quoted(due)}"
    keep: Any = inputs.kwargs.get("logits_to_keep")
    most = 1 + max(len(item.drafts) for item in step.scheduled)
    if isinstance(keep, int) and 0 < keep < most:
        return f"logits_to_keep={keep} of {most} that are needed"
    return ""


def _flaw_of_row(ids: list[int], at: list[Any] | None, scheduled: Seq[ScheduledSequence]) -> str:
    """Of all tokens in one row."""
    due: list[int] = []
    places: list[int] = []
    for item in scheduled:
        tokens = item.token_ids
        due += tokens
        places += range(item.start, item.start + len(tokens))
    if ids != due:
        return f"input_ids {quoted(ids)}, {quoted(due)} due"
    for own in [list(range(len(ids)))] if at is None else [rows[0] for rows in at]:
        if own != places:
            return f"position_ids {quoted(own)}, {quoted(places)} due"
    return ""


def _flaw_of_chosen(keep: Any, tokens: int, scheduled: Seq[ScheduledSequence]) -> str:
    """Of `logits_to_keep`, which are as many of each sequence and end with its last token."""
    if isinstance(keep, torch.Tensor):
        chosen: Seq[int] = keep.tolist()
    elif type(keep) is int and keep >= 0:  # models take as many as there are
        chosen = range(max(0, tokens - keep) if keep else 0, tokens)
    else:
        return f"logits_to_keep={quoted(keep)} of {tokens} tokens"
    width, odd = divmod(len(chosen), len(scheduled))
    if odd or not width:
        return f"logits_to_keep of {len(chosen)} tokens for {len(scheduled)} sequences"
    end = 0
    for row, item in enumerate(scheduled):
        fed = item.num_tokens + len(item.drafts)
        end += fed
        needed = min(1 + len(item.drafts), fed) if item.samples else 0
        last = chosen[(row + 1) * width - min(needed, width) : (row + 1) * width]
        if needed > width or list(last) != list(range(end - needed, end)):
            return f"logits_to_keep {quoted(list(last))} for scheduled[{row}], which ends at {end}"
    return ""


def flaw_of_step(step: PackedStep, *, read: bool) -> str:
    """What is wrong with the lengths that kernels read, in words; `read`: also their numbers."""
    spans = step.spans
    longest, farthest = max(s.query_len for s in spans), max(s.kv_len for s in spans)
    if step.max_seqlen_q != longest or step.max_seqlen_k < farthest:
        most = (step.max_seqlen_q, step.max_seqlen_k)
        return f"(max_seqlen_q, max_seqlen_k) {quoted(most)}, {(longest, farthest)} due"
    starts = [*(s.query_start for s in spans), spans[-1].query_start + spans[-1].query_len]
    dues = (("cu_seqlens_q", starts), ("seq_lens", [s.kv_len for s in spans]))
    for name, due in dues:
        tensor: Any = getattr(step, name)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int32:
            return f"{name} {quoted(tensor)}, int32 due"
        if tensor.shape != (len(due),) or (read and tensor.tolist() != due):
            return f"{name} {quoted(tensor.tolist())}, {quoted(due)} due"
    return ""


def flaw_of_first(tables: PageTables, row: int) -> str:
    """What is wrong with the first token of a row's pages, in words."""
    first, span = tables.firsts[row], tables.step.spans[row]
    oldest = (
        0 if tables.window is None else max(0, span.kv_len - span.query_len + 1 - tables.window)
    )
    if type(first) is int and 0 <= first <= oldest and first % tables.page_size == 0:
        return ""
    return f"pages from token {quoted(first)} on, and its queries see {oldest}"


def flaw_of_fixed(
    tables: PageTables, scheduled: Seq[ScheduledSequence], number: int, *, read: bool
) -> str:
    """What is wrong with the pages of single queries at a fixed place; `number` are there."""
    if len(tables.tables) != len(scheduled) or len(tables.firsts) != len(scheduled):
        return f"pages of {len(tables.tables)} rows for {len(scheduled)} sequences"
    width = tables.block_table.shape[1]
    for row, (own, item) in enumerate(zip(tables.tables, scheduled, strict=True)):
        first, end = tables.firsts[row], item.start + 1
        oldest = 0 if tables.window is None else max(0, end - tables.window)
        if not own or not 0 <= own[0] < number or not 0 <= own[-1] < number:
            return f"page {quoted(own)} for scheduled[{row}], of {number}"
        if len(own) > width or first + len(own) * tables.page_size < end:
            return f"{len(own)} pages of {tables.page_size} in {width} columns for {end} tokens"
        if type(first) is not int or not 0 <= first <= oldest or first % tables.page_size:
            return f"pages from token {quoted(first)} on for scheduled[{row}], which sees {oldest}"
        if read and tables.block_table[row, : len(own)].tolist() != list(own):
            return f"other pages in block_table for scheduled[{row}], {quoted(list(own))} due"
    if read and tables.first[: len(scheduled)].tolist() != list(tables.firsts):
        return f"first {quoted(tables.first.tolist())}, {quoted(list(tables.firsts))} due"
    ends = [item.start + 1 for item in scheduled]
    if tables.step.max_seqlen_k < max(ends):
        return f"max_seqlen_k {quoted(tables.step.max_seqlen_k)}, {max(ends)} or more due"
    if read and tables.step.seq_lens[: len(scheduled)].tolist() != ends:
        return f"seq_lens {quoted(tables.step.seq_lens.tolist())}, {quoted(ends)} due"
    return ""


def flaw_of_tables(tables: PageTables, *, read: bool) -> str:
    """What is wrong with the tensors of page tables, in words; `read`: also their numbers."""
    rows = tables.tables
    longest = max(map(len, rows))
    for name, shape in (("block_table", (len(rows), longest)), ("first", (len(rows),))):
        tensor: Any = getattr(tables, name)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int32:
            return f"{name} {quoted(tensor)}, int32 due"
        wide = tensor.dim() == 2 and tensor.shape[0] == len(rows) and tensor.shape[1] >= longest
        if tuple(tensor.shape) != shape and not wide:
            return f"{name} {list(tensor.shape)}, {list(shape)} due"
    if not read:
        return ""
    if tables.first.tolist() != list(tables.firsts):
        return f"first {quoted(tables.first.tolist())}, {quoted(list(tables.firsts))} due"
    for row, (own, said) in enumerate(zip(rows, tables.block_table.tolist(), strict=True)):
        if said[: len(own)] != list(own) or any(said[len(own) :]):
            return f"block_table {quoted(said)} for scheduled[{row}], {quoted(list(own))} due"
        run = tables.runs[row]
        if run is not None and run != tables._run(row):
            return f"runs {quoted(run)} for scheduled[{row}], whose pages are {quoted(list(own))}"
    return ""
