"""The choice: one token for each row, the best one or a drawn one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jackfield.contracts import StepBlock
from jackfield.sampling.draw import draw, random_numbers
from jackfield.sampling.rows import RowMap
from jackfield.sampling.stage import indexes
from jackfield.sampling.token_mask import TokenMask
from jackfield.sampling.warpers import Warpers

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class SampledRows:
    """The rows that draw: `asked`, as `rows` has them on the device (None: every row draws)."""

    asked: tuple[int, ...]
    rows: torch.Tensor | None
    warpers: Warpers

    @classmethod
    def of(cls, rows: RowMap, block: StepBlock, vocab_size: int) -> SampledRows | None:
        asked = rows.asking(lambda s: s.do_sample)
        if not asked:
            return None
        warpers = Warpers.of(rows.pick(asked), block, vocab_size)
        return cls(tuple(asked), indexes(asked, len(rows), block), warpers)

    def pick(self, scores: torch.Tensor) -> torch.Tensor:
        """Their rows of `scores`: a copy, or the tensor itself where every row draws."""
        return scores if self.rows is None else scores.index_select(0, self.rows)

    def put(self, into: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """`into` with `values` in these rows; changed in place, or `values` if every row draws."""
        return values if self.rows is None else into.index_copy_(0, self.rows, values)


@dataclass(frozen=True, eq=False)
class Choosing:
    """How a token is chosen of processed scores. `numbers` are the random ones of `sampled`."""

    sampled: SampledRows | None
    numbers: torch.Tensor | None
    mask: TokenMask | None = None

    @classmethod
    def of(cls, rows: RowMap, sampled: SampledRows | None, block: StepBlock) -> Choosing:
        numbers = None if sampled is None else random_numbers(rows.pick(sampled.asked), block)
        return cls(sampled, numbers)

    def __call__(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, int64 `[rows]`, and the best score of each row, NaN if any score of it is.

        `scores` `[rows, vocab]` may be changed.
        """
        if self.mask is not None:
            scores = self.mask(scores)
        best, tokens = scores.max(-1)
        if self.sampled is not None and self.numbers is not None:
            drawn = draw(self.sampled.warpers(self.sampled.pick(scores)), self.numbers)
            tokens = self.sampled.put(tokens, drawn)
        return tokens, best
