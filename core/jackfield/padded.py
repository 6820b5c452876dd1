"""The padded layout: rows of one tensor, each with its own validity mask and logical positions.

Wraps any of transformers' `Cache` classes, so that a cache backend of this layout is a few lines.
Rows are aligned at the right, shorter ones are padded at the left, and all rows of a batch enter
together: a hole inside a row would make sliding-window layers drop live tokens, since transformers
drops by column.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import torch

from jackfield.contracts import KVCache, ModelInputs
from jackfield.sequences import Sequence, Step

if TYPE_CHECKING:
    import transformers


class PaddedKVCache(KVCache):
    """Keys and values of a batch of rows in one transformers cache, made by `make` per batch."""

    def __init__(self, make: Callable[[], transformers.Cache], device: torch.device) -> None:
        self._make = make
        self._device = device
        self._rows: list[Sequence] = []
        self._past: transformers.Cache | None = None
        self._mask: torch.Tensor | None = None  # [rows, columns], None while nothing is padded

    def room(self) -> int | None:
        return 0 if self._rows else None

    def prepare(self, step: Step) -> ModelInputs:
        if not self._rows:
            self._rows = [feed.sequence for feed in step.feeds]
            self._past = self._make()
        width = max(feed.count + len(feed.drafts) for feed in step.feeds)
        ids, positions, valid = [], [], []
        padded = False
        for feed in step.feeds:
            tokens = feed.token_ids
            gap = width - len(tokens)
            padded = padded or gap > 0
            ids.append([0] * gap + tokens)
            positions.append([0] * gap + list(range(feed.start, feed.start + len(tokens))))
            valid.append([0] * gap + [1] * len(tokens))
        self._grow_mask(valid, width, padded)
        kwargs: dict[str, Any] = {
            "input_ids": torch.tensor(ids, device=self._device),
            "position_ids": torch.tensor(positions, device=self._device),
            "attention_mask": self._mask,
            "past_key_values": self._past,
            "use_cache": True,
            "logits_to_keep": 1 + max(len(feed.drafts) for feed in step.feeds),
        }
        return ModelInputs(kwargs, rows=len(step.feeds))

    def _grow_mask(self, valid: list[list[int]], width: int, padded: bool) -> None:
        if self._mask is None and not padded:
            return
        if self._mask is None:
            columns = self._past.get_seq_length() if self._past is not None else 0
            self._mask = torch.ones(len(valid), columns, dtype=torch.long, device=self._device)
        new = (
            torch.tensor(valid, device=self._device)
            if padded
            else self._mask.new_ones(len(valid), width)
        )
        self._mask = torch.cat([self._mask, new], 1)

    def commit(self, step: Step, kept: Seq[int]) -> None:
        for feed, count in zip(step.feeds, kept, strict=True):
            feed.sequence.num_cached = feed.start + count

    def release(self, sequences: Seq[Sequence]) -> None:
        gone = {id(sequence) for sequence in sequences}
        stay = [i for i, row in enumerate(self._rows) if id(row) not in gone]
        if len(stay) == len(self._rows):
            return
        self._rows = [self._rows[i] for i in stay]
        if not stay or self._past is None:
            self._past = self._mask = None
            return
        index = torch.tensor(stay, device=self._device)
        self._past.batch_select_indices(index)
        if self._mask is not None:
            self._mask = self._mask.index_select(0, index)
