"""Penalties on tokens that a text has already.

Repetition: Keskar et al. 2019 (CTRL, arXiv:1909.05858), of prompt and new tokens, as transformers
does it. Frequency and presence: the OpenAI API's, of new tokens only.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from jackfield.contracts import Sequence, Settings, StepBlock
from jackfield.sampling.histories import Histories
from jackfield.sampling.rows import RowMap
from jackfield.sampling.stage import ScoreStage, Stage, indexes, places
from jackfield.sampling.token_table import TokenTable


def penalize_repetition(
    scores: torch.Tensor, penalties: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """`scores` `[n, vocab]` with those of tokens in `seen` made worse by `[n, 1]` > 0.

    `seen`: bool, or numbers above 0.
    """
    scaled = torch.where(scores < 0, scores * penalties, scores / penalties)
    return torch.where(seen > 0, scaled, scores)


def penalize_counts(
    scores: torch.Tensor, frequency: torch.Tensor, presence: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """`scores` less `frequency` for each time in `counts`, and less `presence` if there is one.

    `scores` and `counts` are `[n, vocab]`, the penalties `[n, 1]`.
    """
    return scores - counts * frequency - (counts > 0) * presence


@dataclass(frozen=True, eq=False)
class Penalty:
    """The rows that ask for a penalty, and where in a table the tokens of each are.

    `asked`: their numbers, as `rows` has them on the device (None: every row asks). `sequences`:
    the owners, a row of the table each. `table_rows`: int64 `[n]`, of each row that asks (None: one
    each). `values`: `[n, 1]` each.
    """

    act: Callable[..., torch.Tensor]
    values: tuple[torch.Tensor, ...]
    asked: tuple[int, ...]
    rows: torch.Tensor | None
    sequences: tuple[Sequence, ...]
    table_rows: torch.Tensor | None

    def stage(self, rows: RowMap, kept: TokenTable | Histories, block: StepBlock) -> ScoreStage:
        """For the tokens that the sequences have by now, and the drafts before each row."""
        if isinstance(kept, Histories):
            known = {id(h.sequence): h for h in kept.of(self.sequences)}
            owners = [rows.sequences[rows.owners[row]] for row in self.asked]
            had = [
                known[id(owner)].of(rows.before(row))
                for row, owner in zip(self.asked, owners, strict=True)
            ]
            return OfTheirTokens(self.act, self.values, self.asked, tuple(had))
        table = kept.of(self.sequences)
        pairs = [(k, token) for k, row in enumerate(self.asked) for token in rows.before(row)]
        behind = places(pairs, block) if pairs else None
        history = partial(with_drafts, table, self.table_rows, behind)
        return Stage(partial(_after, self.act, history), self.values, self.rows)


@dataclass(frozen=True, eq=False)
class OfTheirTokens:
    """`act` for the scores of the tokens that each of the rows `asked` has, and no others.

    `had`: of each of these rows the token ids, and how often it has them, `[n]` both.
    """

    act: Callable[..., torch.Tensor]
    values: tuple[torch.Tensor, ...]
    asked: tuple[int, ...]
    had: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    in_place: ClassVar[bool] = True

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """Changes `scores` `[rows, vocab]` in place, and returns it."""
        for k, (row, (ids, counts)) in enumerate(zip(self.asked, self.had, strict=True)):
            own, values = scores[row], [column[k] for column in self.values]
            own.index_copy_(0, ids, self.act(own.index_select(0, ids), *values, counts))
        return scores


def _after(
    act: Callable[..., torch.Tensor],
    history: Callable[[], torch.Tensor],
    scores: torch.Tensor,
    *values: torch.Tensor,
) -> torch.Tensor:
    return act(scores, *values, history())


def with_drafts(
    table: torch.Tensor,
    table_rows: torch.Tensor | None,
    behind: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Rows of `table` `[sequences, vocab]` with the tokens at `behind` (rows, tokens) added."""
    found = table if table_rows is None else table.index_select(0, table_rows)
    if behind is None:
        return found
    return found.index_put(behind, found.new_ones(()), accumulate=found.dtype != torch.bool)


def _penalty(
    rows: RowMap,
    asked: Seq[int],
    block: StepBlock,
    act: Callable[..., torch.Tensor],
    *fields: Callable[[Settings], float],
) -> Penalty:
    owners = [rows.owners[row] for row in asked]
    own = {i: number for number, i in enumerate(dict.fromkeys(owners))}
    settings = [rows.sequences[i].settings for i in owners]
    return Penalty(
        act,
        tuple(block.put([[field(s)] for s in settings], torch.float32) for field in fields),
        tuple(asked),
        indexes(asked, len(rows), block),
        tuple(rows.sequences[i] for i in own),
        None if len(own) == len(owners) else block.put([own[i] for i in owners], torch.long),
    )


def repetition(rows: RowMap, asked: Seq[int], block: StepBlock) -> Penalty:
    """The repetition penalty of the rows `asked`."""
    return _penalty(rows, asked, block, penalize_repetition, lambda s: s.repetition_penalty)


def counted(rows: RowMap, asked: Seq[int], block: StepBlock) -> Penalty:
    """Frequency and presence penalties of the rows `asked`."""
    return _penalty(
        rows, asked, block, penalize_counts,
        lambda s: s.frequency_penalty, lambda s: s.presence_penalty,
    )  # fmt: skip
