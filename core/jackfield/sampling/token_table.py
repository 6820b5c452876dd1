"""Which tokens sequences have, as tensors that are kept while they grow."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from jackfield.contracts import Sequence, StepBlock


class TokenTable:
    """A row for each sequence, a column for each token of the vocabulary.

    bool: whether prompt or new tokens have it; float32: how often it was generated. Only what is
    new is read of the sequences of the last call, in whatever order they come.
    """

    def __init__(self, vocab_size: int, dtype: torch.dtype, block: StepBlock) -> None:
        self._block = block
        self._counts = dtype != torch.bool
        self._table = torch.zeros(0, vocab_size, dtype=dtype, device=block.device)
        self._sequences: list[Sequence] = []
        self._texts: list[list[int]] = []  # their tokens: a beam that becomes another has others
        self._read: list[int] = []  # how many tokens of each are in the table

    def of(self, sequences: Seq[Sequence]) -> torch.Tensor:
        """`[sequences, vocab]`, which the next call may change. Sends the block."""
        if not self._holds(sequences):
            self._arrange(sequences)
        new = [s.tokens[read:] for s, read in zip(sequences, self._read, strict=True)]
        if any(new):
            rows = [row for row, own in enumerate(new) for _ in own]
            at = self._block.put([rows, [token for own in new for token in own]], torch.long)
            self._block.send()
            self._table.index_put_((at[0], at[1]), self._table.new_ones(()), self._counts)
            self._read = [len(s.tokens) for s in sequences]
        return self._table

    def _holds(self, sequences: Seq[Sequence]) -> bool:
        """Whether these are the rows, and have only grown."""
        return len(sequences) == len(self._sequences) and all(
            s is own and s.tokens is text and len(text) >= read
            for s, own, text, read in zip(
                sequences, self._sequences, self._texts, self._read, strict=True
            )
        )

    def _arrange(self, sequences: Seq[Sequence]) -> None:
        """Have the rows of these, in their order; of new ones nothing is in the table yet."""
        known = {
            id(s): row
            for row, (s, text, read) in enumerate(
                zip(self._sequences, self._texts, self._read, strict=True)
            )
            if s.tokens is text and len(text) >= read
        }
        stay = [row for row, s in enumerate(sequences) if id(s) in known]
        before = [known[id(sequences[row])] for row in stay]
        start = [s.prompt_length if self._counts else 0 for s in sequences]
        for row, old in zip(stay, before, strict=True):
            start[row] = self._read[old]
        table = self._table.new_zeros(len(sequences), self._table.shape[1])
        if stay:
            here, there = self._block.put([stay, before], torch.long)
            self._block.send()
            table.index_copy_(0, here, self._table.index_select(0, there))
        self._table, self._sequences, self._read = table, list(sequences), start
        self._texts = [s.tokens for s in sequences]
