"""The padded layout: rows of one tensor, each with its own validity mask and logical positions.

Wraps any of transformers' `Cache` classes, so that a cache backend of this layout is a few lines.
Rows are aligned at the right, shorter ones are padded at the left, and all rows of a batch enter
together. A hole inside a row (a draft that was rejected while a neighbour kept its own) is masked
out. That is right for full-attention layers; sliding-window layers would drop live tokens, since
transformers counts their window in columns. Rows that join a batch that runs: `joining`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import torch

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
from jackfield.engine.batch_limits import UNLIMITED
from jackfield.engine.padded_rows import (
    aligned,
    columns_of,
    held_bytes_of,
    idle,
    made,
    still_new,
    take_off,
)
from jackfield.errors import CacheFullError

if TYPE_CHECKING:
    import transformers


class PaddedKVCache(KVCache):
    """Keys and values of a batch of rows in one transformers cache, made per batch.

    Where `bound.static_shapes`, no shape changes while a batch runs: rows that finished stay and
    are fed token 0, which they alone see. Where the model cannot have padding (`ragged`), and
    where an encoder reads prompts, only rows that are equally long enter together. Drafts
    (`rollback`) leave holes where rows keep different numbers of them; with static shapes there is
    then room for these, and no drafts any more once that is used up.
    """

    def __init__(self, bound: PaddedCache, context: BindContext) -> None:
        self._make = bound.make
        self._block = StepBlock(context.device)
        self._max_cache_len = bound.max_cache_len
        self._static = bound.static_shapes
        self._plain_tensors = bound.plain_tensors
        self._encodes = context.requirements.encoder is not None
        self._equal_lengths = self._encodes or context.requirements.ragged is not None
        self._drafts = context.requirements.rollback
        self._forget()

    def _forget(self) -> None:
        self._joining: list[Sequence] = []  # admitted; become the rows with the next step
        self._size = (0, 0)  # of those: the longest, the most that one can still get
        self._rows: list[Sequence | None] = []  # None: a row that idles
        self._past: transformers.Cache | None = None
        self._mask: torch.Tensor | None = None  # [rows, columns], None while every column is valid
        self._columns = 0  # written so far
        self._places: dict[int, list[list[int]]] = {}  # a row's tokens: columns from, how many
        self._capacity: int | None = None  # how many there can be, where shapes are static

    def admit(self, sequence: Sequence) -> bool:
        if self._rows:
            return False
        longest, new = self._size if self._joining else (0, 0)
        if self._equal_lengths and self._joining and len(sequence.tokens) != longest:
            return False
        size = (max(longest, len(sequence.tokens)), max(new, still_new(sequence)))
        too_long = self._max_cache_len is not None and sum(size) - 1 > self._max_cache_len
        if too_long and self._joining:  # by itself it is let in, and fails in `prepare`, by name
            return False
        self._joining.append(sequence)
        self._size = size
        return True

    def refuse(self, prompt_length: int, max_new_tokens: int, copies: int = 1) -> str | None:
        del copies  # are rows of their own
        needed = prompt_length + max_new_tokens - 1
        if self._max_cache_len is None or needed <= self._max_cache_len:
            return None
        return (
            f"{prompt_length} prompt tokens and up to {max_new_tokens} new ones need {needed} "
            f"places, and it holds {self._max_cache_len}; lower max_new_tokens, or give it "
            f"'max_cache_len={needed}'"
        )

    def adjust_schedule(self, sequences: Seq[Sequence], wanted: list[int]) -> list[int]:
        """Columns of the block, so that a chunk leaves no hole: a shorter row waits at its left."""
        left = [len(sequence.tokens) - sequence.num_cached for sequence in sequences]
        later = max(left) - max(wanted)
        return [max(0, count - later) for count in left]

    def fits(self, step: Step) -> bool:
        """Whether every row has room for all that it can still get, whatever is kept of drafts."""
        drafts = any(item.drafts for item in step.scheduled)
        if self._capacity is None or not drafts or len(self._rows) - self._rows.count(None) == 1:
            return True
        width = max(item.num_tokens + len(item.drafts) for item in step.scheduled)
        left = max(still_new(item.sequence) for item in step.scheduled) - 1  # each gains a token
        return self._columns + width + left <= self._capacity

    def prepare(self, step: Step) -> ModelInputs:
        if not self._rows:
            self._begin([item.sequence for item in step.scheduled])
        width = max(item.num_tokens + len(item.drafts) for item in step.scheduled)
        scheduled = {id(item.sequence): item for item in step.scheduled}
        rows = [
            idle(width) if row is None else aligned(scheduled[id(row)], width) for row in self._rows
        ]
        ids, positions, valid = zip(*rows, strict=True)
        whole = all(all(marks) for marks in valid)
        put = self._block.put
        marks = None if whole else put(valid)
        busy = [i for i, row in enumerate(self._rows) if row is not None]
        feeding = put(busy) if len(busy) < len(rows) else None
        input_ids, position_ids = put(ids), put(positions)
        self._block.send()
        for item in step.scheduled:
            self._place(item, self._columns + width)
        self._mark(marks, width)
        kwargs: dict[str, Any] = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "attention_mask": self._mask,
            "past_key_values": self._past,
            "use_cache": True,
            "logits_to_keep": 1 + max(len(item.drafts) for item in step.scheduled),
        }
        return ModelInputs(kwargs, len(rows), feeding, step.decode)

    def _place(self, item: ScheduledSequence, end: int) -> None:
        """Note in which columns the tokens of a row lie, so that nobody has to read the mask."""
        count = item.num_tokens + len(item.drafts)
        runs = self._places.setdefault(item.sequence.id, [])
        if runs and sum(runs[-1]) == end - count:
            runs[-1][1] += count
        elif count:
            runs.append([end - count, count])

    def held_bytes(self) -> int | None:
        """None where layers keep something else: linear ones a state, quantized ones codes."""
        if not self._plain_tensors:
            return None
        return held_bytes_of(self._past)

    def _begin(self, sequences: list[Sequence]) -> None:
        needed = columns_of(sequences)
        if self._static:
            holes = max(map(still_new, sequences)) if self._drafts else 0
            self._capacity = max(needed, min(needed + holes, self._max_cache_len or UNLIMITED))
        if self._max_cache_len is not None and needed > self._max_cache_len:
            raise CacheFullError(
                f"a batch that needs {needed} columns does not fit a cache of "
                f"{self._max_cache_len}; give it 'max_cache_len={needed}'"
            )
        self._past = made(self._make, self._capacity or needed, encodes=self._encodes)
        self._rows, self._joining = list(sequences), []

    def _mark(self, valid: torch.Tensor | None, width: int) -> None:
        """Note which rows are valid (`[rows, width]`, None: all) in the next `width` columns."""
        start, self._columns = self._columns, self._columns + width
        if self._mask is None and valid is None:
            return
        mask = self._masked(start)
        if valid is None:
            valid = mask.new_ones(len(mask), width)
        self._mask = torch.cat([mask, valid], 1)

    def _masked(self, columns: int) -> torch.Tensor:
        """The mask; where there is none yet, one of `columns` valid columns."""
        if self._mask is None:
            size = (len(self._rows), columns)
            self._mask = torch.ones(size, dtype=torch.long, device=self._block.device)
        return self._mask

    def commit(self, step: Step, kept: Seq[int]) -> None:
        rejected = {}
        for item, count in zip(step.scheduled, kept, strict=True):
            item.sequence.num_cached = item.start + count
            rejected[id(item.sequence)] = gone = item.num_tokens + len(item.drafts) - count
            take_off(self._places[item.sequence.id], gone)
        if any(rejected.values()):
            self._take_back(rejected)

    def _take_back(self, rejected: dict[int, int]) -> None:
        """Drop the last columns, as far as no row keeps any; what a row rejects beyond is a hole.

        `rejected` is how many of its last columns the row of a sequence, by its id, does not keep.
        A row that idles keeps what the others do.
        """
        gone = min(rejected.values())
        self._crop_to(self._columns - gone)
        if max(rejected.values()) > gone:
            mask = self._masked(self._columns)
            for row, sequence in enumerate(self._rows):
                count = gone if sequence is None else rejected[id(sequence)]
                mask[row, self._columns - (count - gone) :] = 0

    def truncate(self, sequence: Sequence, tokens: int) -> None:
        """What is taken back is a hole, until no row has anything in its columns."""
        row = next(i for i, other in enumerate(self._rows) if other is sequence)
        mask = self._masked(self._columns)
        mask[row] *= mask[row].cumsum(0) <= tokens
        take_off(self._places[sequence.id], sequence.num_cached - tokens)
        sequence.num_cached = tokens
        live = [self._places[other.id] for other in self._rows if other is not None]
        self._crop_to(max((sum(runs[-1]) for runs in live if runs), default=0))

    def _crop_to(self, columns: int) -> None:
        assert self._past is not None
        if gone := self._columns - columns:
            self._past.crop(-gone)
            self._columns -= gone
            self._mask = None if self._mask is None else self._mask[:, : self._columns]

    def fork(self, copies: Seq[tuple[Sequence, Sequence]], dropped: Seq[Sequence]) -> None:
        gone = {id(sequence) for sequence in dropped}
        at = {id(row): i for i, row in enumerate(self._rows) if row is not None}
        stay = [i for i, row in enumerate(self._rows) if id(row) not in gone]
        self._rows = [self._rows[i] for i in stay] + [into for _, into in copies]
        for source, into in copies:
            into.num_cached = source.num_cached
            self._places[into.id] = [list(run) for run in self._places[source.id]]
        self._take_rows([*stay, *(at[id(source)] for source, _ in copies)])

    def _take_rows(self, rows: list[int]) -> None:
        """The rows become those with these numbers; a row may be taken several times."""
        assert self._past is not None
        index = self._block.put(rows)
        self._block.send()
        # Unlike `batch_select_indices`, this knows offloaded, quantized and linear layers.
        self._past.reorder_cache(index)  # type: ignore[arg-type]  # names a subclass
        self._mask = None if self._mask is None else self._mask.index_select(0, index)
        whole = [[0, self._columns]]
        if all(row is not None and self._places[row.id] == whole for row in self._rows):
            self._mask = None  # what is left has no padding

    def release(self, sequences: Seq[Sequence]) -> None:
        gone = {id(sequence) for sequence in sequences}
        self._joining = [sequence for sequence in self._joining if id(sequence) not in gone]
        if not self._rows:
            return
        stay = [i for i, row in enumerate(self._rows) if row is not None and id(row) not in gone]
        if not stay or self._past is None:
            self._forget()
        elif self._static:
            self._rows = [row if i in stay else None for i, row in enumerate(self._rows)]
        elif len(stay) < len(self._rows):
            self._rows = [self._rows[i] for i in stay]
            self._take_rows(stay)
