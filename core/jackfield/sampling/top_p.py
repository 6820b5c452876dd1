"""Top-p, or nucleus sampling (Holtzman et al. 2019, arXiv:1904.09751)."""

from __future__ import annotations

import torch

from jackfield.contracts import StepBlock
from jackfield.sampling.precision import NEVER, widest
from jackfield.sampling.rows import RowMap
from jackfield.sampling.stage import Stage, asking


def keep_top_p(scores: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The fewest tokens, best first, that have the probability `shares` (`[n, 1]`, 0 to 1).

    The other scores of `scores` `[n, vocab]` are -inf. The best stays.
    """
    ordered, order = scores.sort(-1)
    # Summed in float64 and rounded, as a CPU does it anyway: a GPU sums float32 in float32, which
    # can keep other tokens of a large vocabulary.
    summed = ordered.softmax(-1).cumsum(-1, dtype=widest(scores.device)).to(ordered.dtype)
    drop = summed <= 1 - shares
    drop[:, -1] = False
    return scores.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), NEVER)


def stage(rows: RowMap, block: StepBlock) -> Stage | None:
    return asking(rows, block, keep_top_p, lambda s: s.top_p, 1.0)
