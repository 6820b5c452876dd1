"""The warpers: what shapes the distribution that rows draw from.

Temperature; top-k (Fan, Lewis and Dauphin 2018, arXiv:1805.04833); top-p, or nucleus sampling
(Holtzman et al. 2019, arXiv:1904.09751); min-p (Nguyen et al. 2024, arXiv:2407.01082).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from jackfield.contracts import Settings, StepBlock
from jackfield.sampling.rows import RowMap
from jackfield.sampling.stage import NEVER, Stage, asking, widest

COLDEST = float(torch.finfo(torch.float32).tiny)


@dataclass(frozen=True)
class Warpers:
    """Temperature, then top-k, top-p and min-p, for the rows of a map that ask for them."""

    temperature: Stage | None
    narrowing: tuple[Stage, ...]

    @classmethod
    def of(cls, rows: RowMap, block: StepBlock, vocab_size: int) -> Warpers:
        found = (
            _top_k(rows, block, vocab_size),
            asking(rows, block, keep_top_p, lambda s: s.top_p, 1.0),
            asking(rows, block, keep_min_p, lambda s: s.min_p, 0.0),
        )
        heat = asking(rows, block, divide, lambda s: max(s.temperature, COLDEST), 1.0)
        return cls(heat, tuple(s for s in found if s is not None))

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """All of them, in this order. `scores` `[rows, vocab]` may be changed."""
        return self.narrowed(scores if self.temperature is None else self.temperature(scores))

    def narrowed(self, scores: torch.Tensor) -> torch.Tensor:
        """All but temperature. `scores` `[rows, vocab]` may be changed."""
        for stage in self.narrowing:
            scores = stage(scores)
        return scores


def divide(scores: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """`scores` `[n, vocab]` below the best of their row, divided by `temperatures` `[n, 1]` > 0.

    Relative to the best score, a tiny temperature tends to greedy instead of inf - inf.
    """
    return (scores - scores.max(-1, keepdim=True).values) / temperatures


def keep_top_k(scores: torch.Tensor, counts: torch.Tensor, most: int) -> torch.Tensor:
    """The `counts` (int64 `[n, 1]`, 1 to `most`) best scores of each row; the others are -inf.

    What is as good as the last of them stays too, as with transformers.
    """
    best = scores.topk(most, -1).values
    least = best.gather(1, counts - 1)
    return scores.masked_fill(scores < least, NEVER)


def _top_k(rows: RowMap, block: StepBlock, vocab_size: int) -> Stage | None:
    def count(settings: Settings) -> int:
        return min(settings.top_k or vocab_size, vocab_size)

    asked = {count(rows.sequences[i].settings) for i in rows.owners} - {vocab_size}
    act = partial(keep_top_k, most=max(asked, default=0))
    return asking(rows, block, act, count, vocab_size, torch.long)


def keep_top_p(scores: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The fewest tokens, best first, that have the probability `shares` (`[n, 1]`, 0 to 1).

    The other scores of `scores` `[n, vocab]` are -inf. The best stays.
    """
    ordered, order = scores.sort(dim=-1, stable=True)
    # Summed in float64 and rounded, as a CPU does it anyway: a GPU sums float32 in float32, which
    # can keep other tokens of a large vocabulary.
    summed = ordered.softmax(-1).cumsum(-1, dtype=widest(scores.device)).to(ordered.dtype)
    drop = summed <= 1 - shares
    drop[:, -1] = False
    return scores.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), NEVER)


def keep_min_p(scores: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The tokens with at least `shares` (`[n, 1]`, 0 to 1) of the best one's probability.

    The other scores of `scores` `[n, vocab]` are -inf. The best stays.
    """
    probabilities = scores.softmax(-1)
    least = shares * probabilities.max(-1, keepdim=True).values
    return scores.masked_fill(probabilities < least, NEVER)
