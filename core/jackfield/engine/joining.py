"""The padded layout of encoder-decoder models: requests join those that run.

What a decoder's text begins with is read in a step of its own, by those that have come meanwhile.
Then they become rows of the batch that runs: each row is aligned at the right, without holes, and
who has fewer columns is padded at the left. A step reads newcomers, or decodes all others; of two
steps in a row one decodes, so that nobody waits for ever. Columns that no row uses are dropped with
the row that did, so a batch that never ends has as many as its longest row.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch

from jackfield.bridge.joined_rows import join, take
from jackfield.contracts import (
    BindContext,
    KVCache,
    ModelInputs,
    PaddedCache,
    ScheduledSequence,
    Sequence,
    Step,
    StepBlock,
)
from jackfield.engine.padded_rows import aligned, columns_of, held_bytes_of, made


class _Rows:
    """Sequences that are the rows of one cache of transformers, in this order."""

    def __init__(self, past: Any, sequences: list[Sequence], block: StepBlock) -> None:
        self.past, self.sequences, self._block = past, sequences, block
        self._columns = 0  # of the longest row, with those of the step

    @property
    def read(self) -> bool:
        """Whether all have been read whole."""
        return all(row.num_cached == len(row.tokens) for row in self.sequences)

    def prepare(self, step: Step) -> ModelInputs:
        """Lay out the next tokens of all rows. They get the order of `step`."""
        self._arrange([item.sequence for item in step.scheduled])
        width = max(item.num_tokens for item in step.scheduled)
        lengths = [item.start + item.num_tokens for item in step.scheduled]
        self._columns = self._cached + width
        put = self._block.put
        ids, positions, _ = zip(*(aligned(item, width) for item in step.scheduled), strict=True)
        whole = min(lengths) == self._columns
        gaps = None if whole else put([[self._columns - length] for length in lengths])
        kwargs: dict[str, Any] = {
            "input_ids": put(ids),
            "position_ids": put(positions),
            "attention_mask": None,
            "past_key_values": self.past,
            "use_cache": True,
            "logits_to_keep": 1,
        }
        self._block.send()
        if gaps is not None:
            columns = torch.arange(self._columns, device=gaps.device)
            kwargs["attention_mask"] = (columns >= gaps).long()
        return ModelInputs(kwargs, len(lengths), None, step.decode)

    @property
    def _cached(self) -> int:
        """How many columns the longest row has."""
        return max(row.num_cached for row in self.sequences)

    def _arrange(self, order: list[Sequence]) -> None:
        """The order of the loop: newcomers who waited a step may stand before a copy of a beam."""
        if any(row is not wanted for row, wanted in zip(self.sequences, order, strict=True)):
            self.become(order, order)

    def become(self, sources: Seq[Sequence], sequences: Seq[Sequence]) -> None:
        """The rows become `sequences`, with what is cached of these `sources`, one each."""
        at = {id(row): number for number, row in enumerate(self.sequences)}
        numbers = [at[id(source)] for source in sources]
        self.sequences = list(sequences)
        if self._columns:
            index = self._block.put(numbers)
            self._block.send()
            take(self.past, index, self._cached)

    def drop(self, gone: set[int]) -> None:
        """Forget the sequences with these ids of objects; some are left."""
        stay = [row for row in self.sequences if id(row) not in gone]
        if len(stay) < len(self.sequences):
            self.become(stay, stay)


class JoiningKVCache(KVCache):
    """Keys and values of the rows that run, and of those that have come and are being read."""

    continuous = True

    def __init__(self, bound: PaddedCache, context: BindContext) -> None:
        self._make = bound.make
        self._block = StepBlock(context.device)
        self.close()

    def close(self) -> None:
        self._waiting: list[Sequence] = []  # admitted, nothing is read of them
        self._new: _Rows | None = None  # those being read
        self._running: _Rows | None = None  # read whole: a token a step
        self._has_read = False  # the last step was one of newcomers

    def admit(self, sequence: Sequence) -> bool:
        self._waiting.append(sequence)
        return True

    def adjust_schedule(self, sequences: Seq[Sequence], wanted: list[int]) -> list[int]:
        """Who has come reads, or who runs decodes; 0 for the others."""
        most = max(wanted)
        turn = {id(sequence) for sequence in self._turn(most)}
        return [
            min(most, len(sequence.tokens) - sequence.num_cached) if id(sequence) in turn else 0
            for sequence in sequences
        ]

    def _turn(self, most: int) -> list[Sequence]:
        """Whose step is next, if none feeds more than `most` tokens of a row."""
        coming = self._waiting if self._new is None else self._new.sequences
        if self._running is not None and (self._has_read or not coming):
            return self._running.sequences
        if self._new is not None or max(len(row.tokens) for row in coming) <= most:
            return coming
        # Read in pieces: rows of one length leave no hole.
        return [row for row in coming if len(row.tokens) == len(coming[0].tokens)]

    def prepare(self, step: Step) -> ModelInputs:
        rows = self._rows_of(step.scheduled)
        self._has_read = rows is self._new
        return rows.prepare(step)

    def _rows_of(self, scheduled: Seq[ScheduledSequence]) -> _Rows:
        """The rows that are scheduled; newcomers become some."""
        new = [item.sequence for item in scheduled]
        for rows in (self._new, self._running):
            if rows is not None and new[0] in rows.sequences:
                return rows
        coming = {id(sequence) for sequence in new}
        self._waiting = [row for row in self._waiting if id(row) not in coming]
        self._new = _Rows(made(self._make, columns_of(new), encodes=True), new, self._block)
        return self._new

    def commit(self, step: Step, kept: Seq[int]) -> None:
        for item, count in zip(step.scheduled, kept, strict=True):
            item.sequence.num_cached = item.start + count
        if self._new is None or not self._new.read:
            return
        new, self._new = self._new, None
        if self._running is None:
            self._running = new
        else:
            join(self._running.past, new.past)
            self._running.sequences += new.sequences

    def fork(self, copies: Seq[tuple[Sequence, Sequence]], dropped: Seq[Sequence]) -> None:
        assert self._running is not None
        gone = {id(sequence) for sequence in dropped}
        stay = [row for row in self._running.sequences if id(row) not in gone]
        for source, into in copies:
            into.num_cached = source.num_cached
        sources = [*stay, *(source for source, _ in copies)]
        self._running.become(sources, [*stay, *(into for _, into in copies)])

    def release(self, sequences: Seq[Sequence]) -> None:
        gone = {id(sequence) for sequence in sequences}
        self._waiting = [row for row in self._waiting if id(row) not in gone]
        self._new = _without(self._new, gone)
        self._running = _without(self._running, gone)

    def held_bytes(self) -> int | None:
        pasts = [rows.past for rows in (self._running, self._new) if rows is not None]
        parts = [held_bytes_of(past) for past in pasts]
        return None if None in parts else sum(filter(None, parts))


def _without(rows: _Rows | None, gone: set[int]) -> _Rows | None:
    """`rows` without the sequences with these ids of objects; None: nobody is left."""
    if rows is None or all(id(row) in gone for row in rows.sequences):
        return None
    rows.drop(gone)
    return rows
