"""Top-k (Fan, Lewis and Dauphin 2018, arXiv:1805.04833)."""

from __future__ import annotations

from functools import partial

import torch

from jackfield.contracts import Settings, StepBlock
from jackfield.sampling.precision import NEVER
from jackfield.sampling.rows import RowMap
from jackfield.sampling.stage import Stage, asking


def keep_top_k(scores: torch.Tensor, counts: torch.Tensor, most: int) -> torch.Tensor:
    """The `counts` (int64 `[n, 1]`, 1 to `most`) best scores of each row; the others are -inf.

    What is as good as the last of them stays too, as with transformers.
    """
    best = scores.topk(most, -1).values
    least = best.gather(1, counts - 1)
    return scores.masked_fill(scores < least, NEVER)


def stage(rows: RowMap, block: StepBlock, vocab_size: int) -> Stage | None:
    def count(settings: Settings) -> int:
        return min(settings.top_k or vocab_size, vocab_size)

    asked = {count(rows.sequences[i].settings) for i in rows.owners} - {vocab_size}
    act = partial(keep_top_k, most=max(asked, default=0))
    return asking(rows, block, act, count, vocab_size, torch.long)
