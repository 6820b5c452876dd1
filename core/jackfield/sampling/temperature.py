"""Temperature: how far apart scores lie."""

from __future__ import annotations

import torch

from jackfield.contracts import StepBlock
from jackfield.sampling.rows import RowMap
from jackfield.sampling.stage import Stage, asking

_COLDEST = float(torch.finfo(torch.float32).tiny)


def divide(scores: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """`scores` `[n, vocab]` below the best of their row, divided by `temperatures` `[n, 1]` > 0.

    Relative to the best score, a tiny temperature tends to greedy instead of inf - inf.
    """
    return (scores - scores.max(-1, keepdim=True).values) / temperatures


def stage(rows: RowMap, block: StepBlock) -> Stage | None:
    return asking(rows, block, divide, lambda s: max(s.temperature, _COLDEST), 1.0)
