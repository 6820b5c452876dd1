"""The choice: one token for each row, the best one or a drawn one."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from jackfield.contracts import StepBlock
from jackfield.contracts.counter_rng import uniform, uniforms
from jackfield.sampling.drawing import draw
from jackfield.sampling.one_row import OneRow
from jackfield.sampling.rows import RowMap
from jackfield.sampling.stage import indexes, widest
from jackfield.sampling.token_mask import TokenMask
from jackfield.sampling.warpers import Warpers

#: Tokens of a vocabulary from which on a CPU draws row by row; fewer are sorted in no time.
WIDE = 4096

MANY = 16  # rows whose random numbers are faster made all at once


@dataclass(frozen=True, eq=False)
class SampledRows:
    """The rows that draw: `asked`, as `rows` has them on the device (None: every row draws).

    `each` has how they do it one by one; None: all at once.
    """

    asked: tuple[int, ...]
    rows: torch.Tensor | None
    warpers: Warpers
    each: tuple[OneRow, ...] | None

    @classmethod
    def of(cls, rows: RowMap, asked: Seq[int], block: StepBlock, vocab_size: int) -> SampledRows:
        warpers, each = Warpers.of(rows.pick(asked), block, vocab_size), None
        if block.device.type == "cpu" and vocab_size >= WIDE:
            owners = [rows.sequences[rows.owners[row]] for row in asked]
            each = tuple([OneRow.of(s.settings, vocab_size) for s in owners])
        return cls(tuple(asked), indexes(asked, len(rows), block), warpers, each)

    def draw(self, scores: torch.Tensor, best: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Their tokens, int64 `[asked]`, by random `numbers` `[asked, 1]`.

        `scores` `[rows, vocab]`, whose best are `best`, may be changed.
        """
        if self.each is None:
            return draw(self.warpers(self.pick(scores)), numbers)
        table, tops = scores.detach().numpy(), best.tolist()
        drawn = zip(self.asked, self.each, numbers[:, 0].tolist(), strict=True)
        return torch.tensor([one.draw(table[row], tops[row], x) for row, one, x in drawn])

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

    def shaped(self, scores: torch.Tensor, *, told: bool = False) -> torch.Tensor:
        """What the token of each row is chosen by, a new tensor of processed `scores`, both
        `[rows, vocab]`; `told`: as it goes to the caller (`Warpers.told`).
        """
        scores = scores.clone() if self.mask is None else self.mask(scores.clone())
        if self.sampled is None:
            return scores
        warpers = self.sampled.warpers
        shape = warpers.told if told else warpers
        return self.sampled.put(scores, shape(self.sampled.pick(scores)))

    def among(self, shaped: torch.Tensor) -> torch.Tensor:
        """Tokens, int64 `[rows]`, by scores that `shaped` returned, `[rows, vocab]`."""
        tokens, _ = best_of(shaped)
        if self.sampled is None or self.numbers is None:
            return tokens
        return self.sampled.put(tokens, draw(self.sampled.pick(shaped), self.numbers))

    def __call__(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, int64 `[rows]`, and the best score of each row, NaN if any score of it is.

        `scores` `[rows, vocab]` may be changed.
        """
        if self.mask is not None:
            scores = self.mask(scores)
        tokens, best = best_of(scores)
        if self.sampled is not None and self.numbers is not None:
            drawn = self.sampled.draw(scores, best, self.numbers)
            tokens = self.sampled.put(tokens, drawn)
        return tokens, best


def best_of(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first best token of each row of `scores` `[rows, vocab]`, and its score, `[rows]` both.

    NaN is better than anything, as with torch's `max`, which on a CPU takes ten times as long.
    """
    if scores.device.type != "cpu":
        best, tokens = scores.max(-1)
        return tokens, best
    numbers = scores.detach().numpy()
    tokens = numbers.argmax(-1)
    best = numbers[np.arange(len(tokens)), tokens]  # torch takes longer for few numbers
    return torch.from_numpy(tokens), torch.from_numpy(best)


def random_numbers(rows: RowMap, block: StepBlock) -> torch.Tensor:
    """The random number of each row, `[rows, 1]`, by seed, sample and position; into `block`."""
    keys = [(s.settings.seed, s.sample, len(s.tokens) + depth) for _, s, depth in rows]
    if len(keys) < MANY:
        return block.put([[uniform(*key)] for key in keys], widest(block.device))
    return block.put(uniforms(keys)[:, None].to(widest(block.device)))
