"""The draw: a token of each row's distribution, by the row's own random number."""

from __future__ import annotations

import torch

from jackfield.contracts import StepBlock
from jackfield.contracts.counter_rng import uniform
from jackfield.sampling.precision import widest
from jackfield.sampling.rows import RowMap


def draw(scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Tokens, int64 `[n]`, drawn from the softmax of `scores` `[n, vocab]`.

    The cumulative distribution is inverted at `numbers` (`[n, 1]`, from 0 to below 1) in float64,
    or in float32 on a device that has no other.
    """
    cumulative = scores.to(widest(scores.device)).softmax(-1).cumsum(-1)
    found = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)
    return found[:, 0].clamp(max=scores.shape[-1] - 1)


def random_numbers(rows: RowMap, block: StepBlock) -> torch.Tensor:
    """The random number of each row, `[rows, 1]`, by seed, sample and position; into `block`."""
    numbers = [[uniform(s.settings.seed, s.sample, len(s.tokens) + depth)] for _, s, depth in rows]
    return block.put(numbers, widest(block.device))
