"""Min-p (Nguyen et al. 2024, arXiv:2407.01082)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jackfield.contracts import StepBlock
from jackfield.sampling.precision import NEVER
from jackfield.sampling.rows import RowMap
from jackfield.sampling.stage import Stage, asking

if TYPE_CHECKING:
    import torch


def keep_min_p(scores: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The tokens with at least `shares` (`[n, 1]`, 0 to 1) of the best one's probability.

    The other scores of `scores` `[n, vocab]` are -inf. The best stays.
    """
    probabilities = scores.softmax(-1)
    least = shares * probabilities.max(-1, keepdim=True).values
    return scores.masked_fill(probabilities < least, NEVER)


def stage(rows: RowMap, block: StepBlock) -> Stage | None:
    return asking(rows, block, keep_min_p, lambda s: s.min_p, 0.0)
