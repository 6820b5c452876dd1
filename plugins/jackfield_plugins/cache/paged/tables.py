"""Which pages a sequence holds, and the tables of a step, of which little changes in the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from jackfield.contracts import StepBlock


class Row(NamedTuple):
    """The pages of one sequence as they are in a step; the first holds token `first`."""

    pages: tuple[int, ...]
    first: int
    in_a_row: bool


class Table:
    """The pages of one sequence in one group; the first holds token `first`."""

    def __init__(self, pages: Seq[int] = (), first: int = 0) -> None:
        self.pages = list(pages)
        self.first = first
        self._row: Row | None = None

    def append(self, page: int) -> None:
        self.pages.append(page)
        self._row = None

    def replace(self, at: int, page: int) -> None:
        self.pages[at] = page
        self._row = None

    def cut(self, count: int) -> list[int]:
        """Keep the first `count` pages; returns the others."""
        gone = self.pages[count:]
        if gone:
            del self.pages[count:]
            self._row = None
        return gone

    def advance(self, count: int, tokens: int) -> list[int]:
        """Let go of the first `count` pages, which hold `tokens` tokens; returns them."""
        gone = self.pages[:count]
        if count:
            del self.pages[:count]
            self.first += tokens
            self._row = None
        return gone

    def row(self) -> Row:
        """The table as it is now: the same object until it changes."""
        if self._row is None:
            pages = tuple(self.pages)
            run = range(pages[0], pages[0] + len(pages))
            in_a_row = pages[-1] == run[-1] and pages == tuple(run)
            self._row = Row(pages, self.first, in_a_row)
        return self._row


class CachedTensor:
    """A small int32 tensor that is made anew only where its numbers are not those of last time.

    While all sequences decode, most of a step's tables are the ones of the step before.
    """

    def __init__(self) -> None:
        self._numbers: list[Any] | None = None

    def __call__(self, numbers: list[Any], block: StepBlock) -> torch.Tensor:
        if numbers != self._numbers:
            self._tensor = block.put(numbers, torch.int32)
            self._numbers = numbers
        return self._tensor


class CachedTable:
    """The pages of a step's sequences, int32 `[sequences, pages of the longest]`, padded with 0.

    It stays on the host between steps. Only rows that are not those of last time are written, and
    only where there are such is it sent.
    """

    def __init__(self) -> None:
        self._numbers = torch.zeros(0, 0, dtype=torch.int32)
        self._rows: list[Row] = []
        self._tensor = self._numbers
        self.written = 0  # rows, since it was made

    def __call__(self, rows: list[Row], block: StepBlock) -> torch.Tensor:
        changed = [
            at for at, row in enumerate(rows) if at >= len(self._rows) or row is not self._rows[at]
        ]
        if not changed and len(rows) == len(self._rows):
            return self._tensor
        width = max(len(row.pages) for row in rows)
        if len(rows) > self._numbers.shape[0] or width > self._numbers.shape[1]:
            self._numbers = torch.zeros(2 * len(rows), 2 * width, dtype=torch.int32)
            changed = list(range(len(rows)))
        self._rows = []  # until they are sent: what fails is written again
        for at in changed:
            pages = rows[at].pages
            self._numbers[at, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            self._numbers[at, len(pages) :] = 0
        self.written += len(changed)
        # A copy: what was handed out is changed by nobody, and on a CPU `put` hands out what it is
        # given.
        self._tensor = block.put(self._numbers[: len(rows), :width].clone())
        self._rows = rows
        return self._tensor
