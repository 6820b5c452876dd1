"""Decode steps that lie at the same addresses each time, so that they can be recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from jackfield.contracts import FixedStep, ModelInputs, PackedStep, PageTables, Span, StepBlock

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from jackfield.contracts import Step
    from jackfield_plugins.cache.paged.groups import LayerGroup

#: Longer sequences are in no fixed step: room in its tables costs 4 bytes a page and row.
MOST_TOKENS = 1 << 20


class Rows(NamedTuple):
    """A step of single queries, a number for each of its rows."""

    sequences: list[int]
    ids: list[int]
    positions: list[int]

    @classmethod
    def of(cls, step: Step) -> Rows:
        scheduled = step.scheduled
        ids = [token for item in scheduled for token in item.token_ids]
        return cls(
            [item.sequence.id for item in scheduled], ids, [item.start for item in scheduled]
        )


class FixedPlace:
    """Where decode steps of up to `rows` sequences lie.

    What changes with each step is one piece of memory, which one copy fills: ids, positions, the
    slots of new tokens, how many there are, and where windows begin. Page tables are copied where
    they changed. Rows behind those of a step write to the spare page of each group and read it.
    """

    def __init__(self, rows: int, groups: Seq[LayerGroup], most: int, block: StepBlock) -> None:
        self.rows = rows
        self._groups = groups
        self._block = block
        # Windows let go of pages: what a pool holds bounds texts only where there is none.
        pools = [g.allocator.capacity * g.page_size for g in groups if g.window is None]
        self._most = most = min(most, MOST_TOKENS, *pools)
        wide, small = 8 * (2 + len(groups)) * rows, 4 * (1 + len(groups)) * rows
        self._memory = torch.zeros(wide + small + 64, dtype=torch.uint8, device=block.device)
        self._wide, (seq_lens, *firsts) = self._numbers([], [])
        step = PackedStep(
            [Span(row, 1, most) for row in range(rows)],
            torch.arange(rows + 1, dtype=torch.int32, device=block.device),
            seq_lens,
            max_seqlen_q=1,
            max_seqlen_k=most,
        )
        self._tables = [
            _Table(group, group.most_pages(most), first, step, block)
            for group, first in zip(groups, firsts, strict=True)
        ]
        ids, positions = self._wide[:1], self._wide[1:2]
        self.step = FixedStep(ids, positions, [table.now for table in self._tables])

    def holds(self, rows: Rows) -> bool:
        """Whether there is room for these sequences, which have their pages."""
        return (
            len(rows.sequences) <= self.rows
            and max(rows.positions) < self._most
            and all(
                len(group.tables[s].pages) <= table.width
                for group, table in zip(self._groups, self._tables, strict=True)
                for s in rows.sequences
            )
        )

    def prepare(self, rows: Rows) -> ModelInputs:
        """The inputs of a step that `holds`; what the layers read is set to it."""
        self._fill(rows)
        self.enter()
        count = len(rows.sequences)
        kwargs = {
            "input_ids": self.step.input_ids[:, :count],
            "position_ids": self.step.position_ids[:, :count],
            "use_cache": False,
            "logits_to_keep": count,
        }
        return ModelInputs(kwargs, rows=count, decode=True, fixed=self.step)

    def enter(self) -> None:
        """Have the layers write and read in this place."""
        for at, (group, table) in enumerate(zip(self._groups, self._tables, strict=True)):
            group.use(table.now, self._wide[2 + at])

    def _fill(self, rows: Rows) -> None:
        for group, table in zip(self._groups, self._tables, strict=True):
            table.fill([group.tables[s].pages for s in rows.sequences])
            table.now.firsts = [group.tables[s].first for s in rows.sequences]
        slots = [
            [group.slot(s, at) for s, at in zip(rows.sequences, rows.positions, strict=True)]
            for group in self._groups
        ]
        small = [[at + 1 for at in rows.positions], *(t.now.firsts for t in self._tables)]
        self._numbers([rows.ids, rows.positions, *slots], small)

    def _numbers(
        self, wide: Seq[Seq[int]], small: Seq[Seq[int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill the memory; int64 `[2 + groups, rows]` and int32 `[1 + groups, rows]`."""
        spare = [0, 0, *(group.spare_page * group.page_size for group in self._groups)]
        nobody = [1, *(0 for _ in self._groups)]
        self._block.into(self._memory)
        try:
            return (
                self._block.put(_filled(wide, spare, self.rows), torch.int64),
                self._block.put(_filled(small, nobody, self.rows), torch.int32),
            )
        finally:
            self._block.send()  # whatever failed: nothing else is to lie here


class _Table:
    """The page table of one group, on the device and on the host."""

    def __init__(
        self,
        group: LayerGroup,
        width: int,
        first: torch.Tensor,
        step: PackedStep,
        block: StepBlock,
    ) -> None:
        rows, self.width = len(step.spans), width
        self._block = block
        self._spare = group.spare_page
        self._host = torch.zeros(rows, self.width, dtype=torch.int32, device="cpu")
        self._kept: list[list[int]] = [[] for _ in range(rows)]
        table = torch.zeros(rows, self.width, dtype=torch.int32, device=block.device)
        self.now = PageTables(step, group.window, group.page_size, table, first, [], [])
        self.fill([])

    def fill(self, tables: list[list[int]]) -> None:
        """Have row i list the pages `tables[i]`; rows behind them, the spare page."""
        nobodys = [[self._spare]] * (len(self._kept) - len(tables))
        due = [*tables, *nobodys]
        changed = [row for row, pages in enumerate(due) if self._kept[row] != pages]
        for row in changed:
            pages = due[row]
            self._kept[row] = []  # until the device has them: what fails is sent again
            self._host[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32, device="cpu")
        if changed:
            width = max(len(due[row]) for row in changed)
            there = self._block.put(self._host[:, :width])
            self._block.send()
            self.now.block_table[:, :width].copy_(there)
        for row in changed:
            self._kept[row] = list(due[row])
        self.now.tables = self._kept[: len(tables)]


def _filled(numbers: Seq[Seq[int]], spare: Seq[int], rows: int) -> list[list[int]]:
    """`numbers`, each with as many of its `spare` behind it as make `rows`."""
    given = numbers or [[] for _ in spare]
    return [[*row, *[own] * (rows - len(row))] for row, own in zip(given, spare, strict=True)]
