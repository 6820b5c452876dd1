"""Minimum length: no token ends a text that is too short."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from jackfield.contracts import StepBlock
from jackfield.sampling.rows import RowMap
from jackfield.sampling.stage import NEVER, places

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class MinLength:
    """The places of what would end a text too early: rows and tokens, int64 `[n]` each."""

    rows: torch.Tensor
    tokens: torch.Tensor
    in_place: ClassVar[bool] = True

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """Sets these of `scores` `[rows, vocab]` to -inf in place, and returns it."""
        return scores.index_put_((self.rows, self.tokens), scores.new_full((), NEVER))


def stage(rows: RowMap, asked: Seq[int], block: StepBlock) -> MinLength | None:
    """For those of the rows `asked` that are too short; None: none is."""
    pairs = []
    for row in asked:
        sequence = rows.sequences[rows.owners[row]]
        settings = sequence.settings
        if sequence.num_new + rows.depths[row] < settings.min_new_tokens:
            pairs += [(row, token) for token in settings.eos_token_ids]
    return MinLength(*places(pairs, block)) if pairs else None
